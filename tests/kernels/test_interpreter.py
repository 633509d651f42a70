"""Triton's interpreter, repaired: bfloat16 bit for bit as torch's, addresses beyond 2^31 elements, no warnings."""

import numpy as np
import pytest
import torch

from kernels import rmsnorm, rmsnorm_wide, weighted_sum
from kernels.launch import INTERPRETED, jit, tl

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off where there is a GPU")

SIZE = 256


@jit
def arithmetic_kernel(x_ptr, y_ptr, whole_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y, whole = tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(whole_ptr + at)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + SIZE + at, x * y)
    tl.store(out_ptr + 2 * SIZE + at, x / y)
    tl.store(out_ptr + 3 * SIZE + at, x * 3.0)
    tl.store(out_ptr + 4 * SIZE + at, -x)
    tl.store(out_ptr + 5 * SIZE + at, tl.maximum(x, y))
    tl.store(out_ptr + 6 * SIZE + at, tl.where(x < y, x, y))
    tl.store(out_ptr + 7 * SIZE + at, whole.to(tl.int32))
    tl.store(out_ptr + 8 * SIZE + at, tl.zeros((SIZE,), tl.bfloat16) + tl.sum(whole, axis=0))
    tl.store(out_ptr + 9 * SIZE + at, x.to(tl.float32) * 1.0001)


def test_bfloat16_is_torchs_bit_for_bit():
    x, y = torch.randn(2, SIZE).bfloat16()
    # Whole numbers of eight bits and a sign: their sum is exact in float32, in whatever order it is taken.
    whole, out = torch.randint(-128, 128, (SIZE,)).bfloat16(), torch.empty(10, SIZE, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, whole, out, SIZE=SIZE)
    want = [x + y, x * y, x / y, x * 3.0, -x, torch.maximum(x, y), torch.where(x < y, x, y), whole.int().bfloat16()]
    want += [whole.float().sum().bfloat16().expand(SIZE), (x.float() * 1.0001).bfloat16()]
    assert [i for i, each in enumerate(want) if not torch.equal(out[i], each)] == []


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


FAR = [  # kernels, their constants, and which of their accesses reach the end of x
    (rmsnorm.forward_kernel, {"EPS": 1e-5}, ("load", "store")),
    (rmsnorm_wide.wide_forward_kernel, {"EPS": 1e-5, "BLOCK_COLUMNS": 512}, ("load", "store")),
    (rmsnorm.backward_kernel, {"NEED_X": True, "SLICED": False}, ("load", "store")),
    (rmsnorm_wide.halves_backward_kernel, {"NEED_X": True, "HALF": 512}, ("load", "store")),
    (weighted_sum.forward_kernel, {}, ("load",)),
    (weighted_sum.backward_kernel, {"NEED_X": True}, ("store",)),
]


@pytest.mark.parametrize(
    ("kernel", "constants", "far"), FAR, ids=lambda x: getattr(getattr(x, "fn", None), "__name__", "")
)
def test_addresses_beyond_two_to_the_31(kernel, constants, far, touched):
    memory, columns, rows = torch.zeros(1), 1024, 2**22 + 1
    constants = {
        "COLUMNS": columns,
        "ADD": False,
        "NEED_WEIGHT": False,
        "BLOCK_ROWS": 1,
        "BLOCK_COLUMNS": 1024,
    } | constants
    order = [name for name in kernel.arg_names if name.isupper()]
    others = {name: memory if name.endswith("_ptr") else rows for name in kernel.arg_names if name not in order}
    kernel[(1, 1, 1)](**others, **{name: constants[name] for name in order})
    end = memory.data_ptr() + ((rows - 1) * columns + columns - 1) * 4  # 2^32 elements away
    assert {kind: touched[kind] for kind in far} == dict.fromkeys(far, end)
