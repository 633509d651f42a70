"""Checks of optimizers: no step before the synchronisation or without effect; pieces for element-wise ones only."""

import inspect
from collections import Counter, defaultdict
from contextlib import suppress
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from cs336_systems.buffers.shard_tensor import ShardTensor, know_loaded, raw
from cs336_systems.buffers.sharded_gradient import ShardedGradient
from cs336_systems.comm import fault
from cs336_systems.errors import UserError

guard_of = WeakTensorKeyDictionary()  # parameters, and references to the guard of their wrapper
replaced = WeakTensorKeyDictionary()  # weights whose place shards have taken, which optimizers refuse, and their names


@cache
def watch_steps() -> None:
    """Check every optimizer's parameters before each of its steps, from now on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Look at an optimizer's gradients before each step, and once more after a closure has made new ones."""
    _require_synchronised(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def checked() -> Any:
        loss = closure()
        _require_synchronised(optimizer)
        return loss

    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return ((args[0], checked, *args[2:]), rest) if callable(closure) else None


def _require_synchronised(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError if a step would use gradients that are not reduced yet, or update tensors that nothing uses."""
    stepped = defaultdict[Any, Counter[int]](Counter)  # by guard and group: a hash of the names of its parameters
    numbered = enumerate(optimizer.param_groups)
    for number, parameter in ((number, parameter) for number, group in numbered for parameter in group["params"]):
        if parameter in replaced:
            raise UserError(
                f"{type(optimizer).__name__} was made before {replaced[parameter]} was sharded and would never move "
                "it; make it from the wrapped module's parameters"
            )
        if isinstance(parameter, ShardTensor):
            know_loaded(optimizer.state.get(parameter, {}), parameter)
            torch.autograd.graph.increment_version(parameter)  # which fused optimizers do not
        if (reference := guard_of.get(parameter)) is not None:
            if (guard := reference()) is None:
                raise UserError(
                    "the wrapper of these parameters is gone, so nothing has synchronised their gradients: keep it, or "
                    "unwrap() it to train on this rank alone"
                )
            guard.require_finished(f"{type(optimizer).__name__}.step()")
            apart = guard.shards or hasattr(optimizer, "parts")  # else the weights themselves are compared
            stepped[guard][number] += crc32(guard.names[parameter].encode(errors="replace")) if apart else 0
        with raw():
            gradient = parameter.grad
        # A ShardedOptimizer with a wrapper takes the pieces from there.
        if isinstance(gradient, ShardedGradient) and getattr(optimizer, "wrapper", None) is None:
            raise fault(
                f"{type(optimizer).__name__}.step() cannot use the gradient of {gradient.label}, which rests "
                "sharded: step a ShardedOptimizer made with wrapper=, as zero(stage=2) does"
            )
    for guard, groups in stepped.items():
        guard.replicas.note(optimizer, groups)


def _updates(optimizer_cls: type[torch.optim.Optimizer], in_pieces: bool, options: dict[str, Any]) -> Tensor:
    """Elements (24,) of a 4 x 6 parameter after three steps; the optimizer gets it whole or as two flat pieces."""
    whole = torch.linspace(-1, 1, 24, dtype=torch.float32).cos()
    gradient = torch.linspace(-2, 3, 24, dtype=torch.float32).sin()
    views = [(each[:11], each[11:]) if in_pieces else (each.view(4, 6),) for each in (whole, gradient)]
    parameters = [nn.Parameter(view, requires_grad=False) for view in views[0]]
    optimizer = optimizer_cls(parameters, **options)
    for step in range(3):
        for parameter, piece in zip(parameters, views[1], strict=True):
            parameter.grad = piece * (step + 1)
        optimizer.step()
    return whole


def require_elementwise(
    optimizer_cls: type[torch.optim.Optimizer], options: dict[str, Any], advice: str = 'use layout="whole"'
) -> None:
    """Try the optimizer on 24 numbers, whole and in two pieces. Raises UserError with its name if the results differ.
    Muon, Adafactor and LARS use a whole matrix or its norm, and would silently update a slice of it differently."""
    # A learning rate of zero would hide every difference; optimizers with `capturable` need a GPU.
    has_lr = "lr" in options or "lr" in inspect.signature(optimizer_cls).parameters
    options = {key: value for key, value in options.items() if key != "capturable"} | ({"lr": 0.1} if has_lr else {})
    optimizer_cls([nn.Parameter(torch.zeros(1, 1))], **options)  # raises for a wrong option
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever the default device is
        name, why, pieces = getattr(optimizer_cls, "__name__", optimizer_cls), "", None
        try:
            whole = _updates(optimizer_cls, False, options)
        except Exception as error:
            why = f" (its step without arguments ended in {type(error).__name__}: {error})"
        with suppress(RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            pieces = None if why else _updates(optimizer_cls, True, options)
    if pieces is None or not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7, equal_nan=True):
        found = f"{name} does not treat every element by itself{why}"
        raise UserError(f"{found}, so a parameter cannot be cut for it; {advice}")
