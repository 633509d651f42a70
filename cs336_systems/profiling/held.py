"""What a rank holds in memory, told apart by what it is for."""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")


@dataclass(frozen=True)
class Held:
    """A storage: where it lies, its size in bytes, and what it is for."""

    category: str
    address: int
    nbytes: int
    device: str


def held_by(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """(category, tensor) of a model's parameters, buffers and gradients and of an optimizer's state.

    A sharded optimizer's parameters, gradients and state are those of the one that it runs, its `inner`.
    """
    if model is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            yield "parameters", tensor
            if tensor.grad is not None:
                yield "gradients", tensor.grad
    while optimizer is not None:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            yield "parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    yield "optimizer state", value
        optimizer = getattr(optimizer, "inner", None)


def describe(held: Iterable[tuple[str, Tensor]]) -> list[Held]:
    """The storages of some tensors, each once, under the first category that it was named with."""
    found: dict[int, Held] = {}
    for category, whole in held:
        tensor = whole.to_local() if hasattr(whole, "to_local") else whole  # a DTensor holds its own part
        if not _is_dense(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = Held(category, storage.data_ptr(), storage.nbytes(), storage.device.type)
    return list(found.values())


def live_storages(known: Iterable[tuple[str, Tensor]]) -> list[Held]:
    """Every other storage that a tensor known to Python holds, such as a batch, as `other`."""
    seen = {each.address for each in describe(known)}
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and type(each) in _PLAIN]
    found = describe(("other", tensor) for tensor in tensors)
    return [each for each in found if each.address not in seen]


_PLAIN = (Tensor, nn.Parameter)  # not a DTensor, whose local tensor is found by itself, nor a fake


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
