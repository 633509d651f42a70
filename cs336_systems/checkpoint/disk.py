"""Files and folders that are written completely or not at all, a run's lock, and actions on which all ranks agree.

Files and their folder are flushed (fsync) before the folder is renamed, which is the one atomic step: otherwise, at a
loss of power, the name could survive but not the contents. Then the rename is flushed.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from cs336_systems.comm import Group, agree
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, os_errors
from cs336_systems.host.text import printable

STEP = re.compile(r"step-([0-9]{8,})")
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # JSON that has other parts than expected
LONGEST = 1000  # characters of a RefusedError's message, which quotes a file
DISK_TIMEOUT = timedelta(seconds=600)  # least time that a rank waits for another's disk, which may be slow


class SaveError(UserError):
    """A checkpoint could not be written."""


class RefusedError(UserError):
    """A checkpoint is incomplete, damaged, inconsistent or of another program; a message of one line names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message[:LONGEST])[:LONGEST])


def require(true: object, message: str) -> None:
    """Raises RefusedError with the message unless `true` is true."""
    if not true:
        raise RefusedError(message)


@contextmanager
def refusing(what: str, malformed: str = "") -> Iterator[None]:
    """Put `what` before a RefusedError of the block; with `malformed`, turn MALFORMED errors into RefusedErrors."""
    try:
        yield
    except RefusedError as error:
        raise RefusedError(f"{what}: {error}") from None
    except MALFORMED as error:
        if not malformed:
            raise
        is_plain = isinstance(error, UserError | json.JSONDecodeError | UnicodeError | RecursionError)
        said = str(error) if is_plain else repr(error)
        raise RefusedError(f"{malformed}: {said:.80}") from None


def reason(error: Exception, folder: Path, needed: int = 0) -> str:
    """Describe the reason for an error in a folder; `needed` is the number of bytes that had to be written."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {str(error)[:200]}"
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            text += f", {format_bytes(shutil.disk_usage(folder).free)} free"
        return f"{text}, {format_bytes(needed)} to write" if needed else text
    return f"{text} ({Path(error.filename).name})" if error.filename else text


def together(
    topic: str, action: Callable[[], Any], folder: Path, group: Group | None, failed: str | None = None, needed: int = 0
) -> list[Any]:
    """Run an action on every rank; returns all ranks' results, JSON without NaN. If it raises on one, all raise:
    RefusedError if all errors are that, else UserError. `failed` begins the message of any other error, with `needed`
    bytes to write. Ranks wait for a slow disk. May run beside training, since it counts no collective."""
    done, problem, refused = None, "", False
    try:
        done = action()
    except UserError as error:
        problem, refused = str(error), isinstance(error, RefusedError)
    except Exception as error:
        if failed is None:
            raise
        problem = failed + reason(error, folder, needed)
    votes: list[Any] = [(done, printable(problem), refused)]  # names of files may not be Unicode
    if group is not None:
        votes = agree(topic, votes[0], group, counted=False, patience=DISK_TIMEOUT)
    if problems := [vote[1:] for vote in votes if vote[1]]:
        refused = all(refuses for _, refuses in problems)
        said = "; ".join(dict.fromkeys(problem for problem, refuses in problems if refuses == refused))
        raise (RefusedError if refused else UserError)(said)
    return [done for done, _, _ in votes]


def on_rank_0(topic: str, action: Callable[[], Any], folder: Path, group: Group, failed: str | None = "") -> Any:
    """Run an action on rank 0, and return its result or raise its error on every rank (see `together`)."""
    return together(topic, lambda: None if group.rank() else action(), folder, group, failed)[0]


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file that does not exist yet, and fsync it; returns its size and checksum. Raises OSError."""
    digest, total = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            digest.update(rest)
            total += len(rest)
            while len(rest):  # os.write may write a part only, for instance to an almost full disk
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return {"bytes": total, "sha256": digest.hexdigest()}


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk (fsync)."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and fsync them; an existing one stays as it is."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def remove_folders(folders: Iterable[Path]) -> None:
    """Rename each folder and then delete it, so that no reader finds a half of it under its name. Folders that cannot
    be removed are left for the next save, or the next run."""
    for folder in folders:
        with suppress(OSError):
            if not folder.name.startswith("."):
                folder = folder.rename(folder.with_name(f".deleting-{folder.name}-{secrets.token_hex(4)}"))
            shutil.rmtree(folder)


def kind_of(path: Path) -> str:
    """ "file", "folder", or "" for neither, such as a link, which could lead anywhere."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""


def step_name(step: int) -> str:
    """Name of a checkpoint's folder; names sort like steps."""
    return f"step-{step:08d}"


def list_checkpoints(parent: Path) -> list[Path]:
    """List folders, not links, with names of checkpoints, the oldest first; none if there is no parent. Raises OSError
    if the parent cannot be read, so that a run does not begin anew then."""
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted((int(step[1]), name) for name in names if (step := STEP.fullmatch(name)))
    return [parent / name for _, name in found if kind_of(parent / name) == "folder"]


def clean(parent: Path) -> None:
    """Remove what interrupted saves and deletions have left, as far as possible. The caller must hold the lock."""
    found = [each for each in parent.iterdir() if kind_of(each) == "folder"] if parent.is_dir() else []
    remove_folders(each for each in found if each.name.startswith((".saving-", ".deleting-")))


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Make a run's folder and hold its lock: a file with a line about its holder, or the one before. The lock ends with
    the process, however that ends. Raises UserError if another process holds it, or if it cannot be made."""
    other = "name another folder with --out DIR"
    with os_errors(f"write to {folder}", other):
        make_folder(folder)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        lock = os.fdopen(file, "r+", errors="replace")
    with lock:
        with os_errors(f"lock a file on the file system of {folder}", "name a folder on another with --out DIR"):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = lock.read(100).strip() or "of an unknown process"
                raise UserError(f"{folder} is in use by another run ({holder}); wait for its end, or {other}") from None
        yield lock
