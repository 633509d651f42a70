"""AdamW in plain tensor operations, its parameter groups, and the learning-rate schedule."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_systems.errors import UserError
from kernels.checks import AdamWBase


class AdamW(AdamWBase):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    m = b1 m + (1 - b1) g          running mean of the gradient
    v = b2 v + (1 - b2) g^2        running mean of its square
    p = p - lr decay p             decay of the parameter, not through the gradient
    p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    The divisions undo the bias of running means that start at zero. `amsgrad` uses the largest v so far in the last
    line (Reddi et al., arXiv:1904.09237, algorithm 2); `maximize` uses -g. Raises ValueError for a setting out
    of range, a parameter that comes twice and the state of another algorithm, TypeError for a sparse gradient and a
    parameter that is float16 or not real."""

    can = ("amsgrad", "max_exp_avg_sq", "maximize")

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
        *, amsgrad: bool = False, maximize: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": amsgrad, "maximize": maximize})

    def update_all(self, used: list[tuple[Any, dict[str, Any]]]) -> None:
        for parameter, group in used:
            update(parameter, parameter.grad, self.state[parameter], group)


def update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Take one step of AdamW for one parameter, in place."""
    if "step" not in state:
        if parameter.dtype == torch.float16:
            raise TypeError("float16 holds neither an eps of 1e-8 nor squares above 65504: take MasterAdamW")
        state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    state["step"] += 1
    (beta1, beta2), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    gradient = -gradient if group.get("maximize") else gradient  # states of earlier versions lack both options
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if group.get("amsgrad"):
        if "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(square)
        square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    mean_bias, square_bias = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
    denominator = square.sqrt().div_(math.sqrt(square_bias)).add_(group["eps"])
    parameter.addcdiv_(mean, denominator, value=-group["lr"] / mean_bias)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Make parameter groups: weight decay for matrices; none for gains, biases and the stacked biases of experts."""
    groups: tuple[list[Tensor], list[Tensor]] = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[parameter.dim() < 2 or name.endswith("bias")].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


def learning_rate(
    step: int, peak: float, floor: float, warmup_steps: int, decay_steps: int,
    shape: Literal["cosine", "linear"] = "cosine",
) -> float:  # fmt: skip
    """Learning rate of a step (from 0): linear warm-up to the peak, decay to the floor at `decay_steps`, then constant,
    however long the run is. Raises UserError for a warm-up longer than `decay_steps`."""
    if warmup_steps > decay_steps:
        raise UserError(f"a warm-up of {warmup_steps} steps ends after the decay, at step {decay_steps}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= decay_steps:
        return floor
    done = (step - warmup_steps) / (decay_steps - warmup_steps)
    remaining = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return floor + (peak - floor) * remaining
