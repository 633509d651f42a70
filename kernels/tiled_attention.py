"""FlashAttention-2 in plain torch, tile by tile: the algorithm of `flash_attention.py` without Triton's syntax.

    O = softmax(Q K^T / sqrt(dim)) V

The (queries keys) scores are computed one tile at a time and not kept. This is possible because a softmax can be summed
in pieces, which are rescaled when a larger score appears, and because backward can recompute any tile from one number
per row, the logarithm of the softmax's denominator.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.checks import check_shape, check_tensors, once_differentiable
from kernels.reference import no_autocast, widen

QUERY_TILE, KEY_TILE = 64, 32


def tiles(length: int, size: int) -> Iterator[slice]:
    """Cut a sequence into slices of `size`; the last one may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def scores(q: Tensor, k: Tensor, query_tile: slice, key_tile: slice, is_causal: bool) -> Tensor:
    """One tile of S = Q K^T / sqrt(dim), wide: (... query_tile key_tile), with minus infinity where j > i."""
    s = widen(q[..., query_tile, :]) @ widen(k[..., key_tile, :]).mT / math.sqrt(q.shape[-1])
    if is_causal:
        query = torch.arange(query_tile.start, query_tile.stop, device=q.device)
        key = torch.arange(key_tile.start, key_tile.stop, device=q.device)
        s = s.masked_fill(key[None, :] > query[:, None], -math.inf)
    return s


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """O (... queries dim) and the log-sum-exp L (... queries) (Dao, arXiv:2307.08691, algorithm 1).

    Over the tiles j of keys; m is the largest score so far, and relative to exp(m) l is the denominator, O the output:

        m' = max(m, rowmax(S_j)),  P_j = exp(S_j - m'),
        l' = exp(m - m') l + rowsum(P_j),  O' = exp(m - m') O + P_j V_j

    and at the end O / l and L = m + log(l). Nothing overflows, since no exponent is above 0.
    """
    output, log_sum_exp = torch.zeros_like(q), widen(q.new_full(q.shape[:-1], -math.inf))
    if not k.shape[-2]:
        return output, log_sum_exp
    for query_tile in tiles(q.shape[-2], QUERY_TILE):
        maximum = log_sum_exp[..., query_tile].nan_to_num()  # finite, since -inf - -inf is NaN
        total = torch.zeros_like(maximum)
        weighted = widen(output[..., query_tile, :])  # zero
        for key_tile in tiles(k.shape[-2], KEY_TILE):
            if is_causal and key_tile.start >= query_tile.stop:
                continue  # no query of this tile sees these keys
            s = scores(q, k, query_tile, key_tile, is_causal)
            larger = torch.maximum(maximum, s.amax(dim=-1))
            weights = (s - larger.unsqueeze(-1)).exp()
            rescale = (maximum - larger).exp()
            total = total * rescale + weights.sum(dim=-1)
            weighted = weighted * rescale.unsqueeze(-1) + weights @ widen(v[..., key_tile, :])
            maximum = larger
        output[..., query_tile, :] = (weighted / total.unsqueeze(-1)).to(q.dtype)
        log_sum_exp[..., query_tile] = maximum + total.log()
    return output, log_sum_exp


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum_exp: Tensor, is_causal: bool,
    need_q: bool, need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV (algorithm 2, in two passes), zero where not needed. A tile of P is recomputed from S and L:

        P = exp(S - L),  dP = dO V^T,  dS = P (dP - D)        with D = rowsum(dO O) of `reference.attention_backward`
        dV = P^T dO,  dK = dS^T Q / sqrt(dim),  dQ = dS K / sqrt(dim)

    Each tile of keys sums over the tiles of queries that see it; for dQ the tiles of P are computed a second time. To
    add to dQ in the first pass, tiles of keys that run in parallel would have to take turns at the same rows.
    """
    row_dot, root = (widen(grad) * widen(output)).sum(dim=-1), math.sqrt(q.shape[-1])
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    query_tiles, key_tiles = list(tiles(q.shape[-2], QUERY_TILE)), list(tiles(k.shape[-2], KEY_TILE))

    def tile_gradients(query_tile: slice, key_tile: slice) -> tuple[Tensor, Tensor]:
        s = scores(q, k, query_tile, key_tile, is_causal)
        weights = (s - log_sum_exp[..., query_tile, None]).exp()
        grad_weights = widen(grad[..., query_tile, :]) @ widen(v[..., key_tile, :]).mT
        return weights, weights * (grad_weights - row_dot[..., query_tile, None])

    for key_tile in key_tiles if need_kv else ():
        total_k, total_v = widen(grad_k[..., key_tile, :]), widen(grad_v[..., key_tile, :])
        for query_tile in query_tiles:
            if not is_causal or key_tile.start < query_tile.stop:
                weights, grad_scores = tile_gradients(query_tile, key_tile)
                total_v = total_v + weights.mT @ widen(grad[..., query_tile, :])
                total_k = total_k + grad_scores.mT @ widen(q[..., query_tile, :])
        grad_k[..., key_tile, :], grad_v[..., key_tile, :] = (total_k / root).to(k.dtype), total_v.to(v.dtype)
    for query_tile in query_tiles if need_q else ():
        total = widen(grad_q[..., query_tile, :])
        for key_tile in key_tiles:
            if not is_causal or key_tile.start < query_tile.stop:
                total = total + tile_gradients(query_tile, key_tile)[1] @ widen(k[..., key_tile, :])
        grad_q[..., query_tile, :] = (total / root).to(q.dtype)
    return grad_q, grad_k, grad_v


def check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    """Raises TypeError for integers and for a mask in place of is_causal, ValueError for q (... queries dim), k and v
    (... keys dim) that differ in dtype, device, leading dimensions or dim."""
    check_tensors(q=q, k=k, v=v)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, not a {type(is_causal).__name__}: there are no other masks")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, q {q.dtype}; cast one of them")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; (... sequence dim) is demanded")
    check_shape("k", k, (*q.shape[:-2], k.shape[-2], q.shape[-1]), f"q's {tuple(q.shape)}")
    check_shape("v", v, tuple(k.shape), "k")


class TiledAttentionFunction(torch.autograd.Function):
    """`reference.attention` in tiles: apply(q, k, v, is_causal=False), q (... queries dim), k and v (... keys dim) ->
    (... queries dim), all of one dtype. Keeps q, k, v, O and L for backward. Errors: see `check`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check(q, k, v, is_causal)
        with no_autocast(q):
            output, log_sum_exp = forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, output, log_sum_exp)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_q, need_k, need_v, *_ = ctx.needs_input_grad
        kept = (*ctx.saved_tensors, ctx.is_causal, need_q, need_k or need_v)
        with no_autocast(grad):
            return *backward(grad, *kept), None
