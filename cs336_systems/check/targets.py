"""Targets, kinds and exercises that a command line may name, read without loading torch; and what is done to the
collectives of a user's code: the one file of check/ that uses torch.distributed, by name."""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

from cs336_systems.errors import UserError

KINDS = ("ddp", "fsdp", "sharded-optimizer", "step", "tensor-parallel")
TYPED_RANKS = 64  # of a group of which one rank runs, to check types
OURS = ("ddp-naive", "ddp-flat", "ddp-overlapped", "ddp-bucketed", "zero0", "zero1", "zero2", "zero3")
FOREIGN = {  # wrappers of other systems: kind, the module that has them, and their name in it
    "torch:ddp": ("ddp", "torch.nn.parallel", "DistributedDataParallel"),
    "torch:fsdp2": ("fsdp", "torch.distributed.fsdp", "fully_shard"),
    "torch:zero": ("sharded-optimizer", "torch.distributed.optim", "ZeroRedundancyOptimizer"),
    "accelerate": ("ddp", "accelerate", "Accelerator"),
    "deepspeed:zero1": ("ddp", "deepspeed", "DeepSpeedEngine"),
}
FILE = Path(__file__).with_name("exercises.toml")
EXERCISES: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))


def require_target(target: str) -> None:
    """Raises UserError for a name that is neither a Python file nor a wrapper of this library or of another system, or
    of one that is not installed or cannot be checked."""
    path, _, name = target.partition(":")
    if target in FOREIGN:
        module = FOREIGN[target][1]
        if find_spec(module.partition(".")[0]) is None:
            raise UserError(f"{target}: {module} is not installed here; pip install {module}")
        if target == "deepspeed:zero1":  # it also compiles extensions when it starts
            raise UserError("deepspeed:zero1 is not supported: its engine calls backward and step itself")
    elif path == "ours":
        if name not in OURS:
            raise UserError(f"{target} does not exist; there are {', '.join(OURS)}")
    elif not path.endswith(".py"):
        raise UserError(f"{target!r} is neither a Python file nor one of {', '.join(FOREIGN)}, ours:zero2, ...")
    elif not Path(path).is_file():
        raise UserError(f"cannot read {path}: no such file")


def foreign(target: str) -> tuple[str, Any]:
    """Kind of a wrapper of another system, and the wrapper, which is imported once, before ranks are forked."""
    kind, module, name = FOREIGN[target]
    with catch_warnings():
        simplefilter("ignore")  # their own deprecations
        return kind, getattr(import_module(module), name)


class Late:
    """A collective that starts only when its result is waited for."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._work = cache(start)  # once

    def __getattr__(self, name: str) -> Any:
        """Start the collective for whoever waits for it, asks for its future, or if it has ended."""
        return getattr(self._work(), name)


@contextmanager
def late_collectives() -> Iterator[None]:
    """Delay asynchronous collectives of torch.distributed until they are waited for, so that a missing wait shows. All
    but those of C++ call these methods of a group, synchronous ones as well."""
    group: Any = import_module("torch.distributed").ProcessGroup
    names = [name for name in dir(group) if re.search("reduce|gather|broadcast|scatter|all_?to_?all|barrier", name)]

    def late(name: str, method: Callable[..., Any]) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            start = cache(partial(method, *given, **named))
            is_asynchronous = any(getattr(each, "asyncOp", False) for each in (*given, *named.values()))
            if not is_asynchronous:
                return start()
            work: Any = Late(start)
            if name.endswith("_coalesced"):  # torch asks for its future at once, to return that
                work.get_future = lambda: Late(lambda: start().get_future())
            return work

        return called

    with mock.patch.multiple(group, **{name: late(name, getattr(group, name)) for name in names}):
        yield


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
