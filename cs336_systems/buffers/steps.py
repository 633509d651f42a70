"""Checks of optimizer steps over wrapped parameters: refuse steps before the synchronisation or without effect."""

from collections import Counter, defaultdict
from functools import cache
from typing import Any
from zlib import crc32

import torch
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
