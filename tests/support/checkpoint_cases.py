"""A small run to save, a check that a loaded run equals it, and ways to change what was saved."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cs336_systems.checkpoint.folder import NAME, digest, save
from cs336_systems.checkpoint.tensors import NAMES, RANDOM, VALUE, Box, Piece, my_share
from cs336_systems.comm import agree

FILE = "rank-00000-00.safetensors"
PATIENCE = 40.0  # seconds after which a process is ended, whatever it waits for


def tensors(step: int, rank: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """A run's tensors at a step, by name and kind: several dtypes, no axes, no elements. Random state is a rank's."""
    draw = torch.Generator().manual_seed(1000 * step)
    return {
        ("a.weight", VALUE): torch.randn(6, 4, generator=draw),
        ("a.weight", "exp_avg"): torch.randn(6, 4, generator=draw),
        ("b", VALUE): torch.randn(7, generator=draw).bfloat16(),
        ("scale", VALUE): torch.randn((), generator=draw, dtype=torch.float64),
        ("mask", VALUE): torch.rand(5, generator=draw) < 0.5,
        ("empty", VALUE): torch.zeros(0, 3),
        (f"{RANDOM}rank {rank}", "torch"): torch.arange(9, dtype=torch.uint8) + step + rank,
    }


def any_tensor(draw: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of a random dtype; a bool is 0 or 1."""
    dtype = draw.choice(list(NAMES))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def pieces_of(whole: dict[tuple[str, str], torch.Tensor], rank: int, ranks: int) -> list[Piece]:
    """The run of each tensor that a rank writes."""
    found = []
    for (name, kind), tensor in whole.items():
        own = name.startswith(RANDOM)
        first, last = (0, tensor.numel()) if own else my_share(tensor.numel(), rank, ranks)
        if first < last or (not tensor.numel() and rank == 0):
            found.append(Piece(name, kind, Box.whole(tensor.shape), first, tensor.reshape(-1)[first:last]))
    return found


def save_step(parent: Path, step: int, group, keep: int = 2) -> Path:
    """Save a step of the small run."""
    pieces = pieces_of(tensors(step, group.rank()), group.rank(), group.size())
    return save(parent, step, pieces, {"a.weight": {"step": step}}, {"step": step}, group, keep)


def save_steps(group, parent: str, steps: Sequence[int], keep: int = 2) -> list[str]:
    """Save several; what the folder has then."""
    for step in steps:
        save_step(Path(parent), step, group, keep)
    agree("saved", "", group)
    return sorted(path.name for path in Path(parent).iterdir())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_step(checkpoint, step: int, ranks: int = 1) -> bool:
    """True if a checkpoint is that of a step, bit for bit."""
    wanted = {key: tensor for rank in range(ranks) for key, tensor in tensors(step, rank).items()}
    found = {(name, kind) for name, kinds in checkpoint.tensors.items() for kind in kinds}
    same = found == set(wanted) and all(
        checkpoint.tensors[name][kind].shape == tuple(tensor.shape)
        and checkpoint.read(name, kind, Box.whole(tensor.shape)).dtype == tensor.dtype
        and bits(checkpoint.read(name, kind, Box.whole(tensor.shape))) == bits(tensor)
        for (name, kind), tensor in wanted.items()
    )
    about = (checkpoint.step, checkpoint.scalars, checkpoint.state)
    return same and about == (step, {"a.weight": {"step": step}}, {"step": step})


def sign(folder: Path, body: Any) -> None:
    """Write a manifest with the checksum that belongs to it."""
    (folder / NAME).write_text(json.dumps({"manifest": body, "sha256": digest(body)}))


def rewrite(folder: Path, change: Callable[[dict], Any]) -> None:
    """Change a manifest so that all checksums are right again, as somebody would who wants it to be believed."""
    body = json.loads((folder / NAME).read_text())["manifest"]
    for name, file in body["files"].items():
        data = (folder / name).read_bytes()
        file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    change(body)
    sign(folder, body)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)
