"""Wrappers of other systems by name, and delays of their collectives: the one file of check/ that uses
torch.distributed, as a user's code does."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

from cs336_systems.errors import UserError

MESSAGES = ("send", "recv", "isend", "irecv")
Built = tuple[Any, Any]  # a model and its optimizer


class Late:
    """A collective that starts only when its result is waited for."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._work: Any = None

    def wait(self, *arguments: Any) -> Any:
        self._work = self._work or self._start()
        return self._work.wait(*arguments)

    def is_completed(self) -> bool:
        """True once the collective has been waited for."""
        return self._work is not None

    def get_future(self) -> Any:
        """Start the collective and return its future, on which the caller waits."""
        self._work = self._work or self._start()
        return self._work.get_future()


def collectives() -> dict[str, Callable[..., Any]]:
    """The functions of torch.distributed that may return before they have ended, by name."""
    found = vars(import_module("torch.distributed")).items()
    functions = {name: each for name, each in found if type(each) is FunctionType}
    return {name: each for name, each in functions.items() if "async_op" in inspect.signature(each).parameters}


@contextmanager
def late_collectives() -> Iterator[None]:
    """Delay asynchronous collectives of torch.distributed until they are waited for, so that a missing wait shows."""
    late: Any = {name: _late(function) for name, function in collectives().items()}
    with mock.patch.multiple("torch.distributed", **late):
        yield


def _late(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(function))

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if signature.bind(*arguments, **named).arguments.get("async_op"):
            return Late(lambda: function(*arguments, **named))
        return function(*arguments, **named)

    return called


def count_collectives(elements: bool = False) -> list[int]:
    """Count, from now on in this process, the all-reduces and reduce-scatters of torch.distributed that are launched,
    or the elements of all tensors that any collective or message is given. The count is the only item of the list."""
    dist, counts = import_module("torch.distributed"), [0]

    def size(given: Any) -> int:
        return sum(map(size, given)) if isinstance(given, list | tuple) else getattr(given, "numel", int)()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            counts[0] += size((arguments, *named.values())) if elements else 1
            return function(*arguments, **named)

        return called

    for name in (*collectives(), *MESSAGES) if elements else [each for each in collectives() if "reduce" in each]:
        setattr(dist, name, counted(getattr(dist, name)))
    return counts


def exchange(piece: Any, into: Any) -> None:
    """Send a tensor to the next rank of a ring, and receive one from the rank before."""
    dist = import_module("torch.distributed")
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(piece.contiguous(), (rank + 1) % world)
    dist.recv(into, (rank - 1) % world)
    sent.wait()


def ddp(module: Any, cls: Any, options: dict[str, Any], group: Any) -> Built:
    """torch's DistributedDataParallel as it is by default, with buckets so small that there are several."""
    wrapper = import_module("torch.nn.parallel").DistributedDataParallel
    model = wrapper(module, process_group=group, bucket_cap_mb=0.0005)
    return model, cls(model.parameters(), **options)


def fsdp2(module: Any, cls: Any, options: dict[str, Any], group: Any) -> Built:
    """torch's fully_shard, on the whole module."""
    import_module("torch.distributed.fsdp").fully_shard(module)
    return module, cls(module.parameters(), **options)


def zero(module: Any, cls: Any, options: dict[str, Any], group: Any) -> Built:
    """torch's ZeroRedundancyOptimizer."""
    optimizer = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    return module, optimizer(module.parameters(), optimizer_class=cls, process_group=group, **options)


def accelerate(module: Any, cls: Any, options: dict[str, Any], group: Any) -> Built:
    """accelerate's prepare, on the CPU."""
    optimizer = cls(module.parameters(), **options)
    return tuple(import_module("accelerate").Accelerator(cpu=True).prepare(module, optimizer))


def deepspeed(module: Any, cls: Any, options: dict[str, Any], group: Any) -> Built:
    """Not supported: deepspeed's engine calls backward and step itself, and compiles extensions when it starts."""
    raise UserError("deepspeed:zero1 is not supported: its engine calls backward and step itself")


FOREIGN: dict[str, tuple[str, Callable[..., Built], tuple[str, ...]]] = {
    "torch:ddp": ("ddp", ddp, ("torch.nn.parallel",)),
    "torch:fsdp2": ("fsdp", fsdp2, ("torch.distributed.fsdp",)),
    "torch:zero": ("sharded-optimizer", zero, ("torch.distributed.optim",)),
    "accelerate": ("ddp", accelerate, ("accelerate",)),
    "deepspeed:zero1": ("ddp", deepspeed, ("deepspeed",)),
}


def require_installed(name: str) -> None:
    """Raises UserError where the modules of another system's wrapper are not installed."""
    for module in FOREIGN[name][2]:
        if find_spec(module.partition(".")[0]) is None:
            raise UserError(f"{name}: {module} is not installed here; pip install {module}")


def foreign(name: str) -> tuple[str, Callable[..., Built]]:
    """Kind and builder of a wrapper of another system."""
    kind, build, modules = FOREIGN[name]
    with catch_warnings():
        simplefilter("ignore")  # their own deprecations
        for module in modules:
            import_module(module)  # once, before ranks are forked
    return kind, build
