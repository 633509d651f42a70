"""The first kernel to read: a weighted sum over the last dimension, forward and backward.

    y_i = sum_j w_j x_ij

A Triton kernel is written for one *program*. The launch starts many copies of it, in parallel and in no fixed order;
each asks `tl.program_id` which one it is and does its share of the work, here some rows of x. A program handles whole
*blocks* of numbers: `tl.arange(0, 8)` is a block of eight integers. Three things differ from plain torch:

- A kernel gets no tensors but *pointers*, the address of a first element. Element (i, j) of a contiguous matrix lies
  i * COLUMNS + j elements behind it, so `x_ptr + row[:, None] * COLUMNS + column[None, :]` is a block of addresses.
- A block's shape is a power of two and fixed when the kernel is compiled, and so is whatever is declared
  `tl.constexpr`, in capitals here. Data rarely has such a shape: a *mask* marks the elements inside. Where it is False,
  a load reads nothing and returns `other`, and a store writes nothing. Without the mask, they access other memory.
- Loaded numbers stay in registers, on the chip, until the program ends. Memory is slow and arithmetic almost free, so
  a good kernel loads each number once. Its sums are float32, whatever the dtype of x.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.checks import check_rows, once_differentiable
from kernels.launch import ceil_power_of_2, define, jit, launch, new_like, runs_triton, tl

TILE, NUM_WARPS = 2048, 4  # elements of x that a program holds at once: 16 for each thread of 4 * 32


@jit
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, rows,
    COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y_i = sum_j w_j x_ij for BLOCK_ROWS rows, tile by tile: a row may have any length."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = row.to(tl.int64) * COLUMNS  # a large x has more than 2^31 elements, which 32 bits cannot count
    products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for first in range(0, COLUMNS, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0)
        products += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    # Summed once, at the end: the sum of a block makes threads wait for each other.
    tl.store(y_ptr + row, tl.sum(products, axis=1), mask=row < rows)


@jit
def backward_kernel(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, partial_ptr, rows,
    COLUMNS: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """dL/dx_ij = g_i w_j, and this program's part of dL/dw_j = sum_i g_i x_ij, where g_i is dL/dy_i. Programs cannot
    see each other's registers. So each stores the sum over its own rows as one row of `partial` (programs columns), and
    those are added up afterwards. Adding directly to dL/dw (`tl.atomic_add`) would do so in the order in which
    programs finish: the last digits would differ from run to run."""
    program = tl.program_id(0)
    row = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = row.to(tl.int64) * COLUMNS
    grad = tl.load(grad_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    for first in range(0, COLUMNS, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        at = start[:, None] + column[None, :]
        if NEED_X:
            weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + at, grad[:, None] * weight[None, :], mask=inside)
        if NEED_WEIGHT:
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            total = tl.sum(grad[:, None] * x, axis=0)
            tl.store(partial_ptr + program.to(tl.int64) * COLUMNS + column, total, mask=column < COLUMNS)


def cut(rows: int, columns: int) -> tuple[int, dict[str, int]]:
    """Number of programs, and the block that each holds at once: as many columns as fit into a tile, then rows."""
    block_columns = min(TILE // 16, ceil_power_of_2(columns))
    block_rows = TILE // block_columns
    return -(-rows // block_rows), {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}


@define("weighted_sum", lambda x, weight: x.new_empty(x.shape[:-1]))
def _forward_op(x: Tensor, weight: Tensor) -> Tensor:
    if not runs_triton(x, weight):
        return reference.weighted_sum(x, weight)
    if not x.numel():
        return x.new_zeros(x.shape[:-1])  # a sum over nothing
    columns, rows, y = x.shape[-1], x.shape[:-1].numel(), x.new_empty(x.shape[:-1])
    programs, block = cut(rows, columns)
    arguments = (x.contiguous(), weight.contiguous(), y, rows)
    launch(forward_kernel, (programs, 1, 1), *arguments, num_warps=NUM_WARPS, COLUMNS=columns, **block)
    return y


@define("weighted_sum_backward", lambda grad, x, weight, *needs: tuple(map(new_like, (x, weight), needs)))
def _backward_op(grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    wide_grad = reference.widen(grad).unsqueeze(-1)
    if not runs_triton(x, weight) or not x.numel():
        grad_x = (wide_grad * reference.widen(weight)).to(x.dtype) if need_x else new_like(x, False)
        each_row = (wide_grad * reference.widen(x)).reshape(x.shape[:-1].numel(), x.shape[-1])
        return grad_x, each_row.sum(dim=0).to(weight.dtype) if need_weight else new_like(weight, False)
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    programs, block = cut(rows, columns)
    grad_x = new_like(x, need_x)
    partial = x.new_empty((programs, columns) if need_weight else 0, dtype=torch.float32)
    arguments = (grad.contiguous(), x.contiguous(), weight.contiguous(), grad_x, partial, rows)
    constants = {"COLUMNS": columns, "NEED_X": need_x, "NEED_WEIGHT": need_weight, **block}
    launch(backward_kernel, (programs, 1, 1), *arguments, num_warps=NUM_WARPS, **constants)
    # torch's sum is a good kernel, adds in a fixed order, and has a sixteenth of x's numbers to read, or fewer.
    return grad_x, partial.sum(dim=0).to(weight.dtype) if need_weight else new_like(weight, False)


class WeightedSumFunction(torch.autograd.Function):
    """`reference.weighted_sum` in Triton: apply(x, weight), x (... columns), weight (columns) -> (...), in x's dtype.
    Raises TypeError for integers, ValueError for a weight of another length or device and an x without dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        check_rows(weight, x=x)
        ctx.save_for_backward(x, weight)
        return _forward_op(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _backward_op(grad, *ctx.saved_tensors, *ctx.needs_input_grad)


f_weightedsum = WeightedSumFunction.apply  # the name in the assignment
