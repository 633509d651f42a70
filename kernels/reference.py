"""The operators of the fused kernels in plain torch, each with its gradient in closed form.

A fused kernel must equal its reference and be faster; without Triton the reference runs. Arithmetic is in float32 at
least ("wide"), because a mean of squares in half precision loses most of its digits. A result has its input's dtype.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Context in which matrix products have their operands' precision, within autocast, too. Otherwise attention's
    log-sum-exp would be that of rounded scores, and backward, which computes them outside autocast, not fit it."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """r = 1 / sqrt(mean_j(x_j^2) + eps): (... d_model) -> (... 1), wide."""
    return torch.rsqrt(widen(x).pow(2).mean(dim=-1, keepdim=True) + eps)


def rmsnorm(x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    y_j = g_j x_j r,  r = 1 / sqrt(mean_j(x_j^2) + eps)

    x is (... d_model) and g (d_model); y has x's shape and dtype.
    """
    return (widen(x) * inverse_rms(x, eps) * g).to(x.dtype)


def rmsnorm_backward_g(grad_output: Tensor, x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    """dL/dg of `rmsnorm`: (d_model), in g's dtype, from dL/dy (... d_model). dL/dg_j = sum over rows of dL/dy_j x_j r,
    because y_j depends on g_j only, in every row."""
    each_row = widen(grad_output) * widen(x) * inverse_rms(x, eps)
    return each_row.reshape(x.shape[:-1].numel(), x.shape[-1]).sum(dim=0).to(g.dtype)


def rmsnorm_backward_x(grad_output: Tensor, x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    """dL/dx of `rmsnorm`: (... d_model), in x's dtype, from dL/dy (... d_model). dr/dx_j = -r^3 x_j / d_model, so that
    every y_i depends on x_j through r: dL/dx_j = r g_j dL/dy_j - x_j r^3 mean_i(dL/dy_i g_i x_i)"""
    wide, r = widen(x), inverse_rms(x, eps)
    scaled = widen(grad_output) * g
    return (r * scaled - wide * r**3 * (scaled * wide).mean(dim=-1, keepdim=True)).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp: q (... queries dim), k, v (... keys dim) -> (... queries dim), (... queries).

    S = Q K^T / sqrt(dim),  L_i = log sum_j exp(S_ij),  P_ij = exp(S_ij - L_i),  O = P V

    (Dao, arXiv:2307.08691, section 2.2.) With is_causal, query i sees keys 0 to i. L is wide, O of q's dtype.
    """
    with no_autocast(q):
        scores = widen(q) @ widen(k).mT / math.sqrt(q.shape[-1])
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return (scores.softmax(dim=-1) @ widen(v)).to(q.dtype), scores.logsumexp(dim=-1)


def attention_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dq, dL/dk, dL/dv of `attention` from dL/dO, what forward computed, and no stored matrix of scores.

    D_i = sum_d dO_id O_id,  dV = P^T dO,  dP = dO V^T,  dS_ij = P_ij (dP_ij - D_i),
    dQ = dS K / sqrt(dim),  dK = dS^T Q / sqrt(dim)

    (arXiv:2307.08691, section 2.3.) The softmax's gradient needs sum_j P_ij dP_ij, which is D_i: P_i V is O_i.
    """
    root = math.sqrt(q.shape[-1])
    wide_q, wide_k, wide_v, grad = widen(q), widen(k), widen(v), widen(grad_output)
    with no_autocast(q):
        weights = (wide_q @ wide_k.mT / root - log_sum_exp.unsqueeze(-1)).exp()  # rounded as in forward: no more than 1
        if is_causal:
            weights = weights.masked_fill(torch.ones_like(weights, dtype=torch.bool).triu(1), 0.0)
        row_dot = (grad * widen(output)).sum(dim=-1, keepdim=True)
        grad_scores = weights * (grad @ wide_v.mT - row_dot) / root
        of_q, of_k, of_v = grad_scores @ wide_k, grad_scores.mT @ wide_q, weights.mT @ grad
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross entropy in nats: hidden (... d_model), weight (vocab d_model) and targets (...) -> a wide scalar.

    z = hidden weight^T,  loss = mean over kept tokens of log sum_j exp(z_j) - z_target

    Tokens whose target is ignore_index are left out; if all are, the loss is 0 / 0, as in torch.
    """
    logits = widen(hidden.reshape(-1, hidden.shape[-1])) @ widen(weight).mT
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=ignore_index)


def cross_entropy_backward(
    grad_loss: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """dL/dhidden and dL/dweight of `cross_entropy` from dL/dloss, a scalar.

    dL/dz_j = dL/dloss (softmax(z)_j - [j = target]) / kept tokens,  dL/dhidden = dL/dz weight,
    dL/dweight = dL/dz^T hidden
    """
    wide, flat = widen(hidden.reshape(-1, hidden.shape[-1])), targets.reshape(-1)
    kept = flat != ignore_index
    grad_logits = (wide @ widen(weight).mT).softmax(dim=-1)
    grad_logits[kept, flat[kept]] -= 1
    # If all tokens are ignored, the loss is NaN and the gradients are zero.
    grad_logits = torch.where(kept[:, None], grad_logits, 0.0) * (grad_loss / kept.sum().clamp(min=1))
    return (grad_logits @ widen(weight)).view_as(hidden).to(hidden.dtype), (grad_logits.mT @ wide).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of SwiGLU (Shazeer, arXiv:2002.05202): gate and up (... d_ff) -> (... d_ff).

    y = silu(gate) up,  silu(a) = a s,  s = 1 / (1 + exp(-a))
    """
    return (F.silu(widen(gate)) * widen(up)).to(gate.dtype)


def swiglu_backward(grad_output: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dgate and dL/dup of `swiglu` from dL/dy, all (... d_ff).

    silu'(a) = s (1 + a (1 - s)),  dL/dgate = dL/dy up silu'(gate),  dL/dup = dL/dy silu(gate)
    """
    wide, grad = widen(gate), widen(grad_output)
    s = torch.sigmoid(wide)
    return (grad * widen(up) * s * (1 + wide * (1 - s))).to(gate.dtype), (grad * wide * s).to(up.dtype)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """y = sum_j w_j x_j: x (... columns), weight (columns) -> (...), in x's dtype."""
    return (widen(x) * widen(weight)).sum(dim=-1).to(x.dtype)
