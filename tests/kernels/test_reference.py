"""The reference maths against torch's own, and in half precision."""

import pytest
import torch
import torch.nn.functional as F

from kernels.reference import rmsnorm
from tests.support.tolerances import bound, relative_error


@pytest.mark.parametrize("shape", [(1,), (3, 50), (2, 3, 7), (0, 5)], ids=str)
def test_rmsnorm_equals_torch(shape):
    x = torch.randn(shape, dtype=torch.float64)
    g = torch.randn(shape[-1], dtype=torch.float64)
    got, want = rmsnorm(x, g, 1e-5), F.rms_norm(x, shape[-1:], g, 1e-5)
    assert got.shape == x.shape
    if x.numel():
        assert relative_error(got, want) < bound(torch.float64, stages=6, longest_sum=shape[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rmsnorm_is_wide_inside(dtype):
    x = torch.full((2, 4096), 300.0, dtype=dtype)  # the square of 300 overflows fp16, and 4096 equal terms stall bf16
    y = rmsnorm(x, torch.ones(4096, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y, torch.ones_like(y))
