"""The second half of a sum over rows: each program has stored the sum of some rows; these are added in fixed order.

Atomic additions would do it in one kernel, in whatever order the programs finish: other bits every time.
"""

import torch
from torch import Tensor

from kernels.backend import jit, tl
from kernels.launch import launch


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


def column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over the rows of partial (programs columns), float32: (columns), rounded once to the dtype."""
    programs, columns = partial.shape
    total = partial.new_empty(columns, dtype=dtype)
    # Few columns make few programs, which then should not be wide.
    block_rows, block_columns = (32, 128) if columns <= 16_384 else (4, 1024)
    sizes = {"COLUMNS": columns, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    launch(column_sum_kernel, (-(-columns // block_columns), 1, 1), partial, total, programs, num_warps=4, **sizes)
    return total
