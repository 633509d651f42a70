"""Promises of every kernel alike: arguments stay as they were, equal bits each time, gradients by finite differences,
one graph under torch.compile, and no second derivatives."""

from collections.abc import Callable

import pytest
import torch

from kernels import cross_entropy
from kernels.cross_entropy import LinearCrossEntropyFunction
from kernels.flash_attention import FlashAttention2
from kernels.rmsnorm import RMSNormFunction, TritonAddRMSNormFunction, TritonRMSNormFunction
from kernels.swiglu import SwiGLUFunction
from kernels.tiled_attention import TiledAttentionFunction
from kernels.weighted_sum import f_weightedsum

pytestmark = pytest.mark.usefixtures("where_triton_runs")
TARGETS = [3, 0, 6, 6, 2, 1, -100, 5, 4]  # -100 is no target
# What is called, and the shapes of the inputs that get a gradient.
KERNELS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "weighted sum": (f_weightedsum, ((9, 5), (5,))),
    "rmsnorm": (lambda x, w: TritonRMSNormFunction.apply(x, w, 0.1), ((9, 5), (5,))),
    "rmsnorm in torch": (lambda x, w: RMSNormFunction.apply(x, w, 0.1), ((9, 5), (5,))),
    "rmsnorm of a sum": (lambda x, r, w: torch.stack(TritonAddRMSNormFunction.apply(x, r, w)), ((9, 5), (9, 5), (5,))),
    "swiglu": (SwiGLUFunction.apply, ((9, 5), (9, 5))),
    "attention": (lambda q, k, v: FlashAttention2.apply(q, k, v, True), ((9, 5),) * 3),
    "attention in tiles": (lambda q, k, v: TiledAttentionFunction.apply(q, k, v, True), ((9, 5),) * 3),
    "cross entropy": (
        lambda x, weight: LinearCrossEntropyFunction.apply(x, weight, torch.tensor(TARGETS)),
        ((9, 5), (7, 5)),
    ),
}
ALL = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Cross-entropy takes four tokens at a time."""
    monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda *_: 4)


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """The function and its inputs."""
    function, shapes = KERNELS[name]
    return function, [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@ALL
def test_arguments_stay_as_they_were_and_results_are_fresh_and_the_same(name):
    function, inputs = make(name)
    y = function(*inputs)
    grad, before = torch.randn_like(y), [each.detach().clone() for each in inputs]
    copy = grad.clone()
    first = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    kept = [each.clone() for each in first]
    for each in first:
        each.zero_()  # what an optimizer may do with gradients that it was given
    again = function(*inputs)
    assert torch.equal(again, y)
    for result in (y, again):
        assert all(map(torch.equal, torch.autograd.grad(result, inputs, grad), kept))
    assert all(map(torch.equal, (*inputs, grad), (*before, copy)))


@ALL
def test_float64_is_left_to_the_reference_with_gradients_of_finite_differences(name):
    function, inputs = make(name, torch.float64)
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@ALL
def test_compiles_as_one_graph(name):
    function, inputs = make(name)
    compiled = torch.compile(lambda *given: function(*given).sin().sum(), fullgraph=True, backend="aot_eager")
    want = function(*inputs).sin().sum()
    got = compiled(*inputs)
    assert torch.equal(got, want)
    assert all(map(torch.equal, torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs)))


@ALL
def test_a_gradient_penalty_is_refused(name):
    """Although dL/dy of a sum or a loss, 1, has no graph: the penalty would be taken for a constant."""
    function, inputs = make(name)
    loss = function(*inputs).sum()
    grad, *_ = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + grad.norm()).backward()
