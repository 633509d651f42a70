"""Bytes that a rank holds, counted from live storages, independently of the library's own counts."""

import gc
import time

import torch
from torch import Tensor

from benchmarks.harness import saved_storages
from benchmarks.lib.turns import Arena
from benchmarks.rank_times import gather_times
from cs336_systems.model.transformer import lm_loss

PARTS = ("parameters", "gradients", "optimizer", "activations")


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a tensor known to Python holds, gradients included, by address."""
    from torch.distributed.tensor import DTensor  # here, because the import takes seconds

    found: dict[int, torch.UntypedStorage] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor) or issubclass(type(each), DTensor):
            continue  # a DTensor's local tensor is found by itself
        for tensor in (each, each.grad if each.is_leaf else None):
            if tensor is not None and not isinstance(tensor, DTensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
    return found


def live_bytes(ignored: dict[int, torch.UntypedStorage]) -> int:
    """Bytes alive, except in some storages, which are kept alive so that no new one takes the address of theirs."""
    time.sleep(0.05)  # gloo's threads let go of a tensor a little after they are done with it
    gc.collect()
    return sum(storage.nbytes() for address, storage in storages().items() if address not in ignored)


def held_by(arena: Arena, name: str) -> list[int]:
    """Bytes of one candidate's `PARTS` on this rank, from a first step: there after initialisation, added by backward,
    added by the step; and the storages that forward keeps for backward and that were not there before."""
    gc.collect()
    others = storages()
    trained = arena.build(name)
    start, known = live_bytes(others), storages()
    with saved_storages() as saved:
        loss = lm_loss(trained.model, arena.tokens, arena.targets)
    activations = sum(storage.nbytes() for address, storage in saved.items() if address not in known)
    saved.clear()
    del known
    loss.backward()
    trained.finish()
    del loss
    before = live_bytes(others)
    trained.optimizer.step()
    return [start, before - start, live_bytes(others) - before, activations]


def held_memory(arena: Arena) -> dict[str, dict[str, int]]:
    """Every candidate's bytes by part on the rank where the sum of all but the activations is the largest."""
    found = {}
    for name in arena.candidates:
        figures = gather_times(held_by(arena, name), arena.group, arena.device)
        fullest = figures[figures[:, :3].sum(dim=1).argmax()]
        found[name] = dict(zip(PARTS, map(int, fullest.tolist()), strict=True))
    return found
