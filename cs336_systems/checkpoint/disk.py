"""Files that are whole or not there: all bytes reach the disk before a folder gets its name.

    write files -> fsync each -> fsync their folder -> rename the folder -> fsync its parent

The rename is the one atomic step. A process killed before it leaves a folder whose name no reader looks for; one killed
after it leaves a checkpoint. The two fsyncs around it are for a loss of power: without the first the name could survive
and the contents not.
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

WRITE_BYTES = 1 << 24  # bytes in one call
DISK_TIMEOUT = timedelta(seconds=600)  # how long a rank waits at least for another's disk: a slow one is no dead rank


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
        for start in range(0, len(view), WRITE_BYTES):
            piece = view[start : start + WRITE_BYTES]
            if len(held) + len(piece) > WRITE_BYTES:
                yield memoryview(held)
                held = bytearray()
            held += piece
    yield memoryview(held)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk. Raises OSError."""
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


def give_name(folder: Path, name: Path) -> None:
    """Rename a full folder, for good when this returns. Raises OSError, and for a name that is taken in particular."""
    if os.path.lexists(name):  # rename would replace an empty folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(name))
    sync_folder(folder)
    os.rename(folder, name)
    sync_folder(name.parent)


def remove_folder(folder: Path) -> None:
    """Take away the name of a folder, then what is in it: no half of it is ever seen under its name. Raises OSError."""
    if not folder.name.startswith("."):
        hidden = folder.with_name(f".deleting-{folder.name}-{secrets.token_hex(4)}")
        os.rename(folder, hidden)
        folder = hidden
    shutil.rmtree(folder)


def kind_of(path: Path) -> str:
    """ "file", "folder", or "" for neither, such as a link, which could lead anywhere. Raises OSError."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""
