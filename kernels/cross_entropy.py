"""A language model's head and its loss, fused: the logits of all tokens never exist at the same time.

    z = hidden weight^T,    loss = mean over kept tokens of log sum_j exp(z_j) - z_target

With a vocabulary of 128,256 the logits of 16,384 tokens are 4 GB in bfloat16; with softmax and gradient it is 12 GB.
Here the logits of one chunk of tokens are computed, one kernel replaces them by their gradient in place, and two matrix
products turn that into the gradients of hidden and weight, for dL/dloss = 1; backward scales them. For n tokens the
lower bound is three matrix products, 6 n vocab d_model FLOPs, and 2 n vocab numbers read and written.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.checks import check_shape, check_tensors, once_differentiable
from kernels.launch import ceil_power_of_2, define, jit, launch, launch_over, new_like, runs_triton, tl


@jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, ignore_index,
    VOCAB: tl.constexpr, STRIDE: tl.constexpr, NEED_GRAD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program takes one token: its loss, and with NEED_GRAD dL/dz_j = softmax(z)_j - [j = target] in place of z_j.
    The sum of exponentials, s, is kept relative to the largest logit so far, m, and rescaled when m grows (Milakov and
    Gimelshein, arXiv:1805.02867, algorithm 3): log sum_j exp(z_j) = m + log s. The second pass reads backwards, so that
    it begins with what is still in the cache."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    at = row * STRIDE
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if NEED_GRAD:
            for first in range(0, STRIDE, BLOCK):
                column = first + tl.arange(0, BLOCK)
                tl.store(logits_ptr + at + column, tl.zeros((BLOCK,), dtype=tl.float32), mask=column < STRIDE)
    else:
        is_word = (target >= 0) & (target < VOCAB)
        picked = tl.load(logits_ptr + at + target, mask=is_word, other=0.0).to(tl.float32)
        missing = tl.where(is_word, 0.0, float("nan"))  # reports a bad target without a wait of the host
        lowest = -3.4028234663852886e38  # the first m is finite, because -inf - -inf is NaN
        largest = tl.full((BLOCK // 8,), lowest, dtype=tl.float32)
        total = tl.zeros((BLOCK // 8,), dtype=tl.float32)
        # 8 neighbours, which one thread holds, share an m and an s: threads wait for each other only at the end.
        lane = 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
        for first in tl.range(0, STRIDE, BLOCK, num_stages=STAGES):
            # The padding is read, so that loads are 16 bytes wide, and then ignored.
            z = tl.load(logits_ptr + at + first + lane, mask=first + lane < STRIDE, eviction_policy="evict_last")
            z = tl.where(first + lane < VOCAB, z.to(tl.float32), -float("inf"))
            grown = tl.maximum(largest, tl.max(z, axis=1))
            total = total * tl.exp(largest - grown) + tl.sum(tl.exp(z - grown[:, None]), axis=1)
            largest = grown
        grown = tl.max(largest, axis=0)
        total = tl.sum(total * tl.exp(largest - grown), axis=0)
        tl.store(losses_ptr + row, tl.log(total) + (grown - picked) + missing)
        if NEED_GRAD:
            BLOCKS: tl.constexpr = (STRIDE + BLOCK - 1) // BLOCK
            for block in tl.range(0, BLOCKS, num_stages=STAGES):
                column = (BLOCKS - 1 - block) * BLOCK + tl.arange(0, BLOCK)
                z = tl.load(logits_ptr + at + column, mask=column < STRIDE, other=0.0, eviction_policy="evict_first")
                softmax = tl.exp(z.to(tl.float32) - grown) * (1.0 / total + missing)
                tl.store(logits_ptr + at + column, softmax - tl.where(column == target, 1.0, 0.0), mask=column < STRIDE)


@jit
def scale_kernel(x_ptr, factor_ptr, y_ptr, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """y = factor x, rounded to y's dtype, for a factor in the GPU's memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.cast(units, tl.int64) * UNIT
    x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(y_ptr + at, x * tl.load(factor_ptr), mask=inside)


def chunk_tokens(vocab: int, d_model: int, itemsize: int) -> int:
    """Tokens whose logits exist at the same time: up to 512 MiB or the weight's size, whichever is more, but 1024 to
    4096, for which matrix products run at full speed."""
    budget = max(512 * 2**20, vocab * d_model * itemsize)
    return min(4096, max(1024, budget // (vocab * itemsize) // 128 * 128))


def rows_in_place(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, need_grad: bool) -> None:
    """Losses (tokens) of logits (tokens vocab), which with need_grad become their gradients. Their rows are padded."""
    tokens, vocab = logits.shape
    stride = logits.stride(0)
    # 32 bytes per thread. From 64 Ki logits on a row takes a whole multiprocessor: with fewer rows under way, more of
    # each is still in the cache for the second pass.
    num_warps = max(4, min(32, ceil_power_of_2(stride) // 2048))
    block = num_warps * 1024 // logits.element_size()
    constants = {"VOCAB": vocab, "STRIDE": stride, "NEED_GRAD": need_grad, "BLOCK": block, "STAGES": 3}
    arguments = (logits, targets, losses, ignore_index)
    launch(cross_entropy_kernel, (tokens, 1, 1), *arguments, num_warps=num_warps, **constants)


def in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, need_hidden: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (tokens), and of their sum the gradients for hidden and weight, each empty where it is not needed."""
    tokens, (vocab, d_model) = hidden.shape[0], weight.shape
    size = min(tokens, chunk_tokens(vocab, d_model, hidden.element_size()))
    padded = -(-vocab // 64) * 64  # rows of 128 bytes or a multiple: cuBLAS and the kernel read and write them whole
    buffer = hidden.new_empty(size, padded)[:, :vocab]
    losses, grad_hidden = hidden.new_empty(tokens, dtype=torch.float32), new_like(hidden, need_hidden)
    grad_weight = new_like(weight, need_weight, torch.float32)
    if not tokens:
        grad_weight.zero_()
    for first in range(0, tokens, max(1, size)):
        some = slice(first, first + size)
        chunk = hidden[some]
        logits = torch.mm(chunk, weight.T, out=buffer[: len(chunk)])
        rows_in_place(logits, targets[some], losses[some], ignore_index, need_hidden or need_weight)
        if need_hidden:
            torch.mm(logits, weight, out=grad_hidden[some])
        if need_weight and logits.is_cuda and logits.dtype != torch.float32:
            torch.addmm(grad_weight, logits.T, chunk, torch.float32, beta=int(first > 0), out=grad_weight)
        elif need_weight:  # the CPU has no product of mixed dtypes
            torch.addmm(grad_weight, logits.T.float(), chunk.float(), beta=int(first > 0), out=grad_weight)
    return losses, grad_hidden, grad_weight


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, _: int, *need: bool) -> tuple[Tensor, ...]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss, kept = hidden.new_empty((), dtype=wide), targets.new_empty(())
    return loss, kept, new_like(hidden, need[0]), new_like(weight, need[1], wide)


@define("linear_cross_entropy", _fake)
def _forward_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, need_hidden: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    if targets.device.type == "cpu":  # reading a GPU's targets would wait for it
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))]
        if wrong.numel():
            raise ValueError(f"targets contains {wrong[0]}, neither in [0, {len(weight)}) nor {ignore_index=}")
    kept = (targets != ignore_index).sum()
    with torch.no_grad(), reference.no_autocast(hidden):
        if runs_triton(hidden):
            arguments = hidden, weight, targets, ignore_index, need_hidden, need_weight
            losses, grad_hidden, grad_weight = in_chunks(*arguments)
            return losses.sum() / kept, kept, grad_hidden, grad_weight
        wide = reference.widen(weight)
        loss = reference.cross_entropy(hidden, wide, targets, ignore_index)
        of_hidden, of_weight = hidden, wide
        if need_hidden or need_weight:
            of_hidden, of_weight = reference.cross_entropy_backward(kept, hidden, wide, targets, ignore_index)
        grad_hidden = of_hidden if need_hidden else new_like(hidden, False)
        return loss, kept, grad_hidden, of_weight if need_weight else new_like(wide, False)


@define("scaled", lambda x, _, dtype: new_like(x, dtype=dtype))
def _scaled_op(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    y = new_like(x, dtype=dtype)
    if not runs_triton(x) or dtype == torch.float64:
        return y.copy_(reference.widen(x) * factor)
    launch_over(scale_kernel, x, factor, y)
    return y


def check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raises TypeError or ValueError if hidden (... d_model), weight (vocab d_model) and targets (...) do not fit."""
    check_tensors(hidden=hidden, weight=weight, targets=targets)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight has shape {tuple(weight.shape)}, not (vocab, d_model) with at least one of each")
    check_shape("hidden", hidden, (*hidden.shape[:-1], weight.shape[1]), "weight's last dimension")
    check_shape("targets", targets, tuple(hidden.shape[:-1]), "hidden without its last dimension")


def as_linear_would(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """hidden and weight in the dtype of their product: autocast's, or their own. Raises ValueError if these differ."""
    device = hidden.device.type
    casts = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    if casts and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
        return hidden.to(dtype), weight.to(dtype)
    if hidden.dtype != weight.dtype:
        dtypes = f"hidden is {hidden.dtype} and weight {weight.dtype}"
        raise ValueError(f"{dtypes}; cast one to the other's dtype or use torch.autocast")
    return hidden, weight


class LinearCrossEntropyFunction(torch.autograd.Function):
    """`reference.cross_entropy` in chunks: apply(hidden, weight, targets, ignore_index=-100), hidden (... d_model),
    weight (vocab d_model), targets (...) of int64 -> the mean loss, a float32 scalar.

    Gradients are computed in forward and kept until backward: that of hidden in its dtype, that of weight in float32.
    As in torch, logits are rounded to the dtype of the product, and if every token is ignored, the loss is 0 / 0 and
    the gradients are zero (NaN for a hidden of NaN). The reference, which holds all logits, computes float64.
    Raises TypeError for dtypes that do not fit, ValueError for such shapes or devices, for dtypes that differ outside
    autocast, and on a CPU for a target outside [0, vocab); on a GPU, which is not waited for, it makes the loss NaN.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        check(hidden, weight, targets)
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype)
        hidden, weight = as_linear_would(hidden, weight)
        loss, kept, grad_hidden, grad_weight = _forward_op(
            hidden.reshape(-1, weight.shape[1]), weight, targets.reshape(-1), ignore_index, need_hidden, need_weight
        )
        ctx.save_for_backward(kept, grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        kept, grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad / kept.clamp(min=1)
        grad_hidden = _scaled_op(grad_hidden, factor, ctx.dtypes[0]).view(ctx.shape) if need_hidden else None
        return grad_hidden, _scaled_op(grad_weight, factor, ctx.dtypes[1]) if need_weight else None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """`LinearCrossEntropyFunction`, which computes no gradients where none are recorded, as in evaluation."""
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    return LinearCrossEntropyFunction.apply(hidden, weight, targets, ignore_index)
