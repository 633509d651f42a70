"""Backward in two parts: first the gradients of inputs, and later, on request, those of the weights of linear layers.

    grad X = grad Y W        the stage before waits for it
    grad W = grad Y^T X      needed by the optimizer only

A pipeline computes the second part when it would be idle (Qi et al., Zero Bubble, arXiv:2401.10241).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

Deferred = tuple[Tensor, Tensor, Tensor | None, Tensor]  # input, weight, bias, and the output's gradient


class SplitLinear(torch.autograd.Function):
    """Linear layer whose backward computes its input's gradient, and appends the operands of the weights' to `later`.
    Weight and bias come in a tuple, so that autograd does not see them and call their hooks too early."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor, Tensor | None], later: list[Deferred]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights, ctx.later = weights, later
        return F.linear(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.later.append((x.detach(), *ctx.weights, grad))  # x itself would hold the graph, which holds `later`
        return grad @ ctx.weights[0], None, None


class SplitBackward(TorchFunctionMode):
    """Runs linear layers inside the block as `SplitLinear`; `later` collects their postponed work. Other parameters,
    such as gains, embeddings and experts, get their gradients together with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[Deferred] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and torch.is_grad_enabled() and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if x.requires_grad and all(
                each is None or (each.is_leaf and each.requires_grad) for each in (weight, bias)
            ):
                return SplitLinear.apply(x, (weight, bias), self.later)
        return func(*args, **kwargs or {})

    def finish(self) -> None:
        """Compute the gradients of weights and add them to `.grad`, with the hooks that a backward calls."""
        while self.later:
            x, weight, bias, grad = self.later.pop(0)
            x, flat = x.flatten(0, -2), grad.flatten(0, -2)
            torch.autograd.backward([weight], [flat.mT @ x])  # in torch's own order: the same bits
            if bias is not None:
                torch.autograd.backward([bias], [flat.sum(0)])
