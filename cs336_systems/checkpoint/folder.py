"""A run's folder: its checkpoints by step, its lock, and what an interrupted save or deletion has left."""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cs336_systems.checkpoint.disk import is_plain_folder, make_folder, remove_folder
from cs336_systems.errors import UserError

STEP = re.compile(r"step-([0-9]{8,})")
UNFINISHED = re.compile(r"\.(saving|deleting)-.*")


def step_name(step: int) -> str:
    """What a checkpoint's folder is called: in the order of names as of steps."""
    return f"step-{step:08d}"


def list_checkpoints(parent: Path) -> list[Path]:
    """The folders that are called like checkpoints, the oldest first; no links.

    A folder that does not exist has none. Raises OSError for one that cannot be read: a run must not begin anew then.
    """
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted((int(step[1]), name) for name in names if (step := STEP.fullmatch(name)))
    return [parent / name for _, name in found if is_plain_folder(parent / name)]


def set_aside(folder: Path) -> str:
    """Give a refused checkpoint another name, which is returned. Raises OSError."""
    aside = folder.with_name(f"{folder.name}.refused-{secrets.token_hex(2)}")
    os.rename(folder, aside)
    return aside.name


def delete_oldest(parent: Path, keep: int, newest: Path) -> None:
    """Delete all checkpoints but the last `keep` up to `newest`, as far as possible. Of later steps none is deleted.

    Raises OSError if the folder cannot be read.
    """
    found = list_checkpoints(parent)
    for folder in found[: found.index(newest) + 1][:-keep]:
        with suppress(OSError):  # the next save, or the next run, tries again
            remove_folder(folder)


def clean(parent: Path) -> None:
    """Remove what interrupted saves and deletions have left, as far as possible. Only for who holds the lock."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if UNFINISHED.fullmatch(path.name) and is_plain_folder(path):
            with suppress(OSError):
                remove_folder(path)


class Lock:
    """A lock that is held: `before` is how the one who held it before has signed."""

    def __init__(self, file: int) -> None:
        self.file, self.before = file, _signature(file)

    def sign(self, text: str) -> None:
        """Say who holds it, in a line for those who will be refused."""
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, f"{text}\n".encode(), 0)


def _signature(file: int) -> str:
    return os.pread(file, 100, 0).decode(errors="replace").strip()


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a run's folder, which is made. It ends with the process, however that ends.

    Raises UserError if another process holds it, or the folder cannot be written or locked.
    """
    try:
        make_folder(folder)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder with --out DIR") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by another run ({_signature(file) or 'of an unknown process'}); wait for its end, "
                "or name another folder with --out DIR"
            ) from None
        except OSError as error:
            raise UserError(
                f"the file system of {folder} cannot lock a file: {error.strerror}; name a folder on another with "
                "--out DIR"
            ) from None
        yield Lock(file)
    finally:
        os.close(file)
