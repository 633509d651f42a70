"""SwiGLU's kernels against float64, in every dtype and shape."""

import pytest
import torch

from kernels import reference
from kernels.swiglu import SwiGLUFunction
from tests.support.tolerances import bound, relative_error

pytestmark = pytest.mark.usefixtures("where_triton_runs")
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]


def error_bound(dtype):
    """One rounding to the result's dtype after a dozen operations in float32, of which exp has an argument below 8."""
    return bound(dtype, stages=1) + bound(torch.float32, stages=20)


def run(gate, up, grad):
    """y and both gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    y = SwiGLUFunction.apply(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


def require_right(got, gate, up, grad):
    """y, dL/dgate and dL/dup against float64, and their dtypes."""
    wide = gate.double(), up.double()
    wanted = reference.swiglu(*wide), *reference.swiglu_backward(grad.double(), *wide)
    for result, want, dtype in zip(got, wanted, (gate.dtype, gate.dtype, up.dtype), strict=True):
        assert result.dtype == dtype
        assert result.shape == want.shape
        if want.numel():
            assert relative_error(result, want) < error_bound(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3, 50), (2, 3, 7), (64, 128), (4097,), (0, 5), (2, 0)], ids=str)
def test_any_shape(shape):
    gate, up, grad = (torch.randn(shape) for _ in range(3))
    require_right(run(gate, up, grad), gate, up, grad)


@pytest.mark.parametrize("gate_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("up_dtype", DTYPES, ids=str)
def test_any_dtype(gate_dtype, up_dtype):
    gate, up = torch.randn(5, 48).to(gate_dtype), torch.randn(5, 48).to(up_dtype)
    grad = torch.randn(5, 48).to(gate_dtype)
    require_right(run(gate, up, grad), gate, up, grad)


def test_extremes():
    gate = torch.tensor([-1e4, -104.0, -88.5, -0.0, 0.0, 88.5, 1e4, float("nan")])
    y, grad_gate, grad_up = run(gate, torch.full((8,), 2.0), torch.ones(8))
    assert y.isnan().tolist() == grad_gate.isnan().tolist() == grad_up.isnan().tolist() == [False] * 7 + [True]
    assert y[0] == 0
    assert grad_gate[0] == 0
    assert y[6] == 2e4
    assert grad_gate[6] == 2
    assert grad_up[6] == 1e4


def test_float64_of_one_is_left_to_the_reference():
    gate, up = torch.randn(3, 5), torch.randn(3, 5).double()
    assert torch.equal(SwiGLUFunction.apply(gate, up), reference.swiglu(gate, up))
