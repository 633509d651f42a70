"""FlashAttention-2, in tiles of plain torch and in Triton, against torch's own attention in float64."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from kernels import flash_attention, reference, tiled_attention
from kernels.flash_attention import FlashAttention2
from kernels.tiled_attention import TiledAttentionFunction
from tests.support.tolerances import UNIT_ROUNDOFF, bound

pytestmark = pytest.mark.usefixtures("where_triton_runs")
BOTH = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = pytest.mark.parametrize("function", [FlashAttention2, TiledAttentionFunction])


def inputs(queries, keys, dim, leading=(2,), dtype=torch.float32):
    """q, k, v and the gradient of the output."""
    return [torch.randn(*leading, n, dim).to(dtype) for n in (queries, keys, keys, queries)]


def truth(q, k, v, grad, is_causal):
    """O, dQ, dK and dV in float64, by torch's autograd over torch's attention."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad.double())


def ours(q, k, v, grad, is_causal=False, function=FlashAttention2):
    """The same four by the function under test; the inputs may be of any layout, so they are leaves by themselves."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = function.apply(q, k, v, is_causal)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad)


def allowed(q, k, v, grad, is_causal):
    """How far each element of O, dQ, dK and dV may be off: rounding errors to first order, every one at its worst.

    `half` is the rounding of what enters a product (P and dS) or leaves the kernel, `wide` the relative error of P, dP
    and sums in float32; exp turns an absolute error of a score into a relative one of P. D comes from the rounded O.
    """
    half, dtype = UNIT_ROUNDOFF[q.dtype], torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    scale = 1 / math.sqrt(q.shape[-1])
    largest = (q.abs() @ k.abs().mT).max().item() * scale + 1
    wide = bound(dtype, stages=4, longest_sum=q.shape[-1] * largest + q.shape[-2] + k.shape[-2])
    o, log_sum_exp = reference.attention(q, k, v, is_causal)
    weights = (q @ k.mT * scale - log_sum_exp[..., None]).exp()
    weights = weights.tril() if is_causal else weights
    off_o = half * o.abs() + (half + wide) * weights @ v.abs()
    off_row_dot = ((grad.abs() * off_o).sum(-1) + wide * (grad * o).abs().sum(-1))[..., None]
    grad_weights = grad @ v.mT - (grad * o).sum(-1)[..., None]
    off_scores = weights * (half * grad_weights.abs() + wide * (grad.abs() @ v.abs().mT) + off_row_dot)
    largest_scores = weights * grad_weights.abs()
    off_q = scale * (half * (largest_scores @ k.abs()) + off_scores @ k.abs())
    off_k = scale * (half * (largest_scores.mT @ q.abs()) + off_scores.mT @ q.abs())
    return off_o, off_q, off_k, (2 * half + wide) * weights.mT @ grad.abs()


def require_equal(q, k, v, grad, is_causal=False, function=FlashAttention2):
    got, want = ours(q, k, v, grad, is_causal, function), truth(q, k, v, grad, is_causal)
    for name, each, right, off in zip("oqkv", got, want, allowed(q, k, v, grad, is_causal), strict=True):
        assert each.dtype == q.dtype
        assert each.shape == right.shape
        assert ((each.double() - right).abs() <= off + torch.finfo(q.dtype).tiny).all(), name


def test_tiles_above_the_diagonal_are_not_computed(monkeypatch):
    seen, scores = [], tiled_attention.scores
    monkeypatch.setattr(tiled_attention, "scores", lambda q, k, *tiles: seen.append(tiles) or scores(q, k, *tiles))
    ours(*inputs(192, 192, 4, leading=()), True, TiledAttentionFunction)
    assert len(seen) == 3 * (2 + 4 + 6)  # three passes; tiles of 64 queries see 2, 4 and 6 tiles of 32 keys


@pytest.mark.parametrize("dim", [1, 16, 32, 40, 64, 100, 128])
def test_any_dim(dim):
    require_equal(*inputs(40, 35, dim, leading=(1,)), dim in (16, 40, 100))


@FUNCTIONS
@BOTH
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 64), (65, 65), (40, 130), (130, 40)])
def test_any_length(queries, keys, is_causal, function):
    require_equal(*inputs(queries, keys, 16, leading=(1 + (queries < 40),)), is_causal, function)


@FUNCTIONS
@pytest.mark.parametrize(("dim", "seq"), [(16, 200), (64, 65), (128, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, dim, seq, function):
    is_causal = (dtype == torch.float16) == (dim == 64)
    require_equal(*inputs(seq, seq, dim, (1,), dtype), is_causal, function)


@BOTH
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would round, the interpreter multiplies float32")
def test_the_tiles_of_tf32(dim, is_causal, monkeypatch):
    monkeypatch.setattr(flash_attention, "arithmetic", lambda dtype: "tf32")
    require_equal(*inputs(65, 40, dim, leading=(1,)), is_causal)


def test_float32_is_multiplied_as_torch_does_and_tiles_fit_the_padding():
    for setting, want in (("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(setting)
        assert flash_attention.arithmetic(torch.float32) == want
        assert flash_attention.arithmetic(torch.bfloat16) == "half"
    for tiles in flash_attention.TILES.values():
        assert all(flash_attention.PADDING % queries == 0 for queries, *_ in tiles)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3)], ids=str)
def test_any_leading_dimensions(leading):
    q, k, v, grad = inputs(9, 20, 16, leading)
    require_equal(q, k, v, grad, True)
    o = FlashAttention2.apply(q.requires_grad_(), k, v)
    want = reference.attention(q.double(), k.double(), v.double())[1]
    log_sum_exp = o.grad_fn.saved_tensors[-1]
    assert log_sum_exp.dtype == torch.float32
    assert log_sum_exp.shape == (*leading, 9)
    assert (log_sum_exp - want).abs().max() <= bound(torch.float32, stages=4, longest_sum=16 * 16)


@FUNCTIONS
@pytest.mark.parametrize(("leading", "queries", "keys"), [((0,), 3, 3), ((2,), 0, 3), ((2,), 3, 0), ((2,), 0, 0)])
def test_nothing_to_attend_to(function, leading, queries, keys):
    q, k, v, grad = inputs(queries, keys, 16, leading)
    for got, like in zip(ours(q, k, v, grad, True, function), (q, q, k, v), strict=True):
        assert torch.equal(got, torch.zeros_like(like))


@FUNCTIONS
@BOTH
def test_one_saved_tensor_of_a_number_a_query(function, is_causal):
    q, k, v, _ = (t.requires_grad_() for t in inputs(24, 24, 16, leading=(3,)))
    o = function.apply(q, k, v, is_causal)
    assert o.grad_fn.is_causal is is_causal
    assert [tuple(t.shape) for t in o.grad_fn.saved_tensors] == [(3, 24, 16)] * 4 + [(3, 24)]


def test_same_bits_in_every_batch():
    q, k, v, grad = inputs(40, 40, 16)
    first = ours(q, k, v, grad, True)
    alone = ours(q[1:2], k[1:2], v[1:2], grad[1:2], True)
    assert all(torch.equal(whole[1:2], one) for whole, one in zip(first, alone, strict=True))


@FUNCTIONS
def test_nan_stays_in_its_sequence(function):
    clean = inputs(9, 9, 16)
    results = ours(*clean, True, function)
    for i in range(4):
        dirty = [t.clone() for t in clean]
        dirty[i][1, 5] = math.nan
        for name, got, want in zip("oqkv", ours(*dirty, True, function), results, strict=True):
            assert torch.equal(got[0], want[0])
            assert got[1].isnan().any() or (name, i) in (("o", 3), ("v", 2)), (name, i)


@FUNCTIONS
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_exp_could_not_take(function, sign):
    q, k, v, grad = inputs(40, 40, 16)
    q, k = 30 * q.abs(), sign * 10 * k.abs()
    assert (q @ k.mT).abs().min() / 4 > 100  # exp is infinite in float32, or 0 for all keys of a query
    require_equal(q, k, v, grad, False, function)


def by_reference(q, k, v, grad, is_causal, _):
    o, log_sum_exp = reference.attention(q, k, v, is_causal)
    return o, *reference.attention_backward(grad, q, k, v, o, log_sum_exp, is_causal)


THREE = (FlashAttention2, TiledAttentionFunction, by_reference)
WAYS = pytest.mark.parametrize("way", THREE)


LARGE = [*product(FLOATS, (1e4,)), *product(FLOATS[:2], (1e6,))]
NUMBERED = product(enumerate(THREE), enumerate(LARGE))
# All pairs of a way, a kind of numbers, a dimension, and whether queries see later keys.
PAIRS = [(way, *kind, (16, 64, 100)[(i + j) % 3], (i + j) % 2 == 1) for (i, way), (j, kind) in NUMBERED]


@pytest.mark.parametrize(("way", "dtype", "factor", "dim", "is_causal"), PAIRS)
def test_scores_so_large_that_one_key_has_all_weight(way, is_causal, dim, dtype, factor):
    """Scores of 1e8 to 1e13, where neighbours in float32 are 8 to 1e6 apart: P is 1 for the largest in each row."""
    q, k, v, grad = inputs(80, 80, dim, (1,))
    q, k, v, grad = (t.to(dtype) for t in (factor * q, factor * k, v, grad))
    got = (way if way is by_reference else ours)(q, k, v, grad, is_causal, way)
    half, wide = UNIT_ROUNDOFF[dtype], bound(torch.float32, stages=4, longest_sum=dim + 80)
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    hidden = torch.ones_like(q @ k.mT, dtype=torch.bool).triu(1) & is_causal
    mine = (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    assert mine.max(-1).values.min() == 1
    assert torch.equal(got[0].double(), mine @ v)
    # dQ and dK are 0: what is left of dP - D, which are equal, is the rounding of two sums.
    left = mine * wide * (grad.abs() @ v.abs().mT) / math.sqrt(dim)
    allowed = (left @ k.abs(), left.mT @ q.abs(), (half + wide) * mine.mT @ grad.abs())
    for name, each, right, off in zip("qkv", got[1:], (0 * q, 0 * k, mine.mT @ grad), allowed, strict=True):
        assert ((each.double() - right).abs() <= off + torch.finfo(dtype).tiny).all(), name


@WAYS
@BOTH
def test_keys_forbidden_by_minus_infinity(way, is_causal):
    """A column of ones in q, of minus infinity in some keys: whole tiles of scores are -inf. O, dK and dV are those
    of the keys that remain; dQ has 0 times infinity in that column, as in torch."""
    q, k, v, grad = inputs(150, 150, 16, (1,))
    q[..., 0], k[..., 0] = 1, 0
    k[:, 1 if is_causal else 0 : 140, 0] = -math.inf
    got = (way if way is by_reference else ours)(q, k, v, grad, is_causal, way)
    open_k = k.clone()
    open_k[..., 0] = open_k[..., 0].clamp(min=-1e4)
    want = truth(q, open_k, v, grad, is_causal)
    for i, (each, right, off) in enumerate(zip(got, want, allowed(q, open_k, v, grad, is_causal), strict=True)):
        first = i == 1  # of dQ without that column
        assert ((each.double() - right).abs() <= off + torch.finfo(torch.float32).tiny)[..., first:].all(), "oqkv"[i]


@WAYS
def test_a_query_that_sees_no_key_has_no_output(way):
    q, k, v, grad = inputs(70, 70, 16, (1,))
    q[..., 0], k[..., 0] = 1, 0
    k[:, :2, 0] = -math.inf
    o = (way if way is by_reference else ours)(q, k, v, grad, True, way)[0]
    assert o[:, :2].isnan().all(), "as in torch"
    assert o[:, 2:].isfinite().all()


def test_tiles_above_the_diagonal_are_not_read():
    clean = inputs(100, 100, 64, leading=(1,))
    o, grad_q, grad_k, grad_v = ours(*clean, True)
    q, k, v, grad = (t.clone() for t in clean)
    k[:, 64:], v[:, 64:] = math.nan, math.nan  # forward and dQ: tiles of 64 queries and 32 keys
    dirty_o, dirty_q, *_ = ours(q, k, v, grad, True)
    assert torch.equal(o[:, :64], dirty_o[:, :64])
    assert torch.equal(grad_q[:, :64], dirty_q[:, :64])
    assert dirty_o[:, 64:].isnan().all()
    q, k, v, grad = (t.clone() for t in clean)
    q[:, :32], grad[:, :32] = math.nan, math.nan  # dK and dV: tiles of 32 queries and 32 keys
    *_, dirty_k, dirty_v = ours(q, k, v, grad, True)
    assert torch.equal(grad_k[:, 32:], dirty_k[:, 32:])
    assert torch.equal(grad_v[:, 32:], dirty_v[:, 32:])
    assert dirty_k[:, :32].isnan().all()


@FUNCTIONS
@pytest.mark.parametrize("fused", [True, False])
def test_autocast_rounds_no_scores(function, fused, monkeypatch):
    """Backward recomputes scores, perhaps outside autocast: the log-sum-exp of rounded ones would not fit them."""
    monkeypatch.setattr(flash_attention, "runs_triton", lambda *_: fused)
    q, k, v, grad = inputs(40, 40, 16)
    want = ours(q, k, v, grad, True, function)
    with torch.autocast(q.device.type, torch.bfloat16):
        assert all(map(torch.equal, want, ours(q, k, v, grad, True, function)))
