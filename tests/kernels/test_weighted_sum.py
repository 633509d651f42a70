"""The first kernel, a weighted sum, against float64: values, gradients, layouts, masks, refusals."""

import dataclasses

import pytest
import torch

from kernels import weighted_sum
from kernels.launch import INTERPRETED
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


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, ::2], lambda x: x.t()[:35], lambda x: x[:, 3:38], lambda x: x[5, 10:45].expand(6, 35)],
    ids=["every second column", "transposed", "padded rows", "expanded"],
)
def test_layouts_that_are_not_contiguous(view):
    x = view(torch.randn(40, 70)).requires_grad_()
    weight = torch.randn(2 * x.shape[-1])[::2].requires_grad_()
    check(x, weight, torch.randn(x.shape[0], 2)[:, 1])
    x.grad = None
    f_weightedsum(x, weight).sum().backward()  # whose gradient is one number, expanded
    assert torch.equal(x.grad, weight.detach().expand_as(x))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_sums_over_nothing(shape, monkeypatch):
    monkeypatch.setattr(weighted_sum, "launch", None)  # a GPU refuses a launch of no programs
    x, weight, grad = inputs(shape)
    y = f_weightedsum(x, weight)
    y.backward(grad)
    assert torch.equal(y, torch.zeros(shape[:-1]))
    assert torch.equal(x.grad, torch.zeros(shape))
    assert torch.equal(weight.grad, torch.zeros(shape[-1]))


def test_frozen_arguments_get_no_gradient():
    x, weight, grad = inputs((20, 30))
    for need_x, need_weight in [(True, False), (False, True)]:
        x.grad = weight.grad = None
        x.requires_grad_(need_x)
        weight.requires_grad_(need_weight)
        f_weightedsum(x, weight).backward(grad)
        assert (x.grad is not None, weight.grad is not None) == (need_x, need_weight)
        if need_x:
            assert torch.equal(x.grad, grad[:, None] * weight)


def test_a_frozen_input_costs_nothing(monkeypatch):
    seen = []

    def spy(kernel, grid, *args, **options):
        seen.append((kernel.fn.__name__, options.get("NEED_X"), options.get("NEED_WEIGHT"), args[-2].numel()))
        launch(kernel, grid, *args, **options)

    launch = weighted_sum.launch
    monkeypatch.setattr(weighted_sum, "launch", spy)
    x, weight, grad = inputs((20, 30))
    f_weightedsum(x, weight.detach()).backward(grad)
    assert seen[1] == ("backward_kernel", True, False, 0)  # no partial sums are kept


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


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter checks this")
def test_offsets_beyond_32_bits(monkeypatch):
    """A program far down a matrix of more than 2^31 elements: masked, so nothing is read, but its offsets are computed,
    and the interpreter is asked to complain of a product that does not fit."""
    builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    far = builder.get_int32(2**20)
    monkeypatch.setattr(builder, "create_get_program_id", lambda axis: far, raising=False)
    x, weight, grad = inputs((1, 2048))
    # Without the weight's gradient, whose partial sums are stored for every program, in range or not.
    f_weightedsum(x, weight.detach()).backward(grad)


def test_operators_keep_their_contract():
    x, weight, grad = inputs((6, 40))
    torch.library.opcheck(torch.ops.cs336_kernels.weighted_sum.default, (x.detach().t()[:6, :6], weight.detach()[:6]))
    arguments = (grad, x.detach(), weight.detach(), True, True)
    torch.library.opcheck(torch.ops.cs336_kernels.weighted_sum_backward.default, arguments)


@pytest.mark.parametrize(
    ("x", "weight", "error", "words"),
    [
        (torch.ones(2, 3), torch.ones(4), ValueError, r"weight has shape \(4,\), not \(3,\)"),
        (torch.ones(2, 3), torch.ones(1, 3), ValueError, "weight has shape"),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(3), TypeError, "x must be of a floating-point dtype"),
        (torch.ones(2, 3), torch.ones(3, dtype=torch.complex64), TypeError, "weight must be"),
        (torch.ones(2, 3), torch.ones(3, device="meta"), ValueError, "weight is on meta, x on cpu"),
        (torch.ones(()), torch.ones(()), ValueError, "no dimension to sum over"),
    ],
)
def test_bad_arguments_are_named(x, weight, error, words):
    with pytest.raises(error, match=words):
        f_weightedsum(x, weight)
