"""Wrappers of other systems by name, and delays of their collectives: the one file of check/ that uses
torch.distributed, as a user's code does."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

from cs336_systems.errors import UserError


class Late:
    """A collective that starts only when its result is waited for."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._work = cache(start)  # once

    def __getattr__(self, name: str) -> Any:
        """Start the collective for whoever waits for it, asks for its future, or if it has ended."""
        return getattr(self._work(), name)


@contextmanager
def late_collectives() -> Iterator[None]:
    """Delay asynchronous collectives of torch.distributed until they are waited for, so that a missing wait shows, also
    for modules that have imported them by name."""
    found = [each for each in vars(import_module("torch.distributed")).values() if type(each) is FunctionType]
    late = {id(each): _late(each) for each in found if "async_op" in inspect.signature(each).parameters}
    with ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if hasattr(module, "__dict__") and (path == "torch.distributed" or path.partition(".")[0] != "torch"):
                held: Any = {name: late[id(each)] for name, each in list(vars(module).items()) if id(each) in late}
                stack.enter_context(mock.patch.multiple(module, **held) if held else ExitStack())
        yield


def _late(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if signature.bind(*arguments, **named).arguments.get("async_op"):
            return Late(lambda: function(*arguments, **named))
        return function(*arguments, **named)

    return called


@cache
def _counter() -> Counter[str]:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counts = Counter[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in function.namespace and "wait" not in (name := function.overloadpacket.__name__):
                counts["elements"] += sum(x.numel() for x in tree_leaves((args, kwargs)) if hasattr(x, "numel"))
                counts["reductions"] += "reduce" in name
            return function(*args, **(kwargs or {}))

    Counting().__enter__()
    return counts


def count_collectives() -> Counter[str]:
    """Count anew, from now on in this process, all-reduces and reduce-scatters that are launched ("reductions"), and
    elements of all tensors that any collective or message is given ("elements"), in torch's dispatcher, where all pass
    but calls of a process group's backend itself."""
    counts = _counter()
    counts.clear()
    return counts


def exchange(piece: Any, into: Any) -> None:
    """Send a tensor to the next rank of a ring, and receive one from the rank before."""
    dist = import_module("torch.distributed")
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(piece.contiguous(), (rank + 1) % world)
    dist.recv(into, (rank - 1) % world)
    sent.wait()


FOREIGN = {  # wrappers of other systems: kind, the module that has them, and their name in it
    "torch:ddp": ("ddp", "torch.nn.parallel", "DistributedDataParallel"),
    "torch:fsdp2": ("fsdp", "torch.distributed.fsdp", "fully_shard"),
    "torch:zero": ("sharded-optimizer", "torch.distributed.optim", "ZeroRedundancyOptimizer"),
    "accelerate": ("ddp", "accelerate", "Accelerator"),
    "deepspeed:zero1": ("ddp", "deepspeed", "DeepSpeedEngine"),
}


def require_installed(name: str) -> None:
    """Raises UserError where the module of another system's wrapper is not installed, or cannot be checked."""
    module = FOREIGN[name][1]
    if find_spec(module.partition(".")[0]) is None:
        raise UserError(f"{name}: {module} is not installed here; pip install {module}")
    if name == "deepspeed:zero1":  # it also compiles extensions when it starts
        raise UserError("deepspeed:zero1 is not supported: its engine calls backward and step itself")


def foreign(target: str) -> tuple[str, Any]:
    """Kind of a wrapper of another system, and the wrapper, which is imported once, before ranks are forked."""
    kind, module, name = FOREIGN[target]
    with catch_warnings():
        simplefilter("ignore")  # their own deprecations
        return kind, getattr(import_module(module), name)
