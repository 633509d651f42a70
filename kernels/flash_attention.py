"""FlashAttention-2 in Triton: the forward kernel, the tiles, launchers, autograd.Function.

    O = softmax(Q K^T / sqrt(dim)) V,   L_i = log sum_j exp(S_ij)

A tile of scores stays in registers between two matrix products. Read `tiled_attention.py` first: it explains the
algorithm in plain torch. The kernels of backward are in `flash_attention_backward.py`.

A kernel's loop is compiled twice: for tiles without a mask, and with one for tiles that the diagonal or the sequence's
end cuts through. Tiles beyond the diagonal are never read. exp(S / sqrt(dim)) is computed as exp2(S scale) with
scale = log2(e) / sqrt(dim), because the hardware's exponential is exp2.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.checks import once_differentiable
from kernels.flash_attention_backward import keys_kernel, queries_kernel, rows_kernel
from kernels.launch import ceil_power_of_2, define, jit, launch, new_like, runs_triton, tl
from kernels.tiled_attention import check

MAX_DIM = 128  # beyond, the sums of one tile no longer fit the registers
PADDING = 128  # rows that backward prepares come in multiples of this: the largest tile of queries


@jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, log_sum_exp_ptr, queries, keys,
    SCALE: tl.constexpr, DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """O and L of one tile of queries (Dao, arXiv:2307.08691, algorithm 1); `tiled_attention.forward` has the maths."""
    log2_e: tl.constexpr = 1.4426950408889634
    scale: tl.constexpr = SCALE * log2_e
    tiles = tl.cdiv(queries, BLOCK_QUERIES)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    # The last queries see the most keys. Started first, they do not prolong the end.
    first_query = (tiles - 1 - tile if IS_CAUSAL else tile) * BLOCK_QUERIES
    query, key, column = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    inside = (first_query + query < queries)[:, None] & (column < DIM)[None, :]
    at_queries, at_keys = query[:, None] * DIM + column[None, :], key[:, None] * DIM + column[None, :]
    row = batch * queries + first_query
    q = tl.load(q_ptr + row * DIM + at_queries, mask=inside, other=0.0)
    maximum = tl.full((BLOCK_QUERIES,), -3.4028234663852886e38, dtype=tl.float32)  # finite: -inf - -inf is NaN
    total = tl.zeros((BLOCK_QUERIES,), dtype=tl.float32)
    o = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), dtype=tl.float32)
    # A query sees keys up to its `last`; all of this tile see the keys before `whole`, none sees keys from `seen` on.
    last = tl.minimum(first_query + query, keys - 1) if IS_CAUSAL else tl.full((BLOCK_QUERIES,), keys - 1, tl.int32)
    seen = tl.minimum(keys, first_query + BLOCK_QUERIES) if IS_CAUSAL else keys
    whole = (tl.minimum(keys, first_query + 1) if IS_CAUSAL else keys) // BLOCK_KEYS * BLOCK_KEYS
    for masked in tl.static_range(2):
        for first_key in range(whole if masked else 0, seen if masked else whole, BLOCK_KEYS):
            at = (batch * keys + first_key) * DIM
            within = (column < DIM)[None, :]
            if masked:
                within = within & (first_key + key < keys)[:, None]
            k = tl.load(k_ptr + at + at_keys, mask=within, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if masked:
                scores = tl.where(first_key + key[None, :] <= last[:, None], scores, float("-inf"))
            larger = tl.maximum(maximum, tl.max(scores, axis=1))
            weights = tl.exp2((scores - larger[:, None]) * scale)  # subtract first: large products lose digits
            rescale = tl.exp2((maximum - larger) * scale)
            total = total * rescale + tl.sum(weights, axis=1)
            v = tl.load(v_ptr + at + at_keys, mask=within, other=0.0)
            o = tl.dot(weights.to(v.dtype), v, o * rescale[:, None], input_precision=PRECISION)
            maximum = larger
    tl.store(o_ptr + row * DIM + at_queries, (o / total[:, None]).to(q.dtype), mask=inside)
    log_sum_exp = maximum * SCALE + tl.log2(total) / log2_e
    tl.store(log_sum_exp_ptr + row + query, log_sum_exp, mask=first_query + query < queries)


# Queries and keys that a program holds at a time, its warps, and how many tiles are on their way: by pass and
# arithmetic, for dim <= 64 and beyond, the largest tiles whose numbers stay in registers. Tensor cores of sm_90 take
# 64 rows for each 4 warps; without them ("ieee") the operands, too, are held in registers.
TILES = {
    ("forward", "half"): ((128, 64, 4, 3), (128, 128, 8, 3)),
    ("causal forward", "half"): ((128, 64, 4, 3), (128, 64, 8, 3)),
    ("keys", "half"): ((64, 128, 8, 3), (32, 128, 8, 3)),
    ("queries", "half"): ((128, 64, 8, 2), (128, 64, 8, 2)),
    ("forward", "tf32"): ((128, 64, 8, 2), (128, 32, 8, 2)),
    ("keys", "tf32"): ((32, 128, 8, 2), (16, 32, 8, 2)),
    ("queries", "tf32"): ((128, 32, 8, 2), (128, 32, 8, 2)),
    ("forward", "ieee"): ((64, 32, 8, 2), (32, 16, 8, 2)),
    ("keys", "ieee"): ((32, 32, 8, 1), (16, 32, 8, 1)),
    ("queries", "ieee"): ((64, 32, 8, 2), (16, 32, 8, 2)),
}


def arithmetic(dtype: torch.dtype) -> str:
    """Precision of matrix products: "half"; for float32, "tf32" where torch's own products may use it, else "ieee"."""
    single = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    return single if dtype == torch.float32 else "half"


def launch_pass(
    kernel: Any, name: str, tensors: tuple[Tensor, ...], q: Tensor, k: Tensor, is_causal: bool, **constants: Any
) -> None:
    """Start a program for each tile of keys, in the pass of that name, or of queries, in "forward" and "queries". A
    sequence's tile, and so its bits, do not depend on its batch."""
    (queries, dim), keys, kind = q.shape[-2:], k.shape[-2], arithmetic(q.dtype)
    causal = TILES.get((f"causal {name}", kind)) if is_causal else None
    block_queries, block_keys, num_warps, num_stages = (causal or TILES[name, kind])[dim > 64]
    programs = -(-keys // block_keys) if name == "keys" else -(-queries // block_queries)
    grid = (q.shape[:-2].numel() * programs, 1, 1)
    constants |= {"SCALE": dim**-0.5, "DIM": dim, "IS_CAUSAL": is_causal}
    constants |= {"PRECISION": "tf32" if kind == "tf32" else "ieee", "BLOCK_DIM": max(16, ceil_power_of_2(dim))}
    constants |= {"BLOCK_QUERIES": block_queries, "BLOCK_KEYS": block_keys}
    launch(kernel, grid, *tensors, queries, keys, num_warps=num_warps, num_stages=num_stages, **constants)


@define("flash_attention", lambda q, *_: (new_like(q), reference.widen(q.new_empty(q.shape[:-1]))))
def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The operator: O (... queries dim) and L (... queries); without keys, zeros and minus infinity."""
    if not runs_triton(q):
        return reference.attention(q, k, v, is_causal)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if not k.shape[-2]:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    o, log_sum_exp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.numel():
        launch_pass(forward_kernel, "forward", (q, k, v, o, log_sum_exp), q, k, is_causal)
    return o, log_sum_exp


@define("flash_attention_backward", lambda _, q, k, v, *rest: tuple(map(new_like, (q, k, v), (*rest[-2:], rest[-1]))))
def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum_exp: Tensor, is_causal: bool,
    need_q: bool, need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator: dL/dq, dL/dk and dL/dv, each empty where it is not needed."""
    if not runs_triton(q):
        of_q, of_k, of_v = reference.attention_backward(grad, q, k, v, o, log_sum_exp, is_causal)
        return of_q if need_q else new_like(q, False), *((of_k, of_v) if need_kv else (q.new_empty(0), q.new_empty(0)))
    grad, q, k, v, o, log_sum_exp = (each.contiguous() for each in (grad, q, k, v, o, log_sum_exp))
    grad_q, grad_k, grad_v = new_like(q, need_q), new_like(k, need_kv), new_like(v, need_kv)
    if not (q.numel() and k.numel()):
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    (queries, dim), batch = q.shape[-2:], q.shape[:-2].numel()
    padded = -(-queries // PADDING) * PADDING
    log2_sum_exp, row_dot = q.new_empty((2, batch, padded), dtype=torch.float32)
    sizes = {"DIM": dim, "BLOCK_DIM": ceil_power_of_2(dim), "PADDING": PADDING, "BLOCK_ROWS": 32}
    grid = (batch * padded // 32, 1, 1)
    launch(rows_kernel, grid, grad, o, log_sum_exp, log2_sum_exp, row_dot, queries, num_warps=4, **sizes)
    inputs = (grad, q, k, v, log2_sum_exp, row_dot)
    if need_kv:
        launch_pass(keys_kernel, "keys", (*inputs, grad_k, grad_v), q, k, is_causal, PADDING=PADDING)
    if need_q:
        launch_pass(queries_kernel, "queries", (*inputs, grad_q), q, k, is_causal, PADDING=PADDING)
    return grad_q, grad_k, grad_v


class FlashAttention2(torch.autograd.Function):
    """`reference.attention` fused: apply(q, k, v, is_causal=False), q (... queries dim), k and v (... keys dim) -> (...
    queries dim), all float32, float16 or bfloat16 (float64 takes the reference). With is_causal, query i sees keys 0 to
    i. Keeps q, k, v, O and L for backward: memory linear in the sequence. Raises TypeError for integers, ValueError for
    tensors that do not belong together or a dim above 128."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check(q, k, v, is_causal)
        if not 1 <= q.shape[-1] <= MAX_DIM:
            raise ValueError(f"q, k and v have dim {q.shape[-1]}; these kernels can do 1 to {MAX_DIM}")
        o, log_sum_exp = flash_attention(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, log_sum_exp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_q, need_k, need_v, *_ = ctx.needs_input_grad
        gradients = flash_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, need_q, need_k or need_v)
        return *gradients, None
