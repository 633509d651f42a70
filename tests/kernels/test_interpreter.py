"""Triton's interpreter, repaired: bfloat16 bit for bit as torch's, addresses beyond 2^31 elements, no warnings."""

import numpy as np
import pytest
import torch

from kernels import rmsnorm, rmsnorm_wide
from kernels.launch import INTERPRETED, jit, tl

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off where there is a GPU")

SIZE = 256


@jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, WHAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    if WHAT == "add":
        out = x + y
    elif WHAT == "multiply":
        out = x * y
    elif WHAT == "divide":
        out = x / y
    elif WHAT == "number":
        out = x * 3.0
    elif WHAT == "negate":
        out = -x
    elif WHAT == "maximum":
        out = tl.maximum(x, y)
    elif WHAT == "where":
        out = tl.where(x < y, x, y)
    elif WHAT == "whole":
        out = x.to(tl.int32)
    elif WHAT == "sum":
        out = tl.zeros((SIZE,), tl.bfloat16) + tl.sum(x, axis=0)
    else:
        out = x.to(tl.float32) * 1.0001
    tl.store(out_ptr + at, out)


TORCH = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "number": lambda x, y: x * 3.0,
    "negate": lambda x, y: -x,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x < y, x, y),
    "whole": lambda x, y: x.int().bfloat16(),
    "sum": lambda x, y: x.float().sum().bfloat16().expand(SIZE),
    "cast": lambda x, y: (x.float() * 1.0001).bfloat16(),
}


@pytest.mark.parametrize("what", TORCH)
def test_bfloat16_is_torchs_bit_for_bit(what):
    # Whole numbers of eight bits and a sign: their sum is exact in float32, in whatever order it is taken.
    x = torch.randint(-128, 128, (SIZE,)).bfloat16() if what in ("sum", "whole") else torch.randn(SIZE).bfloat16()
    y, out = torch.randn(SIZE).bfloat16(), torch.empty(SIZE, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, WHAT=what, SIZE=SIZE)
    assert torch.equal(out, TORCH[what](x, y))


@jit
def product_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def test_products_of_bfloat16_matrices():
    x, y = (torch.randint(-64, 64, (16, 16)).bfloat16() for _ in range(2))
    out = torch.empty(16, 16)
    product_kernel[(1,)](x, y, out, SIZE=16)
    assert torch.equal(out, x.float() @ y.float())


@jit
def count_kernel(out_ptr, n, SIZE: tl.constexpr):
    total = tl.zeros((SIZE,), tl.float32)
    for i in range(n):
        total += i
    tl.store(out_ptr + tl.arange(0, SIZE), total / (total - total))


def test_loops_over_runtime_ranges_and_division_by_zero():
    out = torch.empty(2)
    with np.errstate(all="raise"):
        count_kernel[(1,)](out, 5, SIZE=2)
    assert torch.equal(out, torch.full((2,), float("inf")))


@pytest.fixture
def touched(monkeypatch):
    """Loads and stores that note the last address of each pointer and reach no memory; programs are number 2^22."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    last: dict[str, int] = {"load": 0, "store": 0}

    def note(kind, pointers, mask):
        if mask.data.any():
            last[kind] = max(last[kind], int(np.broadcast_to(pointers.data, mask.data.shape)[mask.data].max()))

    def load(self, pointers, mask, *rest):
        note("load", pointers, mask)
        sort = pointers.get_element_ty()
        return TensorHandle(np.ones_like(pointers.data, dtype=_get_np_dtype(sort)), sort)

    def program_id(self, axis):
        return TensorHandle(np.array([2**22 if axis == 0 or self.grid_dim[1] > 1 else 0], dtype=np.int32), tl.int32)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_masked_store",
        lambda self, pointers, value, mask, *rest: note("store", pointers, mask),
    )
    monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", program_id)
    return last


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (rmsnorm.forward_kernel, {"EPS": 1e-5, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": 1024}),
        (rmsnorm_wide.wide_forward_kernel, {"EPS": 1e-5, "BLOCK_COLUMNS": 512}),
        (rmsnorm.backward_kernel, {"NEED_X": True, "SLICED": False, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": 1024}),
        (rmsnorm_wide.halves_backward_kernel, {"NEED_X": True, "NEED_WEIGHT": False, "HALF": 512}),
    ],
    ids=lambda value: getattr(getattr(value, "fn", None), "__name__", ""),
)
def test_addresses_beyond_two_to_the_31(kernel, constants, touched):
    memory, columns, rows = torch.zeros(1), 1024, 2**22 + 1
    order = [name for name in kernel.arg_names if name.isupper()]
    constants = {name: ({"COLUMNS": columns, "ADD": False, "NEED_WEIGHT": False} | constants)[name] for name in order}
    others = {name: memory if name.endswith("_ptr") else rows for name in kernel.arg_names if name not in order}
    kernel[(1, 1, 1)](**others, **constants)
    end = memory.data_ptr() + ((rows - 1) * columns + columns - 1) * 4  # 2^32 elements away
    assert touched == {"load": end, "store": end}
