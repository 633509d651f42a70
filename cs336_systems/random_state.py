"""The states of this process's random number generators: at the beginning, in a checkpoint and back.

Training itself draws nothing from them: weights, batches and dropout are functions of the seed and a place, so they are
the same in every layout. Whoever adds something that does draw, an augmentation say, resumes with the same bits all
the same, at the same number of ranks.
"""

import random
from collections.abc import Callable
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


def restore_random(source: Checkpoint, rank: int, device: torch.device) -> bool:
    """Go on from the states of the rank of this number; False, and nothing is changed, if the checkpoint has none."""
    gpu = partial(torch.cuda.set_rng_state, device=device) if device.type == "cuda" else None
    return _take(source, rank, torch.set_rng_state, random.setstate, np.random.set_state, gpu)


def random_problem(source: Checkpoint, rank: int, device: torch.device) -> str:
    """Why the states of a rank cannot be taken up, found with generators that nobody uses; nothing if they can."""
    gpu = torch.Generator(device).set_state if device.type == "cuda" else None
    try:
        _take(
            source, rank, torch.Generator().set_state, random.Random().setstate, np.random.RandomState().set_state, gpu
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        return f"the random number generators of rank {rank} cannot be set: {error!r:.80}"
    return ""


def _take(
    source: Checkpoint,
    rank: int,
    set_torch: Callable[[Tensor], object],
    set_python: Callable[[Any], object],
    set_numpy: Callable[[Any], object],
    set_cuda: Callable[[Tensor], object] | None,
) -> bool:
    name = f"{RANDOM}rank {rank}"
    if name not in source.tensors:
        return False
    saved = {kind: source.read(name, kind, Box.whole(entry.shape)) for kind, entry in source.tensors[name].items()}
    scalars = source.scalars.get(name, {})
    set_torch(saved["torch"])
    set_python((3, tuple(saved["python"].tolist()), scalars.get("python gauss")))
    *key, position = saved["numpy"].tolist()
    gauss = scalars.get("numpy gauss")
    set_numpy(("MT19937", np.array(key, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0))
    if set_cuda is not None and "cuda" in saved:
        set_cuda(saved["cuda"])
    return True
