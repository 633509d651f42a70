"""The reference maths against torch's own and against finite differences; all kernels refuse second derivatives."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_cross_entropy
from kernels.flash_attention import FlashAttention2
from kernels.reference import rmsnorm
from kernels.rmsnorm import RMSNormFunction, TritonAddRMSNormFunction, TritonRMSNormFunction
from kernels.swiglu import SwiGLUFunction
from kernels.tiled_attention import TiledAttentionFunction
from kernels.weighted_sum import f_weightedsum
from tests.support.tolerances import bound, relative_error


@pytest.mark.parametrize("shape", [(1,), (3, 50), (2, 3, 7), (0, 5)], ids=str)
def test_rmsnorm_equals_torch(shape):
    x = torch.randn(shape, dtype=torch.float64)
    g = torch.randn(shape[-1], dtype=torch.float64)
    got, want = rmsnorm(x, g, 1e-5), F.rms_norm(x, shape[-1:], g, 1e-5)
    assert got.shape == x.shape
    if x.numel():
        assert relative_error(got, want) < bound(torch.float64, stages=6, longest_sum=shape[-1])


def test_rmsnorm_gradients():
    x, g = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((4, 6), (6,)))
    assert torch.autograd.gradcheck(rmsnorm, (x, g))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rmsnorm_is_wide_inside(dtype):
    x = torch.full((2, 4096), 300.0, dtype=dtype)  # the square of 300 overflows fp16, and 4096 equal terms stall bf16
    y = rmsnorm(x, torch.ones(4096, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y, torch.ones_like(y))


KERNELS = {
    "rmsnorm": lambda x: TritonRMSNormFunction.apply(x, torch.ones(16)),
    "rmsnorm in torch": lambda x: RMSNormFunction.apply(x, torch.ones(16)),
    "rmsnorm of a sum": lambda x: TritonAddRMSNormFunction.apply(x, x, torch.ones(16))[0],
    "attention": lambda x: FlashAttention2.apply(x, x, x),
    "attention in tiles": lambda x: TiledAttentionFunction.apply(x, x, x),
    "cross entropy": lambda x: linear_cross_entropy(x, torch.ones(3, 16), torch.zeros(5, dtype=torch.int64)),
    "swiglu": lambda x: SwiGLUFunction.apply(x, x),
    "weighted sum": lambda x: f_weightedsum(x, torch.ones(16)),
}


@pytest.mark.usefixtures("where_triton_runs")
@pytest.mark.parametrize("name", KERNELS)
def test_a_gradient_penalty_is_refused(name):
    """Although dL/dy of a sum or a loss, 1, has no graph: the penalty would be taken for a constant."""
    x = torch.randn(5, 16, requires_grad=True)
    loss = KERNELS[name](x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + grad.norm()).backward()
