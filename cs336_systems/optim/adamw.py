"""AdamW written out, its form with fp32 master weights, parameter groups, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_systems.errors import UserError
from kernels.checks import check_last_group, check_state


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    m = b1 m + (1 - b1) g          the gradient's running mean
    v = b2 v + (1 - b2) g^2        its running square
    p = p - lr decay p             decay acts on the parameter, not through the gradient
    p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    The divisions undo the bias of running means that start at zero. With `amsgrad` the last line has the largest v so
    far (Reddi et al., arXiv:1904.09237, algorithm 2); to `maximize` is to use -g. Raises ValueError for a setting out
    of range, a parameter that comes twice and the state of another algorithm, TypeError for a sparse gradient and a
    parameter that is float16 or not real."""

    check_state = staticmethod(partial(check_state, can=("amsgrad", "max_exp_avg_sq", "maximize")))

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
        *, amsgrad: bool = False, maximize: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": amsgrad, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own, by default the optimizer's."""
        super().add_param_group(param_group)
        check_last_group(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of an `AdamW`, or of torch's, over parameters of the same shapes, as load hooks leave it."""
        with self.register_load_state_dict_pre_hook(lambda _, state: self.check_state(state)):  # behind all others
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; run the closure, if any, before, and return its loss."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch._C.DisableTorchFunctionSubclass():  # FSDP's shards are as good as any tensor here
            for parameter, group in with_gradients(self.param_groups):
                update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def with_gradients(groups: list[dict[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """The parameters with a gradient, and their groups. Raises TypeError for a sparse one before anything moves."""
    used = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
    if any(p.grad.layout != torch.strided for p, _ in used):
        raise TypeError("AdamW keeps dense averages; a sparse gradient has none")
    return used


def update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of AdamW for one parameter, in place."""
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


class MasterAdamW(AdamW):
    """`AdamW` for parameters in half precision: it keeps an fp32 `master` of each, updates that, and rounds it back.

    An update is often smaller than half the distance from a weight to its neighbour in fp16 (2^-11 of it, in bf16
    2^-8): added to the weight itself it would be lost every time; in the master it adds up (Micikevicius et al., Mixed
    Precision Training, arXiv:1710.03740, section 3.1). Bytes per parameter: 2 + 2 for weight and gradient, 12 for
    master and moments (Rajbhandari et al., arXiv:1910.02054, section 3.1), and 4 more during a step.

    State is in float32 at least, and a parameter in fp32 is its own master. The first step copies parameters to their
    masters, later ones overwrite parameters, so load weights before the first step, or with a state that belongs to
    them (an `AdamW`'s has no masters: the next step copies them). Options, groups and errors are `AdamW`'s. `timer`, if
    set, makes a context for each phase of a step, under Megatron-LM's names.
    """

    moments_dtype = torch.float32  # at least, for whoever loads a part of a state
    timer: Callable[[str], AbstractContextManager[object]] = staticmethod(lambda name: nullcontext())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `AdamW`'s, without torch's rounding to the parameters' dtype."""
        seen: list[dict[str, Any]] = []
        with (
            self.register_load_state_dict_pre_hook(lambda _, state: seen.append(state)),  # behind all others
            self.register_load_state_dict_post_hook(lambda _: self._widen(seen[0]), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _widen(self, state_dict: dict[str, Any]) -> None:
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            saved, wide = state_dict["state"].get(number, {}), torch.promote_types(parameter.dtype, torch.float32)
            for name in saved.keys() - {"step"}:
                self.state[parameter][name] = saved[name].to(parameter.device, wide, copy=True)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, multiplier: Tensor | float | None = None
    ) -> float | None:
        """Update every parameter by its gradient in fp32 times `multiplier`, which may be a scalar on the device:
        clipping over the loss scale. Gradients are not changed, and not checked for inf and NaN: the caller skips such
        a step. The closure, if any, is run before and its loss returned. Raises UserError for a multiplier with axes,
        TypeError for a sparse gradient."""
        if isinstance(multiplier, Tensor) and multiplier.dim():
            raise UserError(f"the gradients' multiplier is one number, not of shape {tuple(multiplier.shape)}")
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch._C.DisableTorchFunctionSubclass():
            self._update(multiplier)
        return loss

    def _update(self, multiplier: Tensor | float | None) -> None:
        used = with_gradients(self.param_groups)
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


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, gains and biases do not, nor do the stacked biases of experts."""
    groups: tuple[list[Tensor], list[Tensor]] = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[parameter.dim() < 2 or name.endswith("bias")].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


def learning_rate(
    step: int, peak: float, floor: float, warmup_steps: int, decay_steps: int,
    shape: Literal["cosine", "linear"] = "cosine",
) -> float:  # fmt: skip
    """Learning rate of a step (from 0): linear warm-up to the peak, decay to the floor at `decay_steps`, constant.
    `decay_steps` belongs to the schedule, not to the run: a run that is cut short or resumed follows the same curve.
    Raises UserError for a warm-up longer than that."""
    if warmup_steps > decay_steps:
        raise UserError(f"a warm-up of {warmup_steps} steps ends after the decay, at step {decay_steps}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= decay_steps:
        return floor
    done = (step - warmup_steps) / (decay_steps - warmup_steps)
    remaining = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return floor + (peak - floor) * remaining
