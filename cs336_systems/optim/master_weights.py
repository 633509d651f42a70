"""AdamW for parameters in half precision: the optimizer keeps an fp32 master of each, updates that, and rounds it back.

An update is often smaller than half the distance from a weight to its neighbour in fp16 (2^-11 of it, in bf16 2^-8):
added to the weight itself it would be lost every time; in the master it adds up (Micikevicius et al., Mixed Precision
Training, arXiv:1710.03740, section 3.1). Bytes per parameter: 2 + 2 for weight and gradient, 12 for master and moments
(Rajbhandari et al., arXiv:1910.02054, section 3.1), and 4 more during a step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cs336_systems.errors import UserError
from cs336_systems.optim.adamw import AdamW, run_closure, update, with_gradients


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class MasterAdamW(AdamW):
    """`AdamW` whose state is in float32 at least, with a `master` of every parameter that is in fp16 or bf16. A
    parameter in fp32 is its own master. The first step copies the parameter to its master; later steps overwrite the
    parameter with the rounded master, so load weights before the first step, or with a state that belongs to them. (If
    that is an `AdamW`'s, the next step copies the parameters to masters.) Options, groups and errors are `AdamW`'s.
    Works with `ShardedOptimizer` and FSDP. `timer`, if set, makes a context for each phase of a step, under
    Megatron-LM's names."""

    moments_dtype = torch.float32  # at least, for whoever loads a part of a state
    kept_wide = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
    timer: Callable[[str], AbstractContextManager[object]] = staticmethod(lambda name: nullcontext())

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, multiplier: Tensor | float | None = None
    ) -> float | None:
        """Update every parameter by its gradient in fp32 times `multiplier`: clipping over the loss scale. The
        multiplier may be a scalar on the device, which the host need not wait for. Gradients are not changed, and not
        checked for inf and NaN: the caller skips such a step. The closure, if any, is run before and its loss returned.
        Raises UserError for a multiplier with axes, TypeError for a sparse gradient."""
        if isinstance(multiplier, Tensor) and multiplier.dim():
            raise UserError(f"the gradients' multiplier is one number, not of shape {tuple(multiplier.shape)}")
        loss = run_closure(closure)
        with torch._C.DisableTorchFunctionSubclass():  # FSDP's shards are as good as any tensor here
            self._update(multiplier)
        return loss

    def _update(self, multiplier: Tensor | float | None) -> None:
        used = with_gradients(self.param_groups)
        with self.timer("optimizer-copy-to-main-grad"):
            gradients = [p.grad.to(_wide(p.grad.dtype)) for p, _ in used]
        with self.timer("optimizer-clip-main-grad"):
            if multiplier is not None:
                pairs = zip(gradients, used, strict=True)
                # Of a gradient that was fp32 already this makes the copy.
                gradients = [(g.clone() if g is p.grad else g).mul_(multiplier) for g, (p, _) in pairs]
        with self.timer("optimizer-inner-step"):
            for gradient, (p, group) in zip(gradients, used, strict=True):
                state, master = self.state[p], self.state[p].pop("master", None)
                if p.dtype == _wide(p.dtype):  # a master, if any, came with a checkpoint in half precision
                    update(p, gradient, state, group)
                else:
                    master = p.detach().to(_wide(p.dtype)) if master is None else master
                    update(master, gradient, state, group)
                    state["master"] = master
        del gradients
        with self.timer("optimizer-copy-main-to-model-params"):
            for p, _ in used:
                if "master" in self.state[p]:
                    p.copy_(self.state[p]["master"])
