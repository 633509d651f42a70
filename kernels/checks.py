"""Checks that refuse tensors for kernels, and the base of AdamW in plain torch and fused, which checks its options."""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq", "master"}


def check_tensors(**tensors: Tensor) -> None:
    """Raises TypeError unless all are dense tensors of a dtype in FLOATS, `targets` of int64, and ValueError unless
    they share a device: a kernel would read invalid addresses."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype not in ((torch.int64,) if name == "targets" else FLOATS):
            kind = "dtype torch.int64" if name == "targets" else "a floating-point dtype of 16 to 64 bits"
            raise TypeError(f"{name} must be of {kind}, not {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be dense, not {tensor.layout}")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, {first_name} on {first.device}; move one of them")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError unless the tensor has the shape, which follows from `why`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape} as {why} demands")


def check_rows(weight: Tensor, **inputs: Tensor) -> None:
    """Raises TypeError for integers, ValueError for inputs (... columns) and weight (columns) that do not fit."""
    check_tensors(**inputs, weight=weight)
    x = inputs["x"]
    if not x.dim():
        raise ValueError("x has no dimensions, so there is no dimension to sum over")
    for name, tensor in inputs.items():
        check_shape(name, tensor, tuple(x.shape), "x")
    check_shape("weight", weight, tuple(x.shape[-1:]), "x's last dimension")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a backward: torch's, which refuses to differentiate its results. This one does so if dL/dy is a
    constant, too, as that of a loss is; torch would then take the results for constants in a gradient penalty."""
    once = function.once_differentiable(backward)
    return lambda ctx, *grads: once(
        ctx, *(g.detach().requires_grad_() if torch.is_grad_enabled() else g for g in grads)
    )


class AdamWBase(torch.optim.Optimizer):
    """Base of AdamW in plain torch and fused: refuses what neither can update, and runs a step's closure."""

    can: tuple[str, ...]  # options, and state of theirs, that not every AdamW has
    moments_dtype: torch.dtype | None = None  # the least of its state; None: the parameters' dtype
    update_all: Callable[..., None]  # updates the parameters with a gradient, given in pairs with their groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and their hyperparameters. Raises TypeError or ValueError for those that AdamW cannot take."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        lr, eps, decay, betas = (group[name] for name in ("lr", "eps", "weight_decay", "betas"))
        betas = betas if isinstance(betas, tuple | list) else [betas]
        if not all(isinstance(number, int | float) for number in (lr, eps, decay, *betas)):
            raise TypeError("lr, betas, eps and weight_decay must be numbers: to read a tensor is to wait for the GPU")
        in_range = all(0 <= number < math.inf for number in (lr, eps, decay)) and all(0 <= beta < 1 for beta in betas)
        if not in_range or len(betas) != 2:
            numbers = f"lr {lr}, eps {eps} and weight_decay {decay}"
            raise ValueError(f"{numbers} must not be negative, inf or NaN, two betas, {betas}, lie in [0, 1)")
        for i, param in enumerate(group["params"]):
            if not param.dtype.is_floating_point:
                raise TypeError(f"params[{i}] must be of a real floating-point dtype, not {param.dtype}")
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError("a parameter comes twice in a group: each step would update it twice")
        self.param_groups.append(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an AdamW, or of torch's, over parameters of the same shapes, between all load hooks. Where
        torch would round it to the parameters' dtype, it stays at least in `moments_dtype`."""
        seen: list[dict[str, Any]] = []

        def widen(_: Any) -> None:
            both = seen[0]["param_groups"], self.param_groups
            for number, param in zip(*(chain.from_iterable(g["params"] for g in each) for each in both), strict=True):
                wide = torch.promote_types(param.dtype, self.moments_dtype or param.dtype)
                for name, saved in seen[0]["state"].get(number, {}).items():
                    if name != "step":
                        self.state[param][name] = saved.to(param.device, wide, copy=True)

        with (
            self.register_load_state_dict_pre_hook(lambda _, state: seen.append(self.check_state(state))),
            self.register_load_state_dict_post_hook(widen, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def check_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state. Raises ValueError for that of another algorithm than AdamW with this one's options."""
        for group in state_dict["param_groups"]:
            found = {name for number in group["params"] for name in state_dict["state"].get(number, ())} - ADAMW_STATE
            found |= {name for name in ("amsgrad", "momentum", "maximize") if group.get(name)}
            if not group.get("decoupled_weight_decay", True):
                found.add("coupled weight decay")
            if others := sorted(found.difference(self.can)):
                raise ValueError(f"the state belongs to another algorithm than AdamW: it has {', '.join(others)}")
        return state_dict

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **how: Any) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; the closure, if any, is run first and its loss returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch._C.DisableTorchFunctionSubclass():  # update FSDP's shards like plain tensors
            used = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
            if any(p.grad.layout != torch.strided for p, _ in used):
                raise TypeError(f"{type(self).__name__} keeps dense moments; a sparse gradient has none")
            self.update_all(used, **how)
        return loss
