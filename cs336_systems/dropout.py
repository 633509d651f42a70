"""Dropout, and random numbers, by place in the run: without a generator, no layout and no recompute changes them.

An element's fate is a hash of (seed, step, row of the global batch, site, global position), as in counter-based random
number generators (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). Whoever computes a slice of an
activation therefore draws that slice of the one global mask: rows on data-parallel ranks, positions under sequence
parallelism, heads under tensor parallelism, layers on pipeline stages, all of it again in a recomputed forward.

The hash is SplitMix64's (Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), taken once for
each axis: hash = mix(hash + (index + 1) GOLDEN). It is integer arithmetic that wraps around, the same on every device.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.errors import UserError

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, factor
LAST_SHIFT = 31


class DropoutKey(NamedTuple):
    """64 bits for each sequence of a microbatch, int64 (batch,), from `dropout_key`."""

    rows: Tensor


def dropout_key(seed: int, step: int, rows: Tensor) -> DropoutKey:
    """The key of a microbatch in a step: `rows` int64 (batch,) are its rows' numbers in the global batch."""
    start = _mix_number(_mix_number(seed + GOLDEN) + (step + 1) * GOLDEN)
    return DropoutKey(_mix((rows.long() + 1) * _signed(GOLDEN) + _signed(start)))


def keyed_dropout(x: Tensor, p: float, key: DropoutKey, site: int | str, starts: Sequence[int] | None = None) -> Tensor:
    """x (batch ...) with a share p of its elements set to zero and the others over 1 - p, decided by their place.

    x is a slice of a global tensor: `starts` are the global indices of its first element along the axes after batch
    (default, and for axes left out: 0). `site` tells places of the model apart; 7 and "7" are the same. Backward keeps
    one byte an element. The mask depends neither on dtype nor on device; p is met to 2^-32. p = 0 returns x itself.

    Raises UserError for p outside [0, 1), a key of another number of rows, and starts that fit no axis.
    """
    if not 0 <= p < 1:
        raise UserError(f"dropout p must lie in [0, 1), not {p}")
    starts = tuple(starts or ())
    if x.dim() < 2 or len(key.rows) != len(x):
        raise UserError(f"dropout of shape {tuple(x.shape)} with a key of {len(key.rows)} rows: one a row is meant")
    if len(starts) >= x.dim() or min(starts, default=0) < 0:
        raise UserError(f"starts {starts} do not fit the axes after batch of shape {tuple(x.shape)}")
    if p == 0:
        return x
    # A product with a bool keeps nothing but the bool for backward.
    return x * _keep(x, p, key, site, (*starts, *[0] * (x.dim() - 1 - len(starts)))) * (1 / (1 - p))


def keyed_uniform(shape: Sequence[int], key: DropoutKey, site: int | str, device: torch.device) -> Tensor:
    """Numbers between 0 and 1 of a shape (batch ...), decided by their place: float32, the odd multiples of 2^-24.

    Each is exact in float32 and none is 0 or 1, so that log u and log(1 - u) are finite; their mean is 1/2.

    Raises UserError for a key of another number of rows.
    """
    if len(key.rows) != shape[0] or len(shape) < 2:
        raise UserError(f"numbers of shape {tuple(shape)} with a key of {len(key.rows)} rows: one a row is meant")
    words = _words(torch.Size(shape), key, site, [0] * (len(shape) - 1), device)
    return ((words >> 9).float() + (2**22 + 0.5)) * 2**-23


def _keep(x: Tensor, p: float, key: DropoutKey, site: int | str, starts: Sequence[int]) -> Tensor:
    """What survives, bool of the shape of x."""
    return _words(x.shape, key, site, starts, x.device) >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def _words(shape: torch.Size, key: DropoutKey, site: int | str, starts: Sequence[int], device: torch.device) -> Tensor:
    """A hash for each place, int32 of the shape. Each axis is mixed in before the next makes the tensor larger."""
    words = _mix(key.rows.to(device) + _site_number(str(site)))
    for extent, start in zip(shape[1:-1], starts, strict=False):
        words = _mix_axis(words, start, start + extent)
    # A word of 64 bits serves two neighbours of the last axis, its halves seen as int32.
    first, last = starts[-1], starts[-1] + shape[-1]
    words = _mix_axis(words, first // 2, (last + 1) // 2).view(torch.int32)
    return words[..., first % 2 : first % 2 + shape[-1]]


def _mix_axis(words: Tensor, first: int, last: int) -> Tensor:
    """Hashes (...) and indices [first, last) of one more axis: (... last - first)."""
    return _mix(words[..., None] + torch.arange(first + 1, last + 1, device=words.device) * _signed(GOLDEN))


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer of every element, in place. The masks make torch's arithmetic shift a logical one."""
    for shift, factor in ROUNDS:
        words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    words ^= (words >> LAST_SHIFT).bitwise_and_((1 << (64 - LAST_SHIFT)) - 1)
    return words


def _mix_number(word: int) -> int:
    """`_mix` of one number on the host."""
    word %= 2**64
    for shift, factor in ROUNDS:
        word = (word ^ word >> shift) * factor % 2**64
    return word ^ word >> LAST_SHIFT


@cache
def _site_number(site: str) -> int:
    return int.from_bytes(blake2b(site.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return (word + 2**63) % 2**64 - 2**63
