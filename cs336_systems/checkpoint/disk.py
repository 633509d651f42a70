"""Files that are whole or not there: all bytes reach the disk before a folder gets its name.

    write files -> fsync each -> fsync their folder -> rename the folder -> fsync its parent

The rename is the one atomic step. A process killed before it leaves a folder whose name no reader looks for; one killed
after it leaves a checkpoint. The two fsyncs around it are for a loss of power: without the first the name could survive
and the contents not. Every function raises OSError.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Make a file that does not exist yet, on the disk when this returns: its size and checksum."""
    digest, total = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            digest.update(rest)
            total += len(rest)
            while len(rest):  # a disk that is almost full takes a part
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return {"bytes": total, "sha256": digest.hexdigest()}


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and those it lies in, on the disk when this returns; one that exists is left."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def give_name(folder: Path, name: Path) -> None:
    """Rename a full folder to a name that is free, for good when this returns."""
    if os.path.lexists(name):  # rename would replace an empty folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(name))
    sync_folder(folder)
    os.rename(folder, name)
    sync_folder(name.parent)


def remove_folder(folder: Path) -> None:
    """Take away the name of a folder, then what is in it: no half of it is ever seen under its name."""
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
