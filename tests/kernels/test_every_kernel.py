"""Promises of every kernel alike: arguments stay as they were, equal bits each time, gradients by finite differences,
any layout, nothing computed for frozen inputs, refusals, one graph under torch.compile, and no second derivatives."""

from collections.abc import Callable
from itertools import compress, cycle, islice, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cross_entropy, flash_attention, launch, rmsnorm, weighted_sum
from kernels.cross_entropy import LinearCrossEntropyFunction
from kernels.flash_attention import FlashAttention2
from kernels.rmsnorm import RMSNormFunction, TritonAddRMSNormFunction, TritonRMSNormFunction
from kernels.swiglu import SwiGLUFunction
from kernels.tiled_attention import TiledAttentionFunction
from kernels.weighted_sum import WeightedSumFunction, f_weightedsum
from tests.support.tolerances import bound, relative_error

pytestmark = pytest.mark.usefixtures("where_triton_runs")
TARGETS = [3, 0, 6, 6, 2, 1, -100, 5, 4]  # -100 is no target
# What is called, and the shapes of the inputs that get a gradient.
KERNELS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "weighted sum": (f_weightedsum, ((9, 5), (5,))),
    "rmsnorm": (lambda x, w: TritonRMSNormFunction.apply(x, w, 0.1), ((9, 5), (5,))),
    "rmsnorm in torch": (lambda x, w: RMSNormFunction.apply(x, w, 0.1), ((9, 5), (5,))),
    "rmsnorm of a sum": (lambda x, r, w: torch.stack(TritonAddRMSNormFunction.apply(x, r, w)), ((9, 5), (9, 5), (5,))),
    "swiglu": (SwiGLUFunction.apply, ((9, 5), (9, 5))),
    "attention": (lambda q, k, v: FlashAttention2.apply(q, k, v, True), ((2, 5, 4),) * 3),
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


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every other column": lambda x: torch.stack((x, x), -1)[..., 0],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "padded rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "one element off": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "one row for all": lambda x: x[:1].expand(x.shape),
    "one number for all": lambda x: x.flatten()[0].expand(x.shape),
}


def results(function, inputs, grad, needed=None, before_backward=lambda: None):
    """The output and the gradients of the inputs, which may be of any layout, that need one."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needed or [True] * len(inputs), strict=True)]
    y = function(*leaves)
    before_backward()
    return y.detach(), *torch.autograd.grad(y, [x for x in leaves if x.requires_grad], grad)


@ALL
def test_any_layout(name):
    function, inputs = make(name)
    grad = torch.randn_like(function(*inputs))
    for turn in (0, 2, 4):
        layouts = islice(cycle(LAYOUTS.values()), turn, None)  # another one for each tensor
        odd = [layout(x.detach()) if x.dim() else x for layout, x in zip(layouts, (*inputs, grad), strict=False)]
        *plain, plain_grad = (x.clone(memory_format=torch.contiguous_format) for x in odd)
        for got, want in zip(results(function, odd[:-1], odd[-1]), results(function, plain, plain_grad), strict=True):
            assert (got - want).abs().max() <= bound(torch.float32, stages=10, longest_sum=9) * want.abs().max().clip(1)


# What backward launches, with its flags, for each of the inputs alone.
ALONE = {
    "weighted sum": ({"backward_kernel NEED_X"}, {"backward_kernel NEED_WEIGHT"}),
    "rmsnorm": ({"backward_kernel NEED_X"}, {"backward_kernel NEED_WEIGHT", "column_sum_kernel"}),
    "swiglu": ({"swiglu_backward_kernel NEED_GATE"}, {"swiglu_backward_kernel NEED_UP"}),
    "attention": ({"rows_kernel", "queries_kernel"}, *[{"rows_kernel", "keys_kernel"}] * 2),
    "cross entropy": ({"scale_kernel"},) * 2,
}


@ALL
def test_frozen_inputs_get_no_gradient_and_cost_nothing(name, monkeypatch):
    function, inputs = make(name)
    grad = torch.randn_like(function(*inputs))
    every, launched, real = results(function, inputs, grad)[1:], set(), launch.launch

    def spy(kernel, *args, **options):
        needs = [key for key, value in options.items() if key.startswith("NEED") and value]
        launched.add(" ".join([kernel.fn.__name__, *needs]))
        if name == "weighted sum" and options.get("NEED_WEIGHT") is False:
            assert not args[-2].numel(), "no partial sums are kept"
        real(kernel, *args, **options)

    for module in (launch, weighted_sum, rmsnorm, flash_attention):
        monkeypatch.setattr(module, "launch", spy)
    for needed in [each for each in product((True, False), repeat=len(inputs)) if any(each)]:
        got = results(function, inputs, grad, needed, launched.clear)[1:]
        for each, want in zip(got, compress(every, needed), strict=True):
            assert relative_error(each, want.double()) <= bound(torch.float32, stages=10, longest_sum=9)
        if name in ALONE and sum(needed) == 1:
            assert launched == ALONE[name][needed.index(True)]


class Calls(TorchDispatchMode):
    """The calls of this project's operators, without repetitions of the same one."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cs336_kernels":
            flags = (each if isinstance(each, bool) else getattr(each, "dtype", None) for each in args)
            self.seen[func, *flags] = func, [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))


@ALL
def test_operators_keep_their_contract(name):
    """Their results on fake tensors, of any layout, have the same shapes, strides and dtypes."""
    calls, (_, inputs) = Calls(), make(name)
    alone = [[x is each for x in inputs] for each in inputs]
    for dtype, needs in (
        (torch.float32, [[True] * len(inputs), *alone]),
        (torch.bfloat16, alone[:1]),
        (torch.float64, alone[1:2]),
    ):
        function, inputs = make(name, dtype)
        odd = [LAYOUTS["transposed"](x.detach()) for x in inputs]
        with calls:
            for needed in needs:
                results(function, odd, torch.ones_like(function(*odd)), needed)
    for i, (operator, arguments) in enumerate(calls.seen.values()):
        more = {"test_utils": ("test_schema", "test_faketensor")} if i else {}  # without tracing it again
        torch.library.opcheck(operator, arguments, **more)


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


FLOAT, WHOLE, META = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, device="meta")
ATTENTION, NORMS = (FlashAttention2, TiledAttentionFunction), (TritonRMSNormFunction, RMSNormFunction)
LOSS, LABELS = (LinearCrossEntropyFunction,), torch.tensor([1, 0])
REFUSED = [  # by which functions, given what, and what is said
    ((WeightedSumFunction, *NORMS), (FLOAT, torch.ones(4)), ValueError, r"weight has shape \(4,\), not \(3,\) as x's"),
    ((WeightedSumFunction,), (FLOAT, torch.ones(1, 3)), ValueError, "weight has shape"),
    ((WeightedSumFunction, *NORMS), (WHOLE, FLOAT[0]), TypeError, "x must be .* not torch.int64"),
    (NORMS, (FLOAT, WHOLE[0]), TypeError, r"weight must be .* not torch.int64"),
    ((WeightedSumFunction,), (FLOAT, FLOAT[0].cfloat()), TypeError, "weight must be"),
    ((WeightedSumFunction, *NORMS), (FLOAT, META[0]), ValueError, "weight is on meta, x on cpu"),
    ((WeightedSumFunction, *NORMS), (torch.ones(()), torch.ones(())), ValueError, "no dimension"),
    (NORMS, ([1.0, 2.0], torch.ones(2)), TypeError, "x must be a tensor, not list"),
    (NORMS, (FLOAT.to(torch.float8_e5m2), FLOAT[0]), TypeError, "x must be .* not torch.float8_e5m2"),
    (NORMS, (FLOAT.to_sparse(), FLOAT[0]), TypeError, "x must be dense, not torch.sparse_coo"),
    ((SwiGLUFunction,), (FLOAT, FLOAT[0]), ValueError, r"up has shape \(3,\), not \(2, 3\) as gate demands"),
    ((SwiGLUFunction,), (FLOAT, WHOLE), TypeError, "up must be of a floating-point dtype"),
    ((SwiGLUFunction,), (FLOAT, META), ValueError, "up is on meta"),
    (ATTENTION, (FLOAT, FLOAT.bfloat16(), FLOAT), ValueError, "k is torch.bfloat16, q torch.float32"),
    (ATTENTION, (FLOAT, FLOAT, FLOAT.half()), ValueError, "v is torch.float16"),
    (ATTENTION, (FLOAT, FLOAT[:, :2], FLOAT), ValueError, r"k has shape \(2, 2\)"),
    (ATTENTION, (FLOAT, FLOAT[None], FLOAT), ValueError, r"k has shape \(1, 2, 3\)"),
    (ATTENTION, (FLOAT, FLOAT, FLOAT[:1]), ValueError, r"v has shape \(1, 3\)"),
    (ATTENTION, (FLOAT[0], FLOAT, FLOAT), ValueError, r"q has shape \(3,\)"),
    (ATTENTION, (FLOAT, FLOAT, META), ValueError, "v is on meta"),
    (ATTENTION, (WHOLE, FLOAT, FLOAT), TypeError, "q must be of a floating-point dtype"),
    (ATTENTION, (FLOAT, FLOAT, FLOAT, FLOAT.tril()), TypeError, "is_causal must be True or False, not a Tensor"),
    ((FlashAttention2,), [torch.ones(2, 129)] * 3, ValueError, "dim 129; these kernels can do 1 to 128"),
    (LOSS, (FLOAT.bfloat16(), FLOAT, LABELS), ValueError, "hidden is torch.bfloat16 and weight torch.float32"),
    (LOSS, (FLOAT[:, :2], FLOAT, LABELS), ValueError, r"hidden has shape \(2, 2\), not \(2, 3\)"),
    (LOSS, (FLOAT, FLOAT, LABELS[:1]), ValueError, r"targets has shape \(1,\), not \(2,\)"),
    (LOSS, (FLOAT, FLOAT[:0], LABELS), ValueError, r"weight has shape \(0, 3\)"),
    (LOSS, (FLOAT, FLOAT, LABELS.to("meta")), ValueError, "targets is on meta"),
    (LOSS, (FLOAT, FLOAT, LABELS.int()), TypeError, "targets must be of dtype torch.int64, not torch.int32"),
    (LOSS, (FLOAT, FLOAT, [1, 0]), TypeError, "targets must be a tensor, not list"),
    (LOSS, (FLOAT, WHOLE, LABELS), TypeError, "weight must be of a floating-point dtype"),
    ((FlashAttention2,), [torch.ones(2, 0)] * 3, ValueError, "dim 0; these kernels can do 1 to 128"),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "given", "error", "said"), REFUSED)
def test_what_does_not_fit_is_refused(functions, given, error, said):
    for function in functions:
        with pytest.raises(error, match=said):
            function.apply(*given)
