"""The storages that a rank holds, by category: parameters, gradients, optimizer state, activations, other."""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")


@dataclass(frozen=True)
class Held:
    """A storage: its category, address, size in bytes and type of device."""

    category: str
    address: int
    nbytes: int
    device: str


def held_by(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """(category, tensor) of a model's parameters, buffers and gradients and of an optimizer's state.

    A sharded optimizer's parameters, gradients and state are those of the one that it runs, its `inner`.
    """
    parameters: list[Tensor] = [*model.parameters(), *model.buffers()] if model is not None else []
    states: list[Tensor] = []
    while optimizer is not None:
        parameters += [each for group in optimizer.param_groups for each in group["params"]]
        for state in optimizer.state.values():
            states += [each for each in state.values() if isinstance(each, Tensor)] if isinstance(state, dict) else []
        optimizer = getattr(optimizer, "inner", None)
    for parameter in parameters:
        yield "parameters", parameter
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    yield from (("optimizer state", each) for each in states)


def describe(held: Iterable[tuple[str, Tensor]]) -> list[Held]:
    """The storages of some tensors, each once, under the first category given for it."""
    found: dict[int, Held] = {}
    for category, whole in held:
        tensor = whole.to_local() if hasattr(whole, "to_local") else whole  # a DTensor holds its own part
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = Held(category, storage.data_ptr(), storage.nbytes(), storage.device.type)
    return list(found.values())


def live_storages(known: Iterable[tuple[str, Tensor]]) -> list[Held]:
    """Every other storage that a tensor known to Python holds, such as a batch, as `other`."""
    seen = {each.address for each in describe(known)}
    gc.collect()
    plain = (Tensor, nn.Parameter)  # not a DTensor, whose local tensor is found by itself, nor a fake
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and type(each) in plain]
    return [each for each in describe(("other", tensor) for tensor in tensors) if each.address not in seen]
