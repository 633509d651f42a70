"""Bytes that a rank holds, counted from live storages, independently of the library's own counts."""

import gc
import time
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.lib.turns import Arena
from benchmarks.rank_times import gather_times
from cs336_systems.model.transformer import lm_loss


@dataclass(frozen=True)
class Held:
    """Bytes on the rank with the most: after initialisation, added by backward, added by the first step; and what
    forward keeps for backward."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int


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


def saved_bytes(arena: Arena, trained: torch.nn.Module, ignored: dict[int, torch.UntypedStorage]) -> tuple[Tensor, int]:
    """The loss of a forward pass, and the bytes of storages that it keeps for backward and that were not there."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = lm_loss(trained, arena.tokens, arena.targets)
    return loss, sum(kept.values())


def held_by(arena: Arena, name: str) -> Held:
    """One candidate's memory on this rank, from a first step."""
    gc.collect()
    others = storages()
    trained = arena.build(name)
    start = live_bytes(others)
    loss, activations = saved_bytes(arena, trained.model, storages())
    loss.backward()
    trained.finish()
    del loss
    before = live_bytes(others)
    trained.optimizer.step()
    after = live_bytes(others)
    return Held(start, before - start, after - before, activations)


def held_memory(arena: Arena) -> dict[str, Held]:
    """Every candidate's memory on the rank where the sum of its parts is the largest."""
    found = {}
    for name in arena.candidates:
        figures = gather_times(astuple(held_by(arena, name)), arena.group, arena.device)
        fullest = figures[figures[:, :3].sum(dim=1).argmax()]
        found[name] = Held(*map(int, fullest.tolist()))
    return found
