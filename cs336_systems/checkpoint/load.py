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
from typing import Any

import torch
from torch import Tensor

from cs336_systems.checkpoint.disk import hash_file, sync_folder, write_file
from cs336_systems.checkpoint.folder import STEP, hear, list_checkpoints, on_rank_0, reason
from cs336_systems.checkpoint.manifest import NAME, read_manifest
from cs336_systems.checkpoint.pieces import RANDOM, VALUE, Box, Piece
from cs336_systems.checkpoint.tensors import NAMES, RefusedError, Scalars, Tensors, contents, list_tensors, read_box
from cs336_systems.comm import Group
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors in files that have been checked; `read` gives any box of any of them."""

    folder: Path
    step: int
    files: dict[str, dict[str, Any]]  # size and checksum of each
    tensors: Tensors
    scalars: Scalars  # of an optimizer's state, such as a parameter's count of steps
    state: dict[str, Any]

    def read(self, name: str, kind: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU. Raises KeyError for what is not there."""
        return read_box(self.folder, self.tensors[name][kind], box)


def open_checkpoint(folder: Path, group: Group | None = None) -> Checkpoint:
    """Check everything, each file's SHA-256 on one rank of the group, and open it. Every rank must call this. Raises,
    the same on every rank, RefusedError for what it holds, and UserError if a rank cannot read it: that may pass, and
    is no reason to give it up."""
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
    body = read_manifest(folder)
    step, files = body["step"], body["files"]
    if (named := STEP.fullmatch(folder.name)) and int(named[1]) != step:
        raise RefusedError(f"{folder.name}/{NAME} is of another checkpoint, that of step {step}")
    for number, (name, file) in enumerate(files.items()):
        if number % ranks == rank and (found := hash_file(folder / name)) != file["sha256"]:
            damaged = f"{folder.name}/{name} is damaged, or of another checkpoint"
            raise RefusedError(f"{damaged}: its SHA-256 begins with {found[:12]}, not {file['sha256'][:12]}")
    try:
        tensors, scalars = list_tensors(folder / name for name in files)
    except RefusedError as error:
        raise RefusedError(f"{folder.name}: {error}") from None
    return Checkpoint(folder, step, files, tensors, scalars, body["state"])


def open_newest(
    parent: Path, group: Group, accept: Callable[[Checkpoint], str], say: Callable[[str], object]
) -> Checkpoint | None:
    """The newest checkpoint of a folder that is whole and that `accept` gives no reason against; None if there is none.
    Every rank must call this. What is refused is renamed, and `say` is told the reason, on every rank. Raises UserError
    if there are checkpoints but all are refused, if one cannot be read, and if one that is refused keeps its name."""

    def names_there() -> list[str]:
        return [path.name for path in list_checkpoints(parent)]

    def rename(refused: Path) -> str:
        return refused.rename(f"{refused}.refused-{secrets.token_hex(2)}").name

    refused: dict[str, str] = {}
    for name in reversed(on_rank_0("checkpoints", names_there, parent, group, f"cannot read {parent}")):
        try:
            checkpoint = open_checkpoint(parent / name, group)
            if problem := next(filter(None, hear("checkpoint fits", printable(accept(checkpoint)), group)), ""):
                raise RefusedError(f"{name}: {problem}")
        except RefusedError as error:
            refused[name] = str(error)
            continue
        for other, problem in refused.items():  # their names are freed: the run will come to those steps again
            failed = f"cannot rename {parent / other}, refused as {problem}"
            aside = on_rank_0("set aside", partial(rename, parent / other), parent, group, failed)
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
    """Write all parameters to a new file, which holds the whole model in memory; returns how many there are. Raises
    UserError if the file exists or cannot be written."""
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
        tensors, scalars = list_tensors([path], plain=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return Checkpoint(path.parent, 0, {}, tensors, scalars, {})
