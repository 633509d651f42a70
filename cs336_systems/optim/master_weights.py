"""AdamW for parameters in half precision: it keeps an fp32 copy (the master) of each, updates it, and rounds it back.

An update is often smaller than half the distance from a weight to its neighbour in fp16 (2^-11 of it, in bf16 2^-8).
Added to the weight itself it would be lost in every step; in the master updates add up (Micikevicius et al., Mixed
Precision Training, arXiv:1710.03740, section 3.1). Bytes per parameter: 2 + 2 for weight and gradient, 12 for master
and moments (Rajbhandari et al., arXiv:1910.02054, section 3.1), and 4 more during a step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cs336_systems.errors import UserError
from cs336_systems.optim.adamw import AdamW, update


class MasterAdamW(AdamW):
    """`AdamW` whose state is in float32 at least, with a `master` of every parameter that is in fp16 or bf16 (one in
    float32 is its own master). The first step copies parameters to their masters. Later ones overwrite parameters, so
    load weights before the first step, or together with their state (that of `AdamW` has no masters: the next step
    makes them). `timer` makes a context for each phase of a step, under Megatron-LM's names."""

    moments_dtype = torch.float32  # the least; ShardedOptimizer reads it when it loads a state
    timer: Callable[[str], AbstractContextManager[object]] = staticmethod(lambda name: nullcontext())

    def update_all(self, used: list[tuple[Any, dict[str, Any]]], multiplier: Tensor | float | None = None) -> None:
        """Update parameters by their gradients in fp32 times `multiplier`, a keyword of `step`, a number or a scalar on
        the device: the factor of clipping, divided by the loss scale. Gradients are not changed, and not checked for
        inf and NaN: the caller skips such a step. Raises UserError for a multiplier with axes."""
        if isinstance(multiplier, Tensor) and multiplier.dim():
            raise UserError(f"the gradients' multiplier is one number, not of shape {tuple(multiplier.shape)}")
        with self.timer("optimizer-copy-to-main-grad"):
            gradients = [p.grad.to(torch.promote_types(p.grad.dtype, torch.float32), copy=True) for p, _ in used]
        with self.timer("optimizer-clip-main-grad"):
            for gradient in gradients if multiplier is not None else ():
                gradient.mul_(multiplier)
        with self.timer("optimizer-inner-step"):
            for gradient, (p, group) in zip(gradients, used, strict=True):
                state, wide = self.state[p], torch.promote_types(p.dtype, torch.float32)
                if p.dtype == wide:
                    state.pop("master", None)  # of a checkpoint in half precision
                elif "master" not in state:
                    state["master"] = p.detach().to(wide)
                update(state.get("master", p), gradient, state, group)
        del gradients
        with self.timer("optimizer-copy-main-to-model-params"):
            for p, _ in used:
                if "master" in self.state[p]:
                    p.copy_(self.state[p]["master"])
