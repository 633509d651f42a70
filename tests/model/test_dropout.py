"""Dropout by place: its statistics, and that no slice, dtype or recompute changes the mask.

The inputs are fixed, so a statistic either lies within its bound or does not. Independent coins would exceed each bound
in fewer than one of 10^9 worlds.
"""

import math
from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from cs336_systems.errors import UserError
from cs336_systems.model.dropout import _mix, _signed, drop, dropout_key, keyed_uniform

RARE = math.log(2e9)  # -log of half of 10^-9, for two tails
CPU = torch.device("cpu")
SHAPE = (6, 10, 4, 9)  # batch, seq, heads, features


def mix_number(word: int) -> int:
    """SplitMix64's finalizer in plain Python."""
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def key(rows: int = 6, seed: int = 1, step: int = 2, first: int = 0):
    return dropout_key(seed, step, torch.arange(first, first + rows))


def kept(p: float, *shape: int, site: int | str = "a", starts=(), dtype=torch.float32, **place) -> Tensor:
    """The mask of kept elements, as float64 zeros and ones."""
    return (drop(torch.ones(shape, dtype=dtype), p, key(shape[0], **place), site, starts) != 0).double()


def test_splitmix64_gives_its_published_numbers():
    """The first outputs of the reference generator from the state 1234567, which other libraries test with, too."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = [1234567 + (i + 1) * 0x9E3779B97F4A7C15 for i in range(4)]
    assert [mix_number(state) for state in states] == published
    assert _mix(torch.tensor([_signed(s % 2**64) for s in states])).tolist() == [_signed(n) for n in published]


def level(seed: int, step: int, row: int, site: str, position: int, feature: int) -> int:
    """The definition in plain Python: an element of (batch position feature) survives every p up to this over 2^32."""

    def mixed_in(hash_: int, index: int) -> int:
        return mix_number(hash_ + (index + 1) * 0x9E3779B97F4A7C15)

    word = mix_number(seed + 0x9E3779B97F4A7C15)
    for index in (step, row):
        word = mixed_in(word, index)
    word = mix_number(word + int.from_bytes(blake2b(site.encode(), digest_size=8).digest(), "little"))
    word = mixed_in(mixed_in(word, position), feature // 2)
    half = word >> 32 if feature % 2 else word % 2**32
    return (half + 2**31) % 2**32  # a signed half's lowest value comes first


def test_the_mask_is_its_definition_to_the_last_bit():
    ones = torch.ones(1, 1, 1)
    for place in ((0, 0, 0, "a", 0, 0), (3, 1, 4, "1", 5, 9), (2**40, 2**33, 2**45, "b", 2**34, 2**35 + 1)):
        seed, step, row, site, position, feature = place
        mine, u = dropout_key(seed, step, torch.tensor([row])), level(*place)
        for p, survives in ((u / 2**32, True), ((u + 1) / 2**32, False)):
            assert (drop(ones, p, mine, site, (position, feature)).item() != 0) == survives


def correlation(*masks: Tensor) -> float:
    """Of masks with p = 1/2, over the bound for independent ones: Hoeffding's inequality for a sum of +1 and -1."""
    signs = torch.stack([2 * mask - 1 for mask in masks])
    return abs(signs.prod(0).sum().item()) / math.sqrt(2 * RARE * masks[0].numel())


def test_seeds_steps_sites_rows_and_positions_are_independent():
    shape = (16, 64, 64)
    first = kept(0.5, *shape)
    others = {
        "seed": kept(0.5, *shape, seed=2),
        "step": kept(0.5, *shape, step=3),
        "seed and step exchanged": kept(0.5, *shape, seed=2, step=1),
        "site": kept(0.5, *shape, site="b"),
        "rows": kept(0.5, *shape, first=16),
        "positions": kept(0.5, *shape, starts=(64, 0)),
        "features": kept(0.5, *shape, starts=(0, 64)),
        "neighbouring row": first.roll(1, 0),
        "neighbouring position": first.roll(1, 1),
        "neighbouring feature": first.roll(1, 2),
        "feature after the next": first.roll(2, 2),
        "transposed": first.transpose(1, 2),
        "row and position exchanged": kept(0.5, 64, 64, 64)[:, :16].transpose(0, 1),
    }
    for name, other in others.items():
        assert correlation(first, other) <= 1, name
    # Corners of rectangles, in which hashes that only add or xor their indices would betray themselves.
    for a, b in ((0, 1), (0, 2), (1, 2)):
        corners = [first, first.roll(1, a), first.roll(1, b), first.roll((1, 1), (a, b))]
        assert correlation(*corners) <= 1


def test_neighbours_and_levels_are_equally_distributed():
    """Chi-square of bytes: eight neighbours in a row as one number, of 256 that are equally likely; and of levels: how
    often the hash lies in each of 256 equal intervals."""
    bound = 255 + 2 * math.sqrt(255 * RARE) + 2 * RARE  # Laurent and Massart (2000), lemma 1
    mask = kept(0.5, 4, 128, 512).view(-1, 8)
    bytes_ = (mask * 2 ** torch.arange(8.0, dtype=torch.float64)).sum(1).long()
    levels = sum((kept(i / 256, 2, 64, 256) == 0).long() for i in range(1, 256)).flatten()
    for numbers in (bytes_, levels):
        counts = torch.bincount(numbers, minlength=256).double()
        expected = numbers.numel() / 256
        assert len(counts) == 256
        assert ((counts - expected) ** 2 / expected).sum() <= bound


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_a_slice_draws_its_slice_of_the_global_mask(axis, cut):
    """Rows are cut by data parallelism, positions by sequence parallelism, heads and features by tensor parallelism."""
    x = torch.randn(SHAPE)
    whole = drop(x, 0.4, key(), "a")
    starts = [0, 0, 0]
    if axis:
        starts[axis - 1] = cut
    for stop in (cut + 1, SHAPE[axis]):
        part = x.narrow(axis, cut, stop - cut)
        mine = key(len(part), first=cut) if axis == 0 else key()
        y = drop(part, 0.4, mine, "a", starts)
        assert torch.equal(y, whole.narrow(axis, cut, stop - cut))
        if axis == 1:  # axes left out start at 0
            assert torch.equal(drop(part, 0.4, mine, "a", (cut,)), y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_survivors_are_scaled_whatever_their_dtype_and_layout(dtype):
    x = torch.randn(SHAPE, dtype=dtype)
    before = torch.get_rng_state()
    y = drop(x, 0.4, key(), "a")
    assert torch.equal(torch.get_rng_state(), before)
    assert y.dtype == dtype
    assert torch.equal(y, x * kept(0.4, *SHAPE).to(dtype) * (1 / 0.6))
    assert torch.equal(drop(x.mT.contiguous().mT, 0.4, key(), "a"), y)
    assert drop(x, 0.0, key(), "a") is x


def test_the_gradient_passes_where_the_value_did_and_one_byte_an_element_is_kept():
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = drop(x, 0.4, key(), "a")
    assert sum(t.untyped_storage().nbytes() for t in saved) == x.numel()
    weight = torch.randn(SHAPE, dtype=torch.float64)
    y.backward(weight)
    assert torch.equal(x.grad, weight * (1 / 0.6) * kept(0.4, *SHAPE))


def test_a_p_next_to_one_and_an_empty_slice():
    assert not drop(torch.ones(6, 7), math.nextafter(1.0, 0.0), key(), "a").any()
    for shape in ((6, 0), (6, 0, 3), (6, 3, 0)):
        assert drop(torch.ones(shape), 0.5, key(), "a", (1,)).shape == shape
    assert drop(torch.ones(0, 3), 0.5, key(0), "a").shape == (0, 3)
    assert keyed_uniform((6, 0, 9), key(), "a", CPU).shape == (6, 0, 9)


def test_numbers_are_their_definition_to_the_last_bit():
    numbers = keyed_uniform((2, 3, 5), dropout_key(3, 1, torch.tensor([4, 9])), "1", CPU)
    assert numbers.dtype == torch.float32
    for i, row in enumerate((4, 9)):
        for position in range(3):
            for feature in range(5):
                high = level(3, 1, row, "1", position, feature) >> 9  # 23 bits
                assert numbers[i, position, feature].item() == (2 * high + 1) / 2**24


def test_what_does_not_fit_is_refused():
    x = torch.ones(6, 3)
    for p in (-0.1, 1.0, 1.5, math.nan):
        with pytest.raises(UserError, match=r"must lie in \[0, 1\)"):
            drop(x, p, key(), "a")
    for shape, rows in (((6, 3), 5), ((6, 3), 1), ((6,), 6)):
        with pytest.raises(UserError, match=f"a key of {rows} rows"):
            drop(torch.ones(shape), 0.5, key(rows), "a")
        with pytest.raises(UserError, match=f"with a key of {rows} rows: one a row is meant"):
            keyed_uniform(shape, key(rows), "a", CPU)
    for starts in ((0, 0), (-1,)):
        with pytest.raises(UserError, match="do not fit the axes"):
            drop(x, 0.5, key(), "a", starts)
