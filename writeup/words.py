"""Words for sentences and cells: lists, factors and spans; and the ratios of two records that took turns."""

from collections.abc import Iterable

from benchmarks.records import Record
from writeup.cells import median_ms


def joined(parts: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    *most, end = list(parts)
    return f"{', '.join(most)} {last} {end}" if most else end


def times(factor: float) -> str:
    """A factor as one would say it: `1.3 times`, `12 times`; `1.02 times`, where one digit more matters."""
    return f"{factor:.{3 if factor < 1.1 else 2}g} times" if factor < 10 else f"{factor:,.0f} times"


def in_turn(a: Record, b: Record) -> bool:
    """True if two records come from one run of their benchmark, so that their samples are pairs."""
    same = a.benchmark == b.benchmark and a.environment["date"] == b.environment["date"]
    return same and len(a.samples_ms) == len(b.samples_ms) > 1


def pair_ratios(a: Record, b: Record) -> list[float]:
    """The time of `a` over that of `b`, turn by turn; of their medians alone if they did not take turns."""
    if not in_turn(a, b):
        return [median_ms(a) / median_ms(b)]
    return [x / y for x, y in zip(a.samples_ms, b.samples_ms, strict=True)]


def span(values: Iterable[float], form: str = "{:.2g}") -> str:
    """`2.7 to 3.1`, from the least to the greatest; one number where both look the same."""
    ordered = sorted(values)
    low, high = form.format(ordered[0]), form.format(ordered[-1])
    return low if low == high else f"{low} to {high}"
