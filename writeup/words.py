"""Sentences that are generated from the data, so that a commentary is true on any machine."""

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.records import Record
from writeup.cells import median_ms, predicted_ms


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


def prediction_error(pairs: Sequence[tuple[float, float]]) -> str:
    """Error of predictions: `(predicted, measured)` pairs as a clause, with the median and range of ratios."""
    if not pairs:
        return "nothing was measured"
    ratios = sorted(predicted / measured for predicted, measured in pairs)
    middle = median(ratios)
    return f"predicted over measured time is {middle:.2f} in the median, {ratios[0]:.2f} to {ratios[-1]:.2f} over all"


def error_of(records: Iterable[Record]) -> str:
    """`prediction_error` of the times of those records that were measured and have a prediction."""
    timed = [record for record in records if record.status == "ok"]
    pairs = ((predicted_ms(record), median_ms(record)) for record in timed)
    return prediction_error([(said, measured) for said, measured in pairs if said is not None])


def span(values: Iterable[float], form: str = "{:.2g}") -> str:
    """`2.7 to 3.1`, from the least to the greatest; one number where both look the same."""
    ordered = sorted(values)
    low, high = form.format(ordered[0]), form.format(ordered[-1])
    return low if low == high else f"{low} to {high}"
