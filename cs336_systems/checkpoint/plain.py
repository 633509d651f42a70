"""One plain safetensors file of whole parameters by name: what other programs read and write.

It has neither an optimizer's state nor a checksum. Opened, it has the face of a checkpoint, so a run may begin from it
in any layout.
"""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import sync_folder, write_file
from cs336_systems.checkpoint.load import Checkpoint
from cs336_systems.checkpoint.manifest import Entry, File, Manifest, Stored
from cs336_systems.checkpoint.pieces import RANDOM, VALUE, Box, Piece
from cs336_systems.checkpoint.tensors import NAMES, contents, read_header
from cs336_systems.errors import UserError


def weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, in the order of names."""
    for name in sorted(checkpoint.tensors):
        if VALUE in checkpoint.tensors[name] and not name.startswith(RANDOM):
            yield name, checkpoint.read(name, VALUE, Box.whole(checkpoint.tensors[name][VALUE].shape))


def weights_hash(checkpoint: Checkpoint) -> str:
    """The SHA-256 of all parameters: equal if and only if every bit is, whatever the layout that wrote them."""
    digest = hashlib.sha256()
    for name, tensor in weights(checkpoint):
        digest.update(f"{name} {NAMES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export_plain(checkpoint: Checkpoint, path: Path) -> int:
    """Write all parameters to a new file, which holds the whole model in memory; returns how many there are.

    Raises UserError if the file exists or cannot be written.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        if path.exists():
            raise UserError(f"{path} exists already; name another file")
        pieces = [Piece(name, VALUE, Box.whole(each.shape), 0, each) for name, each in weights(checkpoint)]
        write_file(temporary, contents(pieces, {}))
        os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return len(pieces)


def open_plain(path: Path) -> Checkpoint:
    """A plain safetensors file as a checkpoint that has parameters only. Raises UserError for what is none."""
    try:
        header, size = read_header(path), path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    tensors = {}
    for name, tensor in header.tensors.items():
        shape, (begin, end) = tuple(tensor["shape"]), tensor["data_offsets"]
        box = Box.whole(shape)
        piece = Stored(path.name, name, (begin, end), box, 0, box.numel)
        tensors[name] = {VALUE: Entry(shape, tensor["dtype"], (piece,))}
    manifest = Manifest(0, {path.name: File(size, "")}, tensors, {}, {})
    return Checkpoint(path.parent, manifest, {path.name: header})
