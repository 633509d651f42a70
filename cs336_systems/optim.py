"""AdamW written out, the learning-rate schedule, and clipping by the global norm."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from cs336_systems.errors import UserError


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    m = b1 m + (1 - b1) g          the gradient's running mean
    v = b2 v + (1 - b2) g^2        its running square
    p = p - lr decay p             decay acts on the parameter, not through the gradient
    p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    The divisions undo the bias of running means that start at zero. Raises ValueError for a hyperparameter out of range
    and TypeError for a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; those that are not given are the optimizer's."""
        group = self.defaults | param_group
        lr, eps, decay, betas = (group[name] for name in ("lr", "eps", "weight_decay", "betas"))
        if lr < 0 or eps < 0 or decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr {lr}, eps {eps} and weight_decay {decay} must not be negative, betas {betas} lie in [0, 1)"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the closure, if any, is run first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if gradient.is_sparse:
            raise TypeError("AdamW keeps dense averages; a sparse gradient has none")
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        mean_bias, square_bias = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        denominator = square.sqrt().div_(math.sqrt(square_bias)).add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / mean_bias)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, gains and biases do not (a vector has no direction to shrink along). The biases
    of several experts are stacked, and vectors all the same."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = {parameter for name, parameter in named if parameter.dim() >= 2 and not name.endswith("bias")}
    return [
        {"params": [p for _, p in named if p in matrices], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p not in matrices], "weight_decay": 0.0},
    ]


def learning_rate(
    step: int,
    peak: float,
    floor: float,
    warmup_steps: int,
    decay_steps: int,
    shape: Literal["cosine", "linear"] = "cosine",
) -> float:
    """The rate of one step (from 0): up in a line to the peak, then down to the floor at `decay_steps`, then level.

    The horizon belongs to the schedule, not to the run: a run that is cut short or resumed walks the same curve. Raises
    UserError for a warm-up that is longer than the decay's horizon.
    """
    if warmup_steps > decay_steps:
        raise UserError(f"a warm-up of {warmup_steps} steps ends after the decay, at step {decay_steps}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= decay_steps:
        return floor
    done = (step - warmup_steps) / (decay_steps - warmup_steps)
    remaining = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return floor + (peak - floor) * remaining


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their common L2 norm is at most max_norm; returns the norm before, a scalar.

    The norm is taken in float32 at least and never leaves the device. NaN and infinity pass through it unhidden.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)).to(wide) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
