"""The first kernel, a weighted sum, against float64: values, gradients, masks."""

import pytest
import torch

from kernels import weighted_sum
from kernels.weighted_sum import f_weightedsum
from tests.support.tolerances import bound

pytestmark = pytest.mark.usefixtures("where_triton_runs")
# Rows and columns below, at and above a block of 16 x 128; leading dimensions of every number.
SHAPES = [(1, 1), (5,), (3, 7), (2, 3, 50), (17, 128), (2, 129), (33, 300), (2049, 1), (1, 1025)]


def inputs(shape, dtype=torch.float32, weight_dtype=None):
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1]).to(weight_dtype or dtype).requires_grad_()
    return x, weight, torch.randn(shape[:-1]).to(dtype)


def check(x, weight, grad):
    """y and both gradients, each no further from float64 than its roundings explain.

    Errors are measured by what the sum would be if nothing cancelled, since each rounding is relative to a summand.
    """
    y = f_weightedsum(x, weight)
    y.backward(grad)
    wide_x, wide_weight, wide_grad = x.detach().double(), weight.detach().double(), grad.double().unsqueeze(-1)
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    results = [
        (y.detach(), wide_x * wide_weight, -1, columns),
        (x.grad, wide_grad * wide_weight + 0 * wide_x, None, 1),
        (weight.grad, (wide_grad * wide_x).reshape(rows, columns), 0, rows),
    ]
    for got, terms, dim, count in results:
        want, size = (terms, terms.abs()) if dim is None else (terms.sum(dim), terms.abs().sum(dim))
        assert got.shape == want.shape
        # Each term is rounded as a product, then added in float32; the result is rounded to its own dtype.
        allowed = (bound(torch.float32, 1) + bound(torch.float32, 1, count)) * size + bound(got.dtype, 1) * want.abs()
        assert ((got.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape):
    check(*inputs(shape))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_mix_of_dtypes(dtype, weight_dtype):
    x, weight, grad = inputs((18, 130), dtype, weight_dtype)
    check(x, weight, grad)
    assert f_weightedsum(x, weight).dtype == dtype
    assert (x.grad.dtype, weight.grad.dtype) == (dtype, weight_dtype)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_sums_over_nothing(shape, monkeypatch):
    monkeypatch.setattr(weighted_sum, "launch", None)  # a GPU refuses a launch of no programs
    x, weight, grad = inputs(shape)
    y = f_weightedsum(x, weight)
    y.backward(grad)
    assert torch.equal(y, torch.zeros(shape[:-1]))
    assert torch.equal(x.grad, torch.zeros(shape))
    assert torch.equal(weight.grad, torch.zeros(shape[-1]))


def test_not_a_number_stays_in_its_row_and_column():
    x, weight, grad = inputs((40, 200))
    with torch.no_grad():
        x[7, 3] = torch.nan
        x[21, 150] = torch.inf
    y = f_weightedsum(x, weight)
    y.backward(grad)
    assert y.detach().isnan().nonzero().tolist() == [[7]]
    assert y.detach().isinf().nonzero().tolist() == [[21]]
    assert weight.grad.isnan().nonzero().tolist() == [[3]]
    assert x.grad.isfinite().all()


def test_a_row_does_not_depend_on_its_batch():
    x, weight, _ = inputs((50, 300))
    assert torch.equal(f_weightedsum(x, weight)[31:32], f_weightedsum(x[31:32], weight))
