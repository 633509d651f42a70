"""SwiGLU's kernels against float64, in every dtype and layout, and what they must leave alone."""

import pytest
import torch

from kernels import reference, swiglu
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


def layouts():
    """Tensors (6 8) that lie in memory in as many ways."""
    return {
        "transposed": torch.randn(8, 6).T,
        "every other column": torch.randn(6, 16)[:, ::2],
        "half of a wider one": torch.randn(6, 16).chunk(2, dim=-1)[1],
        "misaligned": torch.randn(49)[1:].view(6, 8),
        "expanded": torch.randn(8).expand(6, 8),
    }


@pytest.mark.parametrize("name", layouts())
def test_any_layout(name):
    for odd in range(3):
        tensors = [layouts()[name] if i == odd else torch.randn(6, 8) for i in range(3)]
        require_right(run(*tensors), *tensors)


def test_extremes():
    gate = torch.tensor([-1e4, -104.0, -88.5, -0.0, 0.0, 88.5, 1e4, float("nan")])
    y, grad_gate, grad_up = run(gate, torch.full((8,), 2.0), torch.ones(8))
    assert y.isnan().tolist() == grad_gate.isnan().tolist() == grad_up.isnan().tolist() == [False] * 7 + [True]
    assert y[0] == 0
    assert grad_gate[0] == 0
    assert y[6] == 2e4
    assert grad_gate[6] == 2
    assert grad_up[6] == 1e4


@pytest.mark.parametrize("needed", ["gate", "up"])
def test_only_what_needs_a_gradient(needed, monkeypatch):
    gate, up, grad = (torch.randn(4, 6) for _ in range(3))
    flags = []
    launch = swiglu.launch_over
    monkeypatch.setattr(swiglu, "launch_over", lambda *args, **kwargs: (flags.append(kwargs), launch(*args, **kwargs)))
    leaf = {"gate": gate, "up": up}[needed].requires_grad_()
    SwiGLUFunction.apply(gate, up).backward(grad)
    want = reference.swiglu_backward(grad.double(), gate.detach().double(), up.detach().double())[needed == "up"]
    assert relative_error(leaf.grad, want) < error_bound(torch.float32)
    assert flags[-1] == {"NEED_GATE": needed == "gate", "NEED_UP": needed == "up"}
    assert (up if needed == "gate" else gate).grad is None


def test_float64_of_one_is_left_to_the_reference():
    gate, up = torch.randn(3, 5), torch.randn(3, 5).double()
    assert torch.equal(SwiGLUFunction.apply(gate, up), reference.swiglu(gate, up))


def test_operators_keep_their_contract():
    gate, up, grad = torch.randn(8, 6).T, torch.randn(6, 8).bfloat16(), torch.randn(6, 8)
    torch.library.opcheck(swiglu._forward_op, (gate, up))
    torch.library.opcheck(swiglu._forward_op, (gate.double(), up))
    for flags in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(swiglu._backward_op, (grad, gate, up, *flags))


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"up has shape \(3,\), not \(2, 3\) as gate demands"):
        SwiGLUFunction.apply(x, x[0])
    with pytest.raises(TypeError, match="up must be of a floating-point dtype"):
        SwiGLUFunction.apply(x, x.long())
    with pytest.raises(ValueError, match="up is on meta"):
        SwiGLUFunction.apply(x, x.to("meta"))
