"""A thousand hundredths: where half precision loses a sum, and why only the accumulator matters."""

import struct
from collections.abc import Callable
from math import floor, log2

from cs336_systems.cost.course.answers import Answer, Question, Step, Symbol, given, quantity, require
from cs336_systems.errors import UserError


def half(x: float) -> float:
    """The nearest fp16 number, ties to even."""
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


def single(x: float) -> float:
    """The nearest fp32 number, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def accumulate(addend: float, times: int, rounded: Callable[[float], float]) -> float:
    """`times` additions to zero, each rounded. The exact sum of two fp16 or fp32 numbers is a double's, so one rounding
    is what the hardware does."""
    total = 0.0
    for _ in range(times):
        total = rounded(total + addend)
    return total


_ACCUMULATION = Question(
    "accumulation",
    "Which part of a sum must be precise?",
    (2024, 2025, 2026),
    ("mixed_precision_accumulation",),
    "Add x n times: all in fp32, all in fp16, and fp16 numbers into an fp32 total. Which loses what?",
    assumed=("Each addition is exact and then rounded to the total's format, to nearest, ties to even.",),
    departures=("bf16 has 8 bits and is eight times as coarse; tensor cores multiply 16-bit numbers and add in fp32.",),
)


def accumulation(x: float = 0.01, n: int = 1000) -> Answer:
    """The sum of n times x with fp32 and fp16 addends and accumulators.

    Raises UserError if fp16 cannot hold x or the total, or if n is too large to add up one by one.
    """
    words = f"accumulation: x = {given(x)} must be from 6e-8 to 65504, which fp16 can hold"
    require(x < 65_520 and half(x) != 0, words)
    require(n <= 10**6, f"accumulation: n must be at most {10**6}, not {given(n)}")
    try:
        total = accumulate(half(x), n, half)
    except OverflowError:
        raise UserError(f"accumulation: {n} times {given(x)} pass 65504, the largest fp16 number") from None
    sums = {
        "single_single": accumulate(single(x), n, single),
        "half_half": total,
        "single_half": accumulate(half(x), n, single),
    }
    spacing, stall = 2.0 ** max(floor(log2(total)) - 10, -24), _stall(half(x))
    missed = abs(sums["single_half"] - n * x), abs(total - n * x)
    return Answer(
        _ACCUMULATION,
        (
            Symbol("x", "what is added", x),
            Symbol("n", "how often", n),
        ),
        (
            Step("Without rounding", "n x", "exact", n * x, "decimals"),
            Step("fp32 into fp32", "", "single_single", sums["single_single"], "decimals"),
            Step("x in fp16 is off by", "", "half_error", half(x) - x),
            Step("so fp16 into fp32 is off by n times that, and by fp32's own roundings", "n (x₁₆ - x)",
                 "single_error", n * (half(x) - x)),
            Step("fp16 into fp32, whether cast before or in the addition", "", "single_half", sums["single_half"],
                 "decimals"),
            Step("fp16 has 11 bits: near the total its numbers are apart by", "2^(⌊log₂ total⌋ - 10)", "spacing",
                 spacing),
            Step("so every addition there is rounded by up to half of it", "", "half_spacing", spacing / 2),
            Step("fp16 into fp16", "", "half_half", sums["half_half"], "decimals"),
            Step("With enough terms it passes 65504, the largest fp16 number") if stall is None else
            Step("With enough terms it stops growing where x is at most half of the spacing", "", "stops_at", stall),
        ),
        f"fp16 terms in fp32 miss by {quantity(missed[0])}, fp16 throughout by {quantity(missed[1])}: "
        f"{_lesson(*missed)}.",
    )  # fmt: skip


def _lesson(single_total: float, half_total: float) -> str:
    """What the misses of the two totals of fp16 terms say."""
    if half_total > single_total:
        return "it is the accumulator that must be precise"
    return "as much" if half_total == single_total else "less, since roundings happen to cancel"


def _stall(addend: float) -> float | None:
    """Where an fp16 total no longer grows; None if it overflows first."""
    total = 0.0
    try:
        while (after := half(total + addend)) != total:
            total = after
    except OverflowError:
        return None
    return total
