"""Candidates for a check, behind one interface, which adapts to the conventions of a user's class or functions.

A file may have a class or function that wraps a module, an optimizer class that shards, a training step, or the
functions that the course's editions of 2024, 2025 and 2026 name in tests/adapters.py.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from cs336_systems.check.targets import FOREIGN, KINDS, foreign, require_target
from cs336_systems.comm import Group
from cs336_systems.errors import UserError
from cs336_systems.zero import WRAPPERS, zero

SYNCHRONISE = (
    "finish_gradient_synchronization", "sync_gradients", "synchronize_gradients", "average_gradients",
    "all_reduce_gradients", "allreduce_gradients", "synchronize",
)  # fmt: skip
ADAPTERS = {  # the course's functions; others, such as ddp_on_after_backward, are named after them
    "get_ddp_individual_parameters": "ddp", "get_ddp_bucketed": "ddp", "get_ddp": "ddp",
    "get_sharded_optimizer": "sharded-optimizer", "get_fsdp": "fsdp",
}  # fmt: skip
ENDED = "ended by itself with exit code"
OWN_OPTIMIZER = "the target makes its optimizer, and has no parameter optimizer_cls"
BATCH = {name: i for i, names in enumerate((  # parameters that a step may have
    "model module net", "optimizer opt", "loss criterion loss_fn", "inputs x tokens", "targets y labels", "group",
)) for name in names.split()}  # fmt: skip


def line_of(error: BaseException, who: str = "it") -> str:
    """Kind and message of an error, in one line that is not too long; of an exit, who has ended."""
    words = shorten(re.sub(r"\[\S+\.cc:\d+\]", "", str(error)), 160, placeholder=" ...")  # without places in gloo
    if isinstance(error, SystemExit):
        return f"{who} {ENDED} {int(error.code or 0) if isinstance(error.code, int | None) else f'1: {words}'}"
    return f"{type(error).__name__}: {words}"


@contextmanager
def exits_raised() -> Iterator[None]:
    """Inside the block os._exit raises SystemExit in this process, so that an exit is reported; forks of it end. If a
    thread has called it, which SystemExit ends alone, SystemExit is raised at the end of the block."""
    leave, pid, codes = os._exit, os.getpid(), dict[int, int]()
    with mock.patch("os._exit", lambda n: leave(n) if os.getpid() != pid else sys.exit(codes.setdefault(pid, n))):
        yield
    if codes:
        sys.exit(codes[pid])


@contextmanager
def called(what: str) -> Iterator[None]:
    """Run code of the user's inside the block. Raises UserError, in one line, for whatever error or exit it raises."""
    try:
        with exits_raised():
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {line_of(error)}") from error


def synchronise(model: Any, optimizer: Any) -> None:
    """Call the method that ends a wrapper's or its optimizer's synchronisation, if one has it."""
    methods = (getattr(each, name, None) for each in (model, optimizer) for name in SYNCHRONISE)
    if method := next(filter(callable, methods), None):
        method()


@dataclass(frozen=True)
class Candidate:
    """Functions that build, synchronise and read a parallel model, or take a whole step (of kind "step")."""

    name: str
    kind: str
    build: Callable[..., Any]
    finish: Callable[[Any, Any], object] = synchronise
    before: Callable[[Any, Any], object] = lambda model, optimizer: None
    gather: Callable[[Any], dict[str, Tensor]] | None = None
    step: Callable[..., Any] | None = None
    has_gradients: bool = True  # `.grad` is whole or can be made so; else gradients follow from updates


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Select the offered arguments that a function has parameters for."""
    return {name: offered[name] for name in inspect.signature(function).parameters if name in offered}


def wrapped(wrap: Callable[..., Any], module: nn.Module, cls: Any, options: dict[str, Any], group: Group) -> Any:
    """A wrapper's model and its optimizer; it may return both."""
    small = 0.0005  # MB, so that there are several buckets
    offered = {"bucket_size_mb": small, "bucket_cap_mb": small, "group": group, "process_group": group}
    given = accepted(wrap, offered | {"optimizer_cls": cls, **options})
    model = wrap(module, **given)
    if isinstance(model, tuple):
        if "optimizer_cls" not in given and cls is not torch.optim.SGD:
            raise AttributeError(OWN_OPTIMIZER)
        return model[0], model[1]
    if not callable(model):
        raise TypeError(f"the wrapper returned {type(model).__name__}, which cannot be called")
    return model, cls(model.parameters() if hasattr(model, "parameters") else module.parameters(), **options)


def kind_of(target: Any, name: str) -> str:
    """Guess the kind from a class's or function's base, name and parameters; ddp if they do not show it."""
    parameters, name = set(inspect.signature(target).parameters), name.lower()
    of_optimizer = "optimizer_cls" in parameters and not {"module", "model"} & parameters  # else a wrapper takes it
    if of_optimizer or (isinstance(target, type) and issubclass(target, torch.optim.Optimizer)):
        return "sharded-optimizer"
    if not isinstance(target, type) and {"optimizer", "opt"} & parameters:
        return "step"
    if "fsdp" in name or hasattr(target, "gather_full_params"):
        return "fsdp"
    return "tensor-parallel" if re.search("(tensor|sequence)_?parallel", name) else "ddp"


def candidate(target: Any, kind: str | None = None, name: str = "", beside: ModuleType | None = None) -> Candidate:
    """A user's class or function as a candidate; the course's adapters find their other functions `beside` it."""
    name = name or getattr(target, "__name__", str(target))
    beside = beside if name in ADAPTERS else None
    kind = ADAPTERS[name] if beside else kind or kind_of(target, name)
    if kind not in KINDS:
        raise UserError(f"--as {kind} does not exist; it is one of {', '.join(KINDS)}")
    if kind == "step":
        required = [key for key, each in inspect.signature(target).parameters.items() if each.default is each.empty]
        if unknown := [key for key in required if key not in BATCH]:
            raise UserError(f"{name}: what is {', '.join(unknown)}? A step's parameters are named {', '.join(BATCH)}")
        return Candidate(name, kind, partial(wrapped, lambda module: module), step=target)
    build: Any = partial(wrapped, target)
    if kind == "sharded-optimizer":
        build = lambda module, cls, options, group: (module, target(module.parameters(), cls, **options))  # noqa: E731
    prefix = name.removeprefix("get_")
    finish = getattr(beside, f"{prefix}_on_after_backward", synchronise)
    before = getattr(beside, f"{prefix}_on_train_batch_start", Candidate.before)
    return Candidate(name, kind, build, finish, before, getattr(beside, f"{prefix}_gather_full_params", None))


def load(target: str, kind: str | None = None) -> tuple[list[Candidate], Callable[[], Any] | None]:
    """Candidates that a command line names, `torch:ddp`, `ours:zero2`, FILE or FILE:NAME, and the file's `build`. A
    file without a name gives the course's adapters in it, or its only class or function. Raises UserError."""
    require_target(target)
    if target in FOREIGN:
        kind, wrap = foreign(target)
        if target == "accelerate":
            return [Candidate(target, kind, build=lambda module, cls, options, group: wrap(cpu=True).prepare(
                module, cls(module.parameters(), **options)))], None  # fmt: skip
        return [candidate(wrap, kind, target)], None
    path, _, name = target.partition(":")
    if path == "ours":
        if wrapper := WRAPPERS.get(name.removeprefix("ddp-")):
            return [candidate(wrapper, "ddp", target)], None
        stage = int(name[-1])
        staged = lambda module, cls, options, group: zero(module, cls, stage, group, **options)  # noqa: E731
        return [Candidate(target, "fsdp" if stage == 3 else "ddp", staged, has_gradients=stage < 2)], None
    module = load_file(Path(path))
    build = getattr(module, "build", None)
    if name:
        if not callable(found := getattr(module, name, None)):
            raise UserError(f"{path} has no class or function {name}")
        return [candidate(found, kind, name, module)], build
    if chosen := [each for each in ADAPTERS if hasattr(module, each)]:
        return [candidate(getattr(module, each), None, each, module) for each in chosen], build
    own = [
        value for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and callable(value) and key[0] != "_" and key != "build"
    ]  # fmt: skip
    own = [each for each in own if isinstance(each, type)] or own
    if len(own) != 1:
        names = ", ".join(each.__name__ for each in own) or ("none but build" if build else "none")
        raise UserError(f"{path} has {len(own)} classes or functions ({names}); name one: {path}:NAME")
    return [candidate(own[0], kind, beside=module)], build


def load_file(path: Path) -> ModuleType:
    """A Python file as a module; what lies beside it can be imported by it. Raises UserError."""
    if not path.is_file():
        raise UserError(f"cannot read {path}: no such file")
    loader: Any = SourceFileLoader(f"checked_{path.stem}", str(path.resolve()))
    # Without __pycache__, of which Python would take the old code of a file that changes twice within a second.
    loader.get_code = lambda _: loader.source_to_code(loader.get_data(loader.path), loader.path)
    spec: Any = spec_from_file_location(loader.name, loader.path, loader=loader)
    module = sys.modules[loader.name] = module_from_spec(spec)
    sys.path.append(str(path.resolve().parent))
    with called(f"{path} cannot be imported"):
        loader.exec_module(module)
    return module
