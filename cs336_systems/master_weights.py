"""AdamW for parameters in half precision: the optimizer keeps an fp32 master of each, updates that, and rounds it back.

An update is often smaller than half the distance from a weight to its neighbour in fp16 (2^-11 of it, in bf16 2^-8):
added to the weight itself it would be lost, every time; in the master it adds up (Micikevicius et al., Mixed Precision
Training, arXiv:1710.03740, section 3.1). Bytes a parameter: 2 + 2 for weight and gradient, 12 for master and moments
(Rajbhandari et al., arXiv:1910.02054, section 3.1), and 4 more during a step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor

from cs336_systems.errors import UserError
from cs336_systems.optim import AdamW

KEPT_WIDE = ("exp_avg", "exp_avg_sq", "master")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _untimed(name: str) -> AbstractContextManager[object]:
    return nullcontext()


class MasterAdamW(AdamW):
    """`AdamW` whose state is in float32 at least, with a `master` of every parameter that is in fp16 or bf16.

    A parameter in fp32 is its own master. The first step makes a master of the parameter as it is then; later steps
    overwrite the parameter with the rounded master, so load weights before the first step, or with a state that
    belongs to them. Options, groups and errors are `AdamW`'s. `ShardedOptimizer` may cut it, and FSDP's shards suit it.

    `timer`, if set, gives a context manager for each phase of a step, under Megatron-LM's names: Timers, for example.
    """

    moments_dtype = torch.float32  # at least, for whoever loads a part of a state
    timer: Callable[[str], AbstractContextManager[object]] = staticmethod(_untimed)

    @overload
    def step(self, closure: None = None, multiplier: Tensor | float | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], multiplier: Tensor | float | None = None) -> float: ...

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, multiplier: Tensor | float | None = None
    ) -> float | None:
        """Update every parameter by its gradient in fp32 times `multiplier`: one over the loss scale, times clipping.

        The multiplier may be a scalar on the device, which the host need not wait for. Gradients are left as they are.
        Nothing is checked for inf and NaN: a caller who finds any leaves the step out. The closure, if any, is run
        first and its loss returned. Raises UserError for a multiplier with axes, TypeError for a sparse gradient.
        """
        if isinstance(multiplier, Tensor) and multiplier.dim():
            raise UserError(f"the gradients' multiplier is one number, not of shape {tuple(multiplier.shape)}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p, _ in used):  # before anything moves
            raise TypeError("AdamW keeps dense averages; a sparse gradient has none")
        with self.timer("optimizer-copy-to-main-grad"):
            gradients = [p.grad.to(_wide(p.grad.dtype)) for p, _ in used]
        with self.timer("optimizer-clip-main-grad"):
            if multiplier is not None:
                # Of a gradient that was fp32 already this makes the copy.
                gradients = [
                    (g.clone() if g is p.grad else g).mul_(multiplier)
                    for g, (p, _) in zip(gradients, used, strict=True)
                ]
        with self.timer("optimizer-inner-step"):
            for i, (p, group) in enumerate(used):
                self._update_master(p, gradients[i], group)
        del gradients
        with self.timer("optimizer-copy-main-to-model-params"):
            for p, _ in used:
                if "master" in self.state[p]:
                    p.copy_(self.state[p]["master"])
        return loss

    def _update_master(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """AdamW's own arithmetic, which takes gradient and state from a tensor, on the master instead."""
        state, given = self.state[parameter], parameter.grad
        if parameter.dtype == _wide(parameter.dtype):
            state.pop("master", None)  # of a checkpoint in half precision
            parameter.grad = gradient
            self._update(parameter, group)
            parameter.grad = given
            return
        master = state.pop("master", None)
        master = parameter.detach().to(_wide(parameter.dtype)) if master is None else master
        master.grad = gradient
        self.state[master] = state
        self._update(master, group)
        del self.state[master]
        master.grad = None
        state["master"] = master

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this class or `AdamW`, whose parameters become masters as they are at the next step."""
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in KEPT_WIDE:
                if name in saved:  # as it was saved: torch rounds it to the parameter's dtype
                    self.state[parameter][name] = saved[name].to(parameter.device, _wide(parameter.dtype), copy=True)
