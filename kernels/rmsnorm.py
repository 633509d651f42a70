"""RMSNorm in Triton, also of the sum x + residual, forward and backward; each row is read once.

    y_j = w_j x_j r        with r = 1 / sqrt(mean_j(x_j^2) + eps)

Reading x and writing y take most of the time. So a row stays in registers between its two uses, where plain torch reads
it twice. Rows too long for the registers are in `rmsnorm_wide.py`. A pre-norm block norms the sum x + residual and
needs it again after the norm: with ADD the kernels write both at once, and backward adds the stream's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.checks import check_rows, once_differentiable
from kernels.launch import ceil_power_of_2, define, jit, launch, new_like, num_multiprocessors, runs_triton, tl
from kernels.rmsnorm_wide import halves_backward_kernel, row_mean_kernel, wide_forward_kernel


@jit
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, inverse_rms_ptr, rows,
    COLUMNS: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program normalises BLOCK_ROWS rows; with ADD, those of x + residual, which it also stores."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]  # there may be more than 2^31 elements
    # The weight is loaded before the sum waits for x. Every program reads it, so it stays in the cache.
    weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0, eviction_policy="evict_last")
    x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)  # rounded: what backward will find in memory
        tl.store(sum_ptr + at, x, mask=inside, eviction_policy="evict_first")
    x = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / COLUMNS + EPS)
    y = x * inverse_rms[:, None] * weight.to(tl.float32)[None, :]
    tl.store(y_ptr + at, y, mask=inside, eviction_policy="evict_first")
    tl.store(inverse_rms_ptr + row, inverse_rms, mask=row < rows)


@jit
def backward_kernel(
    grad_ptr, x_ptr, weight_ptr, inverse_rms_ptr, mean_ptr, grad_sum_ptr, grad_x_ptr, partial_ptr, rows,
    COLUMNS: tl.constexpr, ADD: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    SLICED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """dL/dx_j = r (g_j w_j - x_j r^2 mean_i(g_i w_i x_i)) and a part of dL/dw_j = sum over rows of g_j x_j r. A program
    takes every num_programs-th block of rows, so that its sum for the weight stays in registers until it stores it as
    one row of `partial`: no atomics, the same bits every time. With ADD, the sum's gradient is added. SLICED, it has
    some columns only, and the rows' means are given."""
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_row = column < COLUMNS
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=2):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & in_row[None, :]
        at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < rows, other=0.0)
        if NEED_X:
            if SLICED:
                mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            else:
                mean = tl.sum(x * grad * weight[None, :], axis=1) * inverse_rms * inverse_rms / COLUMNS
            grad_x = (grad * weight[None, :] - x * mean[:, None]) * inverse_rms[:, None]
            if ADD:
                grad_sum = tl.load(grad_sum_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
                grad_x += grad_sum.to(tl.float32)
            tl.store(grad_x_ptr + at, grad_x, mask=inside, eviction_policy="evict_first")
        if NEED_WEIGHT:
            total += grad * x * inverse_rms[:, None]
    if NEED_WEIGHT:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * COLUMNS + column, tl.sum(total, axis=0), mask=in_row)


@jit
def column_sum_kernel(
    partial_ptr, total_ptr, programs,
    COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The programs' parts of dL/dw (programs columns) added up, always in the same order."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for first in range(0, programs, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < programs)[:, None] & (column < COLUMNS)[None, :]
        total += tl.load(partial_ptr + row.to(tl.int64)[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, axis=0), mask=column < COLUMNS)


# Columns of a row that fit into registers without spilling (checked by the code-generation tests): forward holds x,
# backward x, its gradient and the weight's sum. Only the columns decide, so a row's bits do not depend on its batch.
FORWARD_COLUMNS, BACKWARD_COLUMNS = 16_384, 8_192


def forward(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (... columns) and 1 / rms (...) of contiguous tensors; with a residual, of its sum with x, written to total."""
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    y, inverse_rms = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    arguments = (x, residual, weight, y, total, inverse_rms, rows)
    constants: dict[str, Any] = {"COLUMNS": columns, "EPS": eps, "ADD": residual is not None}
    if columns > FORWARD_COLUMNS and rows:
        constants["BLOCK_COLUMNS"] = FORWARD_COLUMNS
        launch(wide_forward_kernel, (rows, 1, 1), *arguments[:-1], num_warps=32, **constants)
    elif x.numel():
        block_columns = ceil_power_of_2(columns)
        block_rows = max(1, 2048 // block_columns)
        # 16 elements per thread: enough bytes in flight to hide latency, few enough for many threads.
        constants |= {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
        grid, num_warps = (-(-rows // block_rows), 1, 1), block_rows * block_columns // 512
        launch(forward_kernel, grid, *arguments, num_warps=num_warps, **constants)
    return y, inverse_rms


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, grad_sum: Tensor | None,
    need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dL/dx (... columns) and dL/dw (columns) of contiguous tensors, each empty where it is not needed."""
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    grad_x = torch.empty_like(x) if need_x else new_like(x, False)
    if not x.numel():
        return grad_x, torch.zeros_like(weight) if need_weight else new_like(weight, False)
    block_columns = min(ceil_power_of_2(columns), BACKWARD_COLUMNS)
    block_rows = max(1, 1024 // block_columns)
    num_warps = block_rows * block_columns // 256  # 8 elements per thread, since backward holds three numbers for each
    # As many programs as run at the same time share the blocks, 32 warps per multiprocessor. But each adds a row of
    # float32 to the traffic, so with a small batch a program takes several blocks.
    blocks, side_by_side = -(-rows // block_rows), num_multiprocessors(x.device)
    programs = min(blocks, side_by_side * (32 // num_warps), max(side_by_side, blocks // 8))
    partial = x.new_empty((programs, columns) if need_weight else 0, dtype=torch.float32)
    inputs, outputs = (grad, x, weight, inverse_rms), (grad_sum, grad_x, partial, rows)
    flags = {"COLUMNS": columns, "ADD": grad_sum is not None, "NEED_X": need_x, "NEED_WEIGHT": need_weight}
    sliced = columns > 2 * BACKWARD_COLUMNS
    mean = new_like(inverse_rms, sliced)
    if sliced:
        block_rows, block_columns, num_warps = 1, 2048, 8
        if need_x:
            sizes = {"COLUMNS": columns, "BLOCK_COLUMNS": 8192}
            launch(row_mean_kernel, (rows, 1, 1), *inputs, mean, num_warps=16, **sizes)
    if columns <= BACKWARD_COLUMNS or sliced:
        grid = (programs, -(-columns // block_columns), 1)
        flags |= {"SLICED": sliced, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
        launch(backward_kernel, grid, *inputs, mean, *outputs, num_warps=num_warps, **flags)
    else:
        grid, flags["HALF"] = (programs, 1, 1), BACKWARD_COLUMNS
        launch(halves_backward_kernel, grid, *inputs, *outputs, num_warps=num_warps, **flags)
    return grad_x, column_sum(partial, weight.dtype) if need_weight else new_like(weight, False)


def column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of the rows of partial (programs columns), float32: (columns), rounded once to the dtype."""
    programs, columns = partial.shape
    total = partial.new_empty(columns, dtype=dtype)
    # With few columns, narrow blocks, so that there are enough programs.
    block_rows, block_columns = (32, 128) if columns <= 16_384 else (4, 1024)
    sizes = {"COLUMNS": columns, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    launch(column_sum_kernel, (-(-columns // block_columns), 1, 1), partial, total, programs, num_warps=4, **sizes)
    return total


@define("rmsnorm", lambda x, *_: (new_like(x), reference.widen(x.new_empty(x.shape[:-1]))))
def _forward_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    if runs_triton(x, weight):
        return forward(x, weight, eps)
    return reference.rmsnorm(x, weight, eps), reference.inverse_rms(x, eps).squeeze(-1)


@define("add_rmsnorm", lambda x, *_: (new_like(x), new_like(x), reference.widen(x.new_empty(x.shape[:-1]))))
def _add_op(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    if runs_triton(x, residual, weight):
        total = torch.empty_like(x)
        y, inverse_rms = forward(x, weight, eps, residual, total)
        return y, total, inverse_rms
    total = (reference.widen(x) + residual).to(x.dtype)
    return reference.rmsnorm(total, weight, eps), total, reference.inverse_rms(total, eps).squeeze(-1)


@define("rmsnorm_backward", lambda grad, x, weight, *rest: tuple(map(new_like, (x, weight), rest[-2:])))
def rmsnorm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, grad_sum: Tensor | None, eps: float,
    need_x: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x (... columns) and weight (columns), with `grad_sum` added to the first; empty where not needed."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    if runs_triton(x, weight):
        grad_sum = None if grad_sum is None else grad_sum.contiguous()
        return backward(grad, x, weight, inverse_rms, grad_sum, need_x, need_weight)
    grad_x = reference.rmsnorm_backward_x(grad, x, weight, eps) if need_x else new_like(x, False)
    if grad_sum is not None and need_x:
        grad_x = (reference.widen(grad_x) + grad_sum).to(x.dtype)
    return grad_x, reference.rmsnorm_backward_g(grad, x, weight, eps) if need_weight else new_like(weight, False)


class TritonRMSNormFunction(torch.autograd.Function):
    """`reference.rmsnorm` fused: apply(x, weight, eps=1e-5), x (... d_model), weight (d_model) -> (... d_model). Any
    mix of dtypes; y has x's. Keeps x, weight and 1 / rms for backward. Errors: see `check_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        check_rows(weight, x=x)
        y, inverse_rms = _forward_op(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *rmsnorm_backward(grad, *ctx.saved_tensors, None, ctx.eps, *ctx.needs_input_grad[:2]), None


class TritonAddRMSNormFunction(torch.autograd.Function):
    """The norm of a sum, and the sum: apply(x, residual, weight, eps=1e-5) -> (rmsnorm(x + residual), x + residual),
    all (... d_model) but weight (d_model); of x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        check_rows(weight, x=x, residual=residual)
        y, total, inverse_rms = _add_op(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, inverse_rms)
        ctx.eps, ctx.residual_dtype = eps, residual.dtype
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight, *_ = ctx.needs_input_grad
        needs = need_x or need_residual, need_weight
        grad_x, grad_weight = rmsnorm_backward(grad, *ctx.saved_tensors, grad_sum, ctx.eps, *needs)
        return grad_x, grad_x.to(ctx.residual_dtype), grad_weight, None


class RMSNormFunction(torch.autograd.Function):
    """`reference.rmsnorm` with its gradients in closed form, in plain torch: apply(x, weight, eps=1e-5)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        check_rows(weight, x=x)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return reference.rmsnorm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (need_x, need_weight, *_) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = reference.rmsnorm_backward_x(grad, x, weight, ctx.eps) if need_x else None
        return grad_x, reference.rmsnorm_backward_g(grad, x, weight, ctx.eps) if need_weight else None, None
