"""RMSNorm of a sum, and the sum: what a pre-norm block does between its branches, in one pass over memory.

    s = x + residual,   y = rmsnorm(s)

The residual stream is needed again after the norm, so plain torch writes s, reads it back and writes y. The kernels of
`rmsnorm.py` write both at once, and their backward adds the gradient that comes back along the stream.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import reference
from kernels.backend import runs_triton
from kernels.ops import define
from kernels.rmsnorm import check, fake_rmsnorm, forward, rmsnorm_backward


def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    if runs_triton(x, residual, weight):
        total = torch.empty_like(x)
        y, inverse_rms = forward(x, weight, eps, residual, total)
        return y, total, inverse_rms
    total = (reference.widen(x) + residual).to(x.dtype)
    return reference.rmsnorm(total, weight, eps), total, reference.inverse_rms(total, eps).squeeze(-1)


def _fake_add(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, inverse_rms = fake_rmsnorm(x)
    return y, x.new_empty(x.shape), inverse_rms


_add_op = define(
    "add_rmsnorm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _add_rmsnorm,
    _fake_add,
)


class TritonAddRMSNormFunction(torch.autograd.Function):
    """The sum that a block's residual stream needs and its norm, in one pass: apply(x, residual, weight, eps=1e-5)
    -> (rmsnorm(x + residual), x + residual), all (... d_model) but weight (d_model); of x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        check(weight, x=x, residual=residual)
        y, total, inverse_rms = _add_op(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, inverse_rms)
        ctx.eps, ctx.residual_dtype = eps, residual.dtype
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight, *_ = ctx.needs_input_grad
        need_sum = need_x or need_residual
        grad_x, grad_weight = rmsnorm_backward(grad, *ctx.saved_tensors, grad_sum, ctx.eps, need_sum, need_weight)
        return (
            grad_x if need_x else None,
            grad_x.to(ctx.residual_dtype) if need_residual else None,
            grad_weight if need_weight else None,
            None,
        )
