"""A run's folder, its checkpoints by step and its lock, and the agreement of all ranks on what is done there."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.checkpoint.disk import kind_of, make_folder, remove_folder
from cs336_systems.comm import Group, agree
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import printable

STEP = re.compile(r"step-([0-9]{8,})")
DISK_TIMEOUT = timedelta(seconds=600)  # how long a rank waits at least for another's disk: a slow one is no dead rank


class SaveError(UserError):
    """A checkpoint could not be written."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; earlier checkpoints are as they were")


def reason(error: Exception, folder: Path, needed: int = 0) -> str:
    """The reason for an error in a folder, as text for a message; `needed` are the bytes that were to be written."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {str(error)[:200]}"
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            text += f", {format_bytes(shutil.disk_usage(folder).free)} free"
        return f"{text}, {format_bytes(needed)} to write" if needed else text
    return printable(f"{text} ({Path(error.filename).name})" if error.filename else text)


def hear(topic: str, value: Any, group: Group, counted: bool = True) -> list[Any]:
    """Exchange a value, JSON without NaN: those of all ranks by rank. A rank whose disk is slow is waited for."""
    text = json.dumps(value, allow_nan=False)
    return [json.loads(each) for each in agree(topic, text, group, counted=counted, patience=DISK_TIMEOUT)]


def on_rank_0(
    topic: str, action: Callable[[], Any], folder: Path, group: Group, failed: str,
    error: type[UserError] = UserError, counted: bool = True,
) -> Any:  # fmt: skip
    """Run an action on rank 0 and return its result, JSON, on every rank. If it raises, every rank raises an error that
    says what has `failed`, and why."""
    done, problem = None, ""
    if group.rank() == 0:
        try:
            done = action()
        except Exception as exception:
            problem = reason(exception, folder)
    done, problem = hear(topic, [done, problem], group, counted)[0]
    if problem:
        raise error(f"{failed}: {problem}")
    return done


def step_name(step: int) -> str:
    """The name of a checkpoint's folder; names sort like steps."""
    return f"step-{step:08d}"


def list_checkpoints(parent: Path) -> list[Path]:
    """The folders, not links, that are called like checkpoints, the oldest first; none if there is no parent. Raises
    OSError if it cannot be read: a run must not begin anew then."""
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted((int(step[1]), name) for name in names if (step := STEP.fullmatch(name)))
    return [parent / name for _, name in found if kind_of(parent / name) == "folder"]


def delete_oldest(parent: Path, keep: int, newest: Path) -> None:
    """Delete all checkpoints but the last `keep` up to `newest`, as far as possible, and none of later steps. Raises
    OSError if the folder cannot be read."""
    found = list_checkpoints(parent)
    for folder in found[: found.index(newest) + 1][:-keep]:
        with suppress(OSError):  # the next save, or the next run, tries again
            remove_folder(folder)


def clean(parent: Path) -> None:
    """Remove what interrupted saves and deletions have left, as far as possible. Only for who holds the lock."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name.startswith((".saving-", ".deleting-")) and kind_of(path) == "folder":
            with suppress(OSError):
                remove_folder(path)


class Lock(NamedTuple):
    """A lock that is held, and the signature of its holder before."""

    file: int
    before: str

    def sign(self, text: str) -> None:
        """Say who holds it, in a line for those who will be refused."""
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, f"{text}\n".encode(), 0)


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a run's folder, which is made. It ends with the process, however that ends. Raises UserError if
    another process holds it, or the folder cannot be written or locked."""
    try:
        make_folder(folder)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder with --out DIR") from None
    problem = None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = error
        before = os.pread(file, 100, 0).decode(errors="replace").strip()
        if isinstance(problem, BlockingIOError):
            holder = f"{folder} is in use by another run ({before or 'of an unknown process'})"
            raise UserError(f"{holder}; wait for its end, or name another folder with --out DIR")
        if problem is not None:
            cannot = f"the file system of {folder} cannot lock a file: {problem.strerror}"
            raise UserError(f"{cannot}; name a folder on another with --out DIR")
        yield Lock(file, before)
    finally:
        os.close(file)
