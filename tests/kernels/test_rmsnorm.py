"""The fused RMSNorm against float64, over shapes, dtypes and values that have broken such kernels before."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels import rmsnorm
from kernels.rmsnorm import RMSNormFunction, TritonAddRMSNormFunction, TritonRMSNormFunction
from tests.support.tolerances import UNIT_ROUNDOFF, bound, relative_error

pytestmark = pytest.mark.usefixtures("where_triton_runs")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rounding(dtype: torch.dtype, columns: int, rows: int = 1) -> float:
    """One rounding to the result's dtype after some float32 stages, of which one sums a row and one the rows."""
    return UNIT_ROUNDOFF[dtype] + bound(torch.float32, stages=10, longest_sum=int(columns**0.5) + int(rows**0.5) + 1)


def truth(x, w, grad, eps=1e-5):
    """y, dL/dx and dL/dw in float64, by torch's own autograd over torch's own norm."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = F.rms_norm(x, x.shape[-1:], w, eps)
    y.backward(grad.double())
    return y.detach(), x.grad, w.grad


def ours(x, w, grad, function=TritonRMSNormFunction):
    """The same three by the function under test; x and w may be of any layout, so they are leaves by themselves."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = function.apply(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), grad)


def require_equal(x, w, grad, function=TritonRMSNormFunction):
    got, want = ours(x, w, grad, function), truth(x, w, grad)
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    for each, right, dtype in zip(got, want, (x.dtype, x.dtype, w.dtype), strict=True):
        assert each.dtype == dtype
        assert each.shape == right.shape
        # With one column dL/dx is what is left of two equal numbers: eps over x squared. Compare it to what cancels.
        size = right.norm() if columns > 1 else right.norm() + grad.double().norm() * w.double().norm()
        assert (each.double() - right).norm() <= rounding(dtype, columns, rows) * size


@pytest.mark.parametrize("columns", [1, 2, 3, 50, 64, 65, 1023, 1025, 5120, 8193, 16_384, 16_385, 32_768, 65_537])
def test_any_width(columns):
    rows = 3 if columns < 16_386 else 1
    require_equal(torch.randn(rows, columns), torch.randn(columns), torch.randn(rows, columns))


@pytest.mark.parametrize("leading", [(), (1,), (2,), (33,), (2, 3, 4)], ids=str)
def test_any_leading_shape(leading):
    for function in (TritonRMSNormFunction, RMSNormFunction):
        require_equal(torch.randn(*leading, 50), torch.randn(50), torch.randn(*leading, 50), function)


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "columns"),
    [*((*each, 200) for each in itertools.product(FLOATS, FLOATS)), (torch.bfloat16, torch.float32, 9000)],
    ids=str,
)
def test_mixed_dtypes(x_dtype, w_dtype, columns):
    x, w, grad = torch.randn(3, columns).to(x_dtype), torch.randn(columns).to(w_dtype), torch.randn(3, columns)
    require_equal(x, w, grad.to(x_dtype))


@pytest.mark.parametrize("function", [RMSNormFunction, TritonRMSNormFunction])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0), (2, 0, 3)])
def test_no_elements_with_and_without_triton(function, shape, monkeypatch):
    for runs in (rmsnorm.runs_triton, lambda *_: False):
        monkeypatch.setattr(rmsnorm, "runs_triton", runs)
        x, w = torch.zeros(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)
        y = function.apply(x, w)
        y.sum().backward()
        assert y.shape == x.grad.shape == x.shape
        assert torch.equal(w.grad, torch.zeros(shape[-1]))


def test_values():
    rows = {"zeros": 0.0, "tiny": 1e-30, "one": 1.0, "large": 1e18}
    x = torch.tensor(list(rows.values())).unsqueeze(1).expand(4, 64).contiguous()
    got, want = TritonRMSNormFunction.apply(x, torch.ones(64)), F.rms_norm(x.double(), (64,), eps=1e-5)
    assert torch.allclose(got.double(), want, rtol=rounding(torch.float32, 64), atol=0)
    assert torch.isfinite(
        TritonRMSNormFunction.apply(torch.full((2, 64), 6e4, dtype=torch.float16), torch.ones(64))
    ).all()
    # 3e38 squared is not a float32: like torch's own norm, the row becomes zero.
    assert torch.equal(TritonRMSNormFunction.apply(torch.full((1, 64), 3e38), torch.ones(64)), torch.zeros(1, 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(bad):
    x, w, grad = torch.randn(7, 40), torch.randn(40), torch.randn(7, 40)
    clean_y, clean_grad, _ = ours(x, w, grad)
    x[3, 5] = bad
    y, grad_x, grad_w = ours(x, w, grad)
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(y[others], clean_y[others])
    assert torch.equal(grad_x[others], clean_grad[others])
    assert y[3].isnan().any()
    assert grad_w.isnan().any()


@pytest.mark.parametrize("columns", [40, 1500, 9000, 20_000])
def test_a_row_does_not_depend_on_its_batch(columns):
    x, w, grad = torch.randn(3, columns), torch.randn(columns), torch.randn(3, columns)
    y, grad_x, _ = ours(x, w, grad)
    alone_y, alone_grad, _ = ours(x[2:], w, grad[2:])
    assert torch.equal(alone_y[0], y[2])
    assert torch.equal(alone_grad[0], grad_x[2])


@pytest.mark.parametrize("columns", [9000, 20_000])
@pytest.mark.parametrize(("need_x", "need_w"), [(True, False), (False, True)])
def test_only_needed_gradients_are_computed(columns, need_x, need_w, monkeypatch):
    x, w, grad = torch.randn(3, columns, requires_grad=need_x), torch.randn(columns), torch.randn(3, columns)
    w.requires_grad_(need_w)
    sums = []
    monkeypatch.setattr(rmsnorm, "column_sum", lambda *args, real=rmsnorm.column_sum: sums.append(1) or real(*args))
    TritonRMSNormFunction.apply(x, w).backward(grad)
    _, grad_x, grad_w = truth(x, w, grad)
    assert len(sums) == int(need_w)
    for got, want in ((x.grad, grad_x), (w.grad, grad_w)):
        assert got is None or relative_error(got, want) < rounding(torch.float32, columns, 3)
    assert (x.grad is None, w.grad is None) == (not need_x, not need_w)


def test_grids_stay_within_what_a_gpu_can_launch(monkeypatch):
    grids = []
    monkeypatch.setattr(rmsnorm, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    x, w, inverse_rms = torch.zeros(1, 1).expand(70_000, 20_000), torch.zeros(20_000), torch.zeros(70_000)
    monkeypatch.setattr(torch, "empty_like", lambda like: like)
    for need_x, need_w in ((True, True), (True, False), (False, True)):
        rmsnorm.backward(x, x, w, inverse_rms, None, need_x, need_w)
    rmsnorm.forward(x, w, 1e-5)
    assert len(grids) == 8
    assert all(max(grid[1:]) < 2**16 and grid[0] < 2**31 for grid in grids)


def test_tensors_kept_for_backward():
    kept = []
    x, w = torch.randn(3, 50, requires_grad=True), torch.randn(50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        TritonRMSNormFunction.apply(x, w)
    assert sorted(tuple(t.shape) for t in kept) == [(3,), (3, 50), (50,)]
    with torch.no_grad():
        assert TritonRMSNormFunction.apply(x, w).grad_fn is None


@pytest.mark.parametrize("columns", [60, 9000, 20_000])
@pytest.mark.parametrize(
    ("x_dtype", "residual_dtype"), [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
def test_the_sum_and_its_norm(columns, x_dtype, residual_dtype):
    x, residual = torch.randn(3, columns).to(x_dtype), torch.randn(3, columns).to(residual_dtype)
    w, grad, grad_sum = torch.randn(columns), torch.randn(3, columns).to(x_dtype), torch.randn(3, columns).to(x_dtype)
    leaves = [t.requires_grad_() for t in (x, residual, w)]
    y, total = TritonAddRMSNormFunction.apply(*leaves)
    got = (y, total, *torch.autograd.grad((y, total), leaves, (grad, grad_sum)))
    rounded = (x.double() + residual.double()).to(x_dtype)  # backward starts from the sum that forward stored
    want_y, grad_x, grad_w = truth(rounded, w, grad)
    want = (want_y, rounded.double(), grad_x + grad_sum.double(), grad_x + grad_sum.double(), grad_w)
    for each, right, dtype in zip(got, want, (x_dtype, x_dtype, x_dtype, residual_dtype, w.dtype), strict=True):
        assert each.dtype == dtype
        coarse = dtype if dtype == w.dtype and each.shape == w.shape else x_dtype
        assert relative_error(each.detach(), right) <= 2 * rounding(coarse, columns, 3)


def test_autocast_leaves_the_dtype():
    x, w = torch.randn(3, 50), torch.randn(50)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert TritonRMSNormFunction.apply(x, w).dtype == torch.float32
        assert TritonRMSNormFunction.apply(x.bfloat16(), w).dtype == torch.bfloat16
