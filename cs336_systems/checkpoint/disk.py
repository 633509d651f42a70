"""Files that are whole or not there: what is written reaches the disk, and a folder gets its name only when it is full.

    write files -> fsync each -> fsync their folder -> rename the folder -> fsync its parent

A rename is the one step that is atomic. Whoever is killed before it leaves a folder with a name that nobody reads, and
whoever is killed after it leaves a checkpoint. The two fsyncs around it are for a loss of power: without the first the
name could survive and the contents not.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

WRITE = 1 << 24  # bytes in one call
PATIENCE = timedelta(seconds=600)  # how long a rank waits at least for another's disk: a slow one is no dead rank


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Make a file that does not exist yet, on the disk when this returns: (bytes, SHA-256). Raises OSError."""
    digest, total = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        for piece in _in_calls(chunks):
            digest.update(piece)
            total += len(piece)
            while len(piece):  # a disk that is almost full takes a part
                piece = piece[os.write(file, piece) :]
        os.fsync(file)
    finally:
        os.close(file)
    return total, digest.hexdigest()


def _in_calls(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes, no more than one call takes at a time; what is small goes together, as most tensors are."""
    held = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), WRITE):
            piece = view[start : start + WRITE]
            if len(held) + len(piece) > WRITE:
                yield memoryview(held)
                held = bytearray()
            held += piece
    yield memoryview(held)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and those it lies in, on the disk when this returns; one that exists is left. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def new_folder(parent: Path, prefix: str) -> Path:
    """A folder whose name nobody else has. Raises OSError."""
    path = parent / f"{prefix}-{secrets.token_hex(4)}"
    os.mkdir(path)
    return path


def give_name(folder: Path, name: Path) -> None:
    """Rename a full folder, for good when this returns. Raises OSError, and for a name that is taken in particular."""
    if os.path.lexists(name):  # rename would replace an empty folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(name))
    sync_folder(folder)
    os.rename(folder, name)
    sync_folder(name.parent)


def remove_folder(folder: Path, prefix: str = ".deleting") -> None:
    """Take away the name of a folder, then what is in it: no half of it is ever seen under its name. Raises OSError."""
    if not folder.name.startswith("."):
        hidden = folder.with_name(f"{prefix}-{folder.name}-{secrets.token_hex(4)}")
        os.rename(folder, hidden)
        folder = hidden
    shutil.rmtree(folder)


def is_plain_file(path: Path) -> bool:
    """Whether it is a file and no link to one, which might be anywhere. Raises OSError if the system cannot tell."""
    return stat.S_ISREG(_mode(path))


def is_plain_folder(path: Path) -> bool:
    """Whether it is a folder and no link to one. Raises OSError if the system cannot tell."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0  # of no kind
