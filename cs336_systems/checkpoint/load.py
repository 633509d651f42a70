"""Checkpoints opened and verified, the newest that can be, and plain files of weights.

A plain file is what other programs read and write: whole parameters by name, with neither optimizer state nor checksum.
Opened, it has the face of a checkpoint, so a run may begin from it in any layout.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import hash_file, sync_folder, write_file
from cs336_systems.checkpoint.folder import STEP, hear, list_checkpoints, on_rank_0, reason, set_aside
from cs336_systems.checkpoint.manifest import NAME, Entry, File, Manifest, RefusedError, Scalars, Stored, read_manifest
from cs336_systems.checkpoint.pieces import RANDOM, VALUE, Box, Piece
from cs336_systems.checkpoint.tensors import NAMES, Header, check_header, contents, read_box, read_header
from cs336_systems.comm import Group
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors in files that are what their manifest says; `read` gives any box of any of them."""

    folder: Path
    manifest: Manifest
    headers: dict[str, Header]

    @property
    def tensors(self) -> dict[str, dict[str, Entry]]:
        return self.manifest.tensors

    @property
    def scalars(self) -> Scalars:
        """Numbers of an optimizer's state that belong to a parameter, such as its count of steps."""
        return self.manifest.scalars

    def read(self, name: str, kind: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU. Raises KeyError for what is not there."""
        return read_box(self.folder, self.headers, self.tensors[name][kind], box)


def open_checkpoint(folder: Path, group: Group | None = None) -> Checkpoint:
    """Check everything, each file's SHA-256 on one rank of the group, and open it. Every rank must call this.

    Raises, the same on every rank, RefusedError for what it holds, and UserError if a rank cannot read it: that may
    pass, and is no reason to give it up.
    """
    checkpoint, refused, unread = None, "", ""
    try:
        checkpoint = _open(folder, *((group.rank(), group.size()) if group else (0, 1)))
    except (RefusedError, FileNotFoundError) as error:
        refused = printable(str(error))  # names from a file may not even be Unicode
    except OSError as error:
        why = f"cannot read {folder}: {reason(error, folder)}"
        unread = printable(f"{why}; nothing was changed: try again, or move it away")
    votes = hear("checkpoint read", (unread, refused), group) if group else [(unread, refused)]
    for kind, problems in zip((UserError, RefusedError), zip(*votes, strict=True), strict=True):
        if any(problems):
            raise kind(next(filter(None, problems)))
    assert checkpoint is not None
    return checkpoint


def _open(folder: Path, rank: int, ranks: int) -> Checkpoint:
    manifest = read_manifest(folder)
    if (named := STEP.fullmatch(folder.name)) and int(named[1]) != manifest.step:
        raise RefusedError(f"{folder.name}/{NAME} is of another checkpoint, that of step {manifest.step}")
    for number, (name, file) in enumerate(manifest.files.items()):
        if number % ranks == rank and (found := hash_file(folder / name)) != file.sha256:
            damaged = f"{folder.name}/{name} is damaged, or of another checkpoint"
            raise RefusedError(f"{damaged}: its SHA-256 begins with {found[:12]}, not {file.sha256[:12]}")
    pieces: dict[str, dict[str, tuple[str, str, Entry, Stored]]] = {name: {} for name in manifest.files}
    for name, kinds in manifest.tensors.items():
        for kind, entry in kinds.items():
            for piece in entry.pieces:
                pieces[piece.file][piece.key] = name, kind, entry, piece
    try:
        headers = {name: check_header(folder / name, pieces[name]) for name in pieces}
    except RefusedError as error:
        raise RefusedError(f"{folder.name}/{error}") from None
    return Checkpoint(folder, manifest, headers)


def open_newest(
    parent: Path, group: Group, accept: Callable[[Checkpoint], str], say: Callable[[str], object]
) -> Checkpoint | None:
    """The newest checkpoint of a folder that is whole and that `accept` gives no reason against; None if there is none.

    Every rank must call this. What is refused is renamed, and `say` is told the reason, on every rank. Raises UserError
    if there are checkpoints but all are refused, if one cannot be read, and if one that is refused keeps its name.
    """

    def names_there() -> list[str]:
        return [path.name for path in list_checkpoints(parent)]

    names = on_rank_0("checkpoints", names_there, parent, group, f"cannot read {parent}")
    refused: dict[str, str] = {}
    for name in reversed(names):
        try:
            checkpoint = open_checkpoint(parent / name, group)
            if problem := next(filter(None, hear("checkpoint fits", printable(accept(checkpoint)), group)), ""):
                raise RefusedError(f"{name}: {problem}")
        except RefusedError as error:
            refused[name] = str(error)
            continue
        for other, problem in refused.items():  # their names are freed: the run will come to those steps again
            rename, failed = partial(set_aside, parent / other), f"cannot rename {parent / other}, refused as {problem}"
            aside = on_rank_0("set aside", rename, parent, group, failed)
            say(f"refused {problem}; going back to {name} ({other} is now called {aside})")
        return checkpoint
    if refused:
        raise UserError(f"no checkpoint in {parent} can be used: {'; '.join(refused.values())}")
    return None


def weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The parameters, whole, in the order of names."""
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
        box = Box.whole(tensor["shape"])
        piece = Stored(path.name, name, tuple(tensor["data_offsets"]), box, 0, box.numel)
        tensors[name] = {VALUE: Entry(box.shape, tensor["dtype"], (piece,))}
    manifest = Manifest(0, {path.name: File(size, "")}, tensors, {}, {})
    return Checkpoint(path.parent, manifest, {path.name: header})
