"""States of this process's random number generators: seeding them, saving them to a checkpoint and restoring them.

Training itself draws nothing from them: weights, batches and dropout are functions of the seed and a position, so they
are the same in every layout. Code that does draw from them, an augmentation say, still resumes bit for bit at the same
number of ranks.
"""

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cs336_systems.checkpoint import RANDOM, Box, Checkpoint, Piece, Scalars


def seed_generators(seed: int, rank: int) -> None:
    """Set the generators of torch, on every device, of Python and of numpy: each rank's are its own."""
    words = np.random.SeedSequence((seed, rank)).generate_state(3)
    torch.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(int(words[2]))


def random_pieces(rank: int, device: torch.device) -> tuple[list[Piece], Scalars]:
    """The states of torch, of the rank's GPU, of Python and of numpy."""
    name = f"{RANDOM}rank {rank}"
    _, words, gauss = random.getstate()
    keys = np.random.get_state(legacy=False)
    state = keys["state"]
    found: dict[str, Tensor] = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "numpy": torch.tensor([*state["key"].tolist(), state["pos"]]),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    scalars: dict[str, float | int] = {} if gauss is None else {"python gauss": gauss}
    scalars |= {"numpy gauss": keys["gauss"]} if keys["has_gauss"] else {}
    pieces = [Piece(name, kind, Box.whole(tensor.shape), 0, tensor) for kind, tensor in found.items()]
    return pieces, {name: scalars} if scalars else {}


def _read(source: Checkpoint, rank: int) -> dict[str, Any]:
    """The states of a rank's generators in the form that each takes; none if the checkpoint has none of this rank."""
    name = f"{RANDOM}rank {rank}"
    if name not in source.tensors:
        return {}
    saved = {kind: source.read(name, kind, Box.whole(entry.shape)) for kind, entry in source.tensors[name].items()}
    scalars = source.scalars.get(name, {})
    *key, position = saved["numpy"].tolist()
    gauss = scalars.get("numpy gauss")
    return saved | {
        "python": (3, tuple(saved["python"].tolist()), scalars.get("python gauss")),
        "numpy": ("MT19937", np.array(key, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0),
    }


def restore_random(source: Checkpoint, rank: int, device: torch.device, spare: bool = False) -> bool:
    """Restore the generators of the rank of this number, or try with `spare` ones; returns False, and changes nothing,
    if none are saved."""
    if states := _read(source, rank):
        (torch.Generator() if spare else torch.default_generator).set_state(states["torch"])
        (random.Random() if spare else random).setstate(states["python"])
        (np.random.RandomState() if spare else np.random).set_state(states["numpy"])
        if device.type == "cuda" and "cuda" in states:
            set_state = torch.Generator(device).set_state if spare else partial(torch.cuda.set_rng_state, device=device)
            set_state(states["cuda"])
    return bool(states)


def random_problem(source: Checkpoint, rank: int, device: torch.device) -> str:
    """The reason why a rank's saved states cannot be restored, found with spare generators; "" if they can."""
    try:
        restore_random(source, rank, device, spare=True)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        return f"the random number generators of rank {rank} cannot be set: {error!r:.80}"
    return ""
