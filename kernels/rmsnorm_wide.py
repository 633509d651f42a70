"""RMSNorm's kernels for rows that do not fit the registers of a multiprocessor: each row is read twice, in chunks.

The second pass reads backwards, to begin with what is still in the cache. Beyond 16,384 columns backward uses two
kernels: `row_mean_kernel` reads everything once, `rmsnorm.backward_kernel` again in slices, for 5 / 3 of the traffic.
"""

from kernels.launch import jit, tl


@jit
def wide_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, inverse_rms_ptr,
    COLUMNS: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program normalises one row; of its chunks the last one stays in registers."""
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    offsets = tl.arange(0, BLOCK_COLUMNS)
    last: tl.constexpr = (COLUMNS - 1) // BLOCK_COLUMNS
    squares = tl.zeros((BLOCK_COLUMNS,), dtype=tl.float32)
    for chunk in range(0, last):
        at = start + chunk * BLOCK_COLUMNS + offsets
        x = tl.load(x_ptr + at, eviction_policy="evict_last")
        if ADD:
            x = (x.to(tl.float32) + tl.load(residual_ptr + at).to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + at, x)
        squares += x.to(tl.float32) * x.to(tl.float32)
    column = last * BLOCK_COLUMNS + offsets
    inside = column < COLUMNS
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + start + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + start + column, x, mask=inside)
    x = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(squares + x * x, axis=0) / COLUMNS + EPS)
    tl.store(inverse_rms_ptr + tl.program_id(0), inverse_rms)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + column, x * inverse_rms * weight, mask=inside, eviction_policy="evict_first")
    # Other threads may have stored the sums that are read back here; `tl.sum` has made all wait for each other.
    for back in range(0, last):
        column = (last - 1 - back) * BLOCK_COLUMNS + offsets
        source = sum_ptr if ADD else x_ptr
        x = tl.load(source + start + column, eviction_policy="evict_first").to(tl.float32)
        weight = tl.load(weight_ptr + column).to(tl.float32)
        tl.store(y_ptr + start + column, x * inverse_rms * weight, eviction_policy="evict_first")


@jit
def halves_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, inverse_rms_ptr, grad_sum_ptr, grad_x_ptr, partial_ptr, rows,
    COLUMNS: tl.constexpr, ADD: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """As `rmsnorm.backward_kernel` for one row at a time, of which only the sums for the weight stay in registers:
    each half of x and its gradient is read once for the mean and once more, from the cache, for the result."""
    offsets = tl.arange(0, HALF)
    total_0 = tl.zeros((HALF,), dtype=tl.float32)
    total_1 = tl.zeros((HALF,), dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        inverse_rms = tl.load(inverse_rms_ptr + row)
        products = tl.zeros((HALF,), dtype=tl.float32)
        for half in tl.static_range(2 if NEED_X else 0):
            column = half * HALF + offsets
            at, inside = tl.cast(row, tl.int64) * COLUMNS + column, column < COLUMNS
            x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            grad = tl.load(grad_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            products += x * grad * weight
        mean = tl.sum(products, axis=0) * inverse_rms * inverse_rms / COLUMNS
        for back in tl.static_range(2):
            column = (1 - back) * HALF + offsets
            at, inside = tl.cast(row, tl.int64) * COLUMNS + column, column < COLUMNS
            # Another eviction policy, or the compiler would keep the first copies in registers.
            x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            grad = tl.load(grad_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if NEED_X:
                weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
                grad_x = (grad * weight - x * mean) * inverse_rms
                if ADD:
                    grad_x += tl.load(grad_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
                tl.store(grad_x_ptr + at, grad_x, mask=inside, eviction_policy="evict_first")
            if back == 1:
                total_0 += grad * x * inverse_rms
            else:
                total_1 += grad * x * inverse_rms
    if NEED_WEIGHT:
        mine = partial_ptr + tl.program_id(0) * COLUMNS + offsets
        tl.store(mine, total_0, mask=offsets < COLUMNS)
        tl.store(mine + HALF, total_1, mask=HALF + offsets < COLUMNS)


@jit
def row_mean_kernel(
    grad_ptr, x_ptr, weight_ptr, inverse_rms_ptr, mean_ptr, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """r^2 mean_j(g_j w_j x_j), the one number of a whole row that dL/dx needs; one program per row."""
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    products = tl.zeros((BLOCK_COLUMNS,), dtype=tl.float32)
    for first in range(0, COLUMNS, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        inside = column < COLUMNS
        x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        products += x * grad * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.load(inverse_rms_ptr + tl.program_id(0))
    tl.store(mean_ptr + tl.program_id(0), tl.sum(products, axis=0) * inverse_rms * inverse_rms / COLUMNS)
