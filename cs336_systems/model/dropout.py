"""Dropout and random numbers that depend only on the place in the run: equal in all layouts and when recomputed.

Each element's number is a hash of (seed, step, row of the global batch, site, global position), as in counter-based
generators (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). A rank that computes a slice of an
activation draws the same slice of one global mask: rows in data parallelism, positions in sequence parallelism, heads
in tensor parallelism, layers in a pipeline, and all of it again in a recomputed forward.

The hash is SplitMix64's (Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), taken once for
each axis: hash = mix(hash + (index + 1) GOLDEN). It is integer arithmetic that wraps around, the same on every device.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.errors import UserError

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, factor


def dropout_key(seed: int, step: int, rows: Tensor) -> Tensor:
    """Make a microbatch's key for a step, int64 (batch,); `rows` (batch,) are its rows' numbers in the global batch."""
    words = _mix(torch.full_like(rows, _signed(seed + GOLDEN), dtype=torch.int64))
    words = _mix(words + _signed((step + 1) * GOLDEN))
    return _mix(words + (rows.long() + 1) * _signed(GOLDEN))


def drop(x: Tensor, p: float, key: Tensor | None, site: int | str, starts: Sequence[int | Tensor] = ()) -> Tensor:
    """Dropout of x (batch ...): a share p of its elements, chosen by place, is zero; the others are divided by 1 - p. x
    is a slice of a global tensor: `starts` are the global indices of its first element along the axes after batch (0
    for those left out), or of all elements along an axis before the last. `site` names the place in the model. Backward
    keeps one byte per element. The mask depends neither on dtype nor on device; p is exact to 2^-32. Without a key
    torch's generator draws the mask. Raises UserError for p outside [0, 1), a key of another number of rows, and starts
    that fit no axis."""
    if not 0 <= p < 1:
        raise UserError(f"dropout p must lie in [0, 1), not {p}")
    if p == 0 or key is None:
        return F.dropout(x, p) if p else x
    words = _words(x.shape, key, site, tuple(starts), x.device)
    keep = words >= min(round(p * 2**32) - 2**31, 2**31 - 1)
    return x * keep * (1 / (1 - p))  # a product with a bool keeps nothing but the bool for backward


def keyed_uniform(shape: Sequence[int], key: Tensor, site: int | str, device: torch.device) -> Tensor:
    """Make uniform numbers between 0 and 1 of a shape (batch ...), by place: float32, odd multiples of 2^-24. None is 0
    or 1, so log u and log(1 - u) are finite. Raises UserError for a key of another number of rows."""
    words = _words(shape, key, site, (), device)
    return ((words >> 9).float() + (2**22 + 0.5)) * 2**-23


def _words(
    shape: Sequence[int], key: Tensor, site: int | str, starts: tuple[int | Tensor, ...], device: torch.device
) -> Tensor:
    """Hash each place, int32 of the shape. Each axis is mixed in before the next makes the tensor larger."""
    if len(shape) < 2 or len(key) != shape[0]:
        raise UserError(f"random numbers of shape {tuple(shape)} with a key of {len(key)} rows: one a row is meant")
    if len(starts) >= len(shape) or min((each for each in starts if isinstance(each, int)), default=0) < 0:
        raise UserError(f"starts {starts} do not fit the axes after batch of shape {tuple(shape)}")
    starts += (0,) * (len(shape) - 1 - len(starts))
    *axes, first = starts
    assert isinstance(first, int)
    number = int.from_bytes(blake2b(str(site).encode(), digest_size=8).digest(), "little", signed=True)
    words = _mix(key.to(device) + number)
    # A word of 64 bits serves two neighbours of the last axis, its halves seen as int32.
    pairs = (first + shape[-1] + 1) // 2 - first // 2
    for start, extent in (*zip(axes, shape[1:], strict=False), (first // 2, pairs)):
        index = start if isinstance(start, Tensor) else torch.arange(start, start + extent, device=device)
        words = _mix(words[..., None] + (index + 1) * _signed(GOLDEN))
    return words.view(torch.int32)[..., first % 2 : first % 2 + shape[-1]]


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer of every element, in place. The masks make torch's arithmetic shift a logical one."""
    for shift, factor in ROUNDS:
        words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    return words


def _signed(word: int) -> int:
    """Convert a 64-bit word to the int64 with the same bits."""
    return (word + 2**63) % 2**64 - 2**63
