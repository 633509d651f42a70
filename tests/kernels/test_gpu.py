"""Tests that need a GPU: CUDA graphs, streams, more than 2^31 elements, equal bits twenty times, Inductor."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels.adamw import FusedAdamW
from kernels.cross_entropy import LinearCrossEntropyFunction
from kernels.flash_attention import FlashAttention2
from kernels.rmsnorm import TritonRMSNormFunction
from kernels.swiglu import SwiGLUFunction
from tests.support.tolerances import UNIT_ROUNDOFF, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("where_triton_runs"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Maker = Callable[[], list[torch.Tensor]]


def make(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


# What is called, and the inputs that get a gradient.
KERNELS: dict[str, tuple[Callable[..., torch.Tensor], Maker]] = {
    "rmsnorm": (TritonRMSNormFunction.apply, lambda: make((4096, 1024), (1024,))),
    "rmsnorm, long rows": (TritonRMSNormFunction.apply, lambda: make((64, 65_536), (65_536,))),
    "swiglu": (SwiGLUFunction.apply, lambda: make((4096, 1024), (4096, 1024))),
    "attention": (lambda q, k, v: FlashAttention2.apply(q, k, v, True), lambda: make(*[(8, 512, 64)] * 3)),
    "cross entropy": (
        lambda x, weight: LinearCrossEntropyFunction.apply(x, weight, torch.arange(len(x)) % len(weight)),
        lambda: make((3000, 256), (5000, 256)),
    ),
}
ALL = pytest.mark.parametrize("name", KERNELS)


def forward_backward(function, inputs, grad=None):
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y) if grad is None else grad)]


@ALL
def test_the_same_bits_twenty_times(name):
    function, maker = KERNELS[name]
    inputs = maker()
    first = forward_backward(function, inputs)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, forward_backward(function, inputs), strict=True))


@ALL
def test_a_cuda_graph_sees_new_data(name):
    function, maker = KERNELS[name]
    inputs = maker()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled kernels and cuBLAS's workspace must be there before a capture
        forward_backward(function, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward_backward(function, inputs)
    with torch.no_grad():
        for each in inputs:
            each.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, forward_backward(function, inputs), strict=True))


@ALL
def test_inductor_compiles_it_without_a_break(name):
    function, maker = KERNELS[name]
    inputs = maker()
    torch._dynamo.reset()
    got = forward_backward(torch.compile(function, fullgraph=True), inputs)
    for each, right in zip(got, forward_backward(function, inputs), strict=True):
        assert relative_error(each, right) <= 4 * UNIT_ROUNDOFF[torch.bfloat16]


@pytest.mark.parametrize("shape", [(175_000, 12_288), (4_194_305, 512), (131_072, 16_384)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    x, w = torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape[1], dtype=torch.bfloat16)
    x.requires_grad_()
    y = TritonRMSNormFunction.apply(x, w)
    (grad,) = torch.autograd.grad(y, x, y.detach())
    for rows in (slice(0, 3), slice(shape[0] - 3, shape[0])):
        few = x[rows].detach().double().requires_grad_()
        want = F.rms_norm(few, shape[1:], w.double(), 1e-5)
        want.backward(y[rows].detach().double())
        assert relative_error(y[rows].detach(), want.detach()) <= 2 * UNIT_ROUNDOFF[torch.bfloat16]
        assert relative_error(grad[rows], few.grad) <= 4 * UNIT_ROUNDOFF[torch.bfloat16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@ALL
def test_another_device_than_the_current_one(name):
    function, maker = KERNELS[name]
    with torch.device("cuda:1"):
        outputs = forward_backward(function, maker())
    assert all(each.device.index == 1 and each.isfinite().all() for each in outputs)


def test_adamw_is_one_launch_that_equals_torchs():
    ours, theirs = ([torch.randn(n).requires_grad_() for n in (1, 7, 4096, 70_000)] for _ in range(2))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
    optimizers = FusedAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, foreach=False)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a.detach(), b.detach()) <= 5 * 16 * UNIT_ROUNDOFF[torch.float32]
