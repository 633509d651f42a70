"""The fused head and loss against float64, chunk by chunk, and the memory it is there to save."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import cross_entropy, reference
from kernels.cross_entropy import LinearCrossEntropyFunction, chunk_tokens, linear_cross_entropy
from tests.support.tolerances import bound, relative_error

pytestmark = pytest.mark.usefixtures("where_triton_runs")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets how many tokens make a chunk."""
    return lambda size: monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda *_: size)


def make(tokens, d_model, vocab, dtype=torch.float32):
    """hidden, weight and targets with logits of a few units."""
    hidden, weight = torch.randn(tokens, d_model), torch.randn(vocab, d_model) / d_model**0.5
    return hidden.to(dtype), weight.to(dtype), torch.randint(vocab, (tokens,))


def run(hidden, weight, targets, scale=1.0, ignore_index=-100):
    """Loss and both gradients of scale times the loss."""
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight)]
    loss = LinearCrossEntropyFunction.apply(*leaves, targets, ignore_index)
    return loss.detach(), *torch.autograd.grad(loss * scale, leaves)


def error_bound(hidden, weight):
    """Sums of d_model, vocab or tokens terms in float32, and roundings to half precision: of logits, which are relative
    to the largest, of their gradient, of a product and of the product scaled."""
    largest = (hidden.double() @ weight.double().T).abs().max().item()
    sums = bound(torch.float32, stages=3, longest_sum=max(*hidden.shape, *weight.shape)) * max(1.0, largest)
    return sums + (0 if hidden.dtype == torch.float32 else bound(hidden.dtype, stages=1) * (largest + 3))


def require_right(got, hidden, weight, targets, scale=1.0, ignore_index=-100):
    """Loss, dL/dhidden and dL/dweight against float64."""
    wide = hidden.double(), weight.double(), targets, ignore_index
    factor = torch.tensor(scale, dtype=torch.float64)
    wanted = reference.cross_entropy(*wide), *reference.cross_entropy_backward(factor, *wide)
    tolerance = error_bound(hidden, weight)
    assert got[0].dtype == torch.float32
    assert abs(got[0] - wanted[0]) < tolerance * max(1.0, wanted[0])  # a small loss is the difference of larger numbers
    for result, want, dtype in zip(got[1:], wanted[1:], (hidden.dtype, weight.dtype), strict=True):
        assert result.dtype == dtype
        assert relative_error(result, want) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(7, 16, 50), (3, 8, 10_000), (5, 5, 2), (2, 1, 151_936)], ids=str)
def test_one_chunk(sizes, dtype):
    arguments = make(*sizes, dtype)
    require_right(run(*arguments), *arguments)


@pytest.mark.parametrize(("size", "dtype"), [*((8, dtype) for dtype in DTYPES), *((n, DTYPES[0]) for n in (1, 7, 64))])
def test_many_chunks(size, dtype, chunks_of):
    chunks_of(size)
    hidden, weight, targets = make(21, 24, 130, dtype)
    targets[[0, 9, 20]] = 7
    require_right(run(hidden, weight, targets, 0.37, 7), hidden, weight, targets, 0.37, 7)


def test_vocabulary_of_one():
    assert not any(result.any() for result in run(*make(3, 4, 1)))


def test_leading_dimensions_and_layouts():
    hidden = torch.randn(2, 6, 5).mT  # (2 5 6)
    weight, targets = torch.randn(6, 40).T, torch.randint(40, (5, 2)).T
    got = run(hidden, weight, targets)
    assert got[1].shape == hidden.shape
    flat = hidden.reshape(-1, 6), weight, targets.reshape(-1)
    require_right((got[0], got[1].reshape(-1, 6), got[2]), *flat)


@pytest.mark.parametrize(("tokens", "dtype"), [(0, torch.float32), (4, torch.float32), (4, torch.float64)])
def test_nothing_to_learn_from(tokens, dtype):
    hidden, weight, _ = make(tokens, 8, 20, dtype)
    loss, grad_hidden, grad_weight = run(hidden, weight, torch.full((tokens,), -100))
    assert loss.isnan()  # as in torch, 0 / 0
    assert grad_hidden.shape == hidden.shape
    assert not grad_hidden.any() | grad_weight.any()


def test_nan_of_one_token_is_seen_and_stays_there_unless_it_is_ignored():
    hidden, weight, targets = make(4, 8, 20)
    others = [0, 2, 3]
    want_loss, want_hidden, _ = run(hidden[others], weight, targets[others])
    hidden[1] = float("nan")
    loss, grad_hidden, _ = run(hidden, weight, targets)
    assert loss.isnan()
    assert grad_hidden.isnan().any(dim=1).tolist() == [False, True, False, False]
    targets[1] = -100
    loss, grad_hidden, _ = run(hidden, weight, targets)
    assert torch.equal(loss, want_loss)
    assert not grad_hidden[1].any()
    assert relative_error(grad_hidden[others], want_hidden) < bound(torch.float32, stages=3, longest_sum=20)


@pytest.mark.parametrize("vocab", [3, 9000])
def test_huge_logits(vocab):
    weight = torch.zeros(vocab, 1)
    weight[:3, 0] = torch.tensor([1.0, 2.0, -1.0])
    loss, grad_hidden, grad_weight = run(torch.tensor([[1e4], [-1e4]]), weight, torch.tensor([0, 2]))
    assert loss == 5e3  # 2e4 - 1e4 for the first, nothing for the second
    assert grad_hidden.tolist() == [[0.5], [0.0]]
    assert grad_weight[:3, 0].tolist() == [-5e3, 5e3, 0.0]


def test_infinite_logits_of_a_whole_block():
    logits, losses = torch.full((1, 6400), -float("inf")), torch.empty(1)
    logits[0, 6000:] = 1.0  # whole blocks precede it
    cross_entropy.rows_in_place(logits, torch.tensor([6001]), losses, -100, True)
    assert relative_error(losses, torch.tensor([400.0]).log()) < bound(torch.float32, stages=3, longest_sum=400)
    assert torch.equal(logits[0, :6000], torch.zeros(6000))


def test_small_probabilities_survive_half_precision():
    tokens, unlikely = 16, torch.tensor(-10.0, dtype=torch.float64).sigmoid()
    weight = torch.tensor([[10.0], [0.0]], dtype=torch.float16)
    _, _, grad_weight = run(torch.ones(tokens, 1).half(), weight, torch.zeros(tokens, dtype=torch.int64), 1024.0)
    # Divided by the number of tokens before it was multiplied by 1024, it would have kept six bits.
    tolerance = 2.0**-25 / unlikely.item() + bound(torch.float16, stages=2)
    assert relative_error(grad_weight[1, 0], 1024 * unlikely) < tolerance


def test_evaluation_computes_no_gradients(monkeypatch):
    hidden, weight, targets = make(4, 8, 20)
    seen, in_chunks = [], cross_entropy.in_chunks
    monkeypatch.setattr(cross_entropy, "in_chunks", lambda *args: (seen.append(args[-2:]), in_chunks(*args))[1])
    with torch.no_grad():
        linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    linear_cross_entropy(hidden, weight, targets)
    assert seen == [(False, False), (True, False)]


class Record(TorchDispatchMode):
    """Every operation that torch is asked for, with the bytes of the storage behind its largest result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.calls.append((func._schema.name, max(sizes, default=0)))
        return result


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_logits_of_all_tokens_never_exist(flags, chunks_of):
    chunks_of(8)
    arguments = make(24, 4, 200)
    with Record() as chunked:
        cross_entropy.in_chunks(*arguments, -100, *flags)
    with Record() as whole:
        reference.cross_entropy(*arguments)
    largest = [max(size for _, size in record.calls) for record in (chunked, whole)]
    assert largest == [8 * 256 * 4, 24 * 200 * 4]  # rows of 200 are padded to 256
    products = [name for name, _ in chunked.calls if name in ("aten::mm", "aten::addmm")]
    assert len(products) == 3 * (1 + sum(flags))  # of each of three chunks


def test_chunk_is_bounded_by_memory():
    assert (chunk_tokens(50_257, 768, 2), chunk_tokens(128_256, 4096, 2)) == (4096, 4096)  # 1 GB, as much as the weight
    assert (chunk_tokens(128_256, 2048, 2), chunk_tokens(262_144, 640, 4)) == (2048, 1024)
    for vocab, d_model in product((1, 32_000, 151_936, 262_144), (64, 1600, 8192)):
        tokens = chunk_tokens(vocab, d_model, 2)
        assert tokens in range(1024, 4097)
        assert tokens == 1024 or tokens * vocab <= max(2**28, vocab * d_model)


@pytest.mark.parametrize("fused", [True, False])
def test_autocast_as_linear_would(fused, monkeypatch):
    monkeypatch.setattr(cross_entropy, "runs_triton", lambda *_: fused)
    hidden, weight, targets = make(5, 16, 40)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(hidden, weight, targets)
    loss, *grads = run(hidden.bfloat16(), weight.bfloat16(), targets)
    assert torch.equal(got[0], loss)
    for result, want in zip(got[1:], grads, strict=True):
        assert torch.equal(result.bfloat16(), want)
        assert result.dtype == torch.float32
        assert not torch.equal(result, want.float())  # rounded to float32, not to bfloat16 and back


def test_compiles_under_autocast():
    hidden, weight, targets = make(6, 8, 20)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    compiled = torch.compile(lambda *args: linear_cross_entropy(*args) * 3, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*leaves, targets), linear_cross_entropy(*leaves, targets) * 3)


@pytest.mark.parametrize("wrong", [-1, 20, -(2**40)])
def test_target_outside_the_vocabulary(wrong):
    hidden, weight, targets = make(3, 8, 20)
    targets[1] = wrong
    with pytest.raises(ValueError, match=rf"targets contains {wrong}, neither in \[0, 20\) nor ignore_index=-100"):
        linear_cross_entropy(hidden, weight, targets)
    # On a GPU, which nobody waits for, the kernel itself has to say so.
    logits, losses = torch.randn(3, 64)[:, :20], torch.empty(3)
    cross_entropy.rows_in_place(logits, targets, losses, -100, True)
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.isnan().any(dim=1).tolist() == [False, True, False]
    assert logits[1].isnan().all()


def test_a_model_without_memory():
    hidden, weight = torch.zeros(4, 3, device="meta"), torch.zeros(5, 3, device="meta")
    loss = linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64, device="meta"))
    assert loss.shape == ()
