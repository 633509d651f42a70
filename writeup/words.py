"""Sentences that are chosen from the data, so that a commentary is true on any machine."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import median

from benchmarks.records import Record
from writeup.cells import median_ms, quartiles


def joined(parts: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    *most, end = list(parts)
    return f"{', '.join(most)} {last} {end}" if most else end


def times(factor: float) -> str:
    """A factor as one would say it: `1.3 times`, `12 times`; `1.02 times`, where one digit more matters."""
    return f"{factor:.{3 if factor < 1.1 else 2}g} times" if factor < 10 else f"{factor:,.0f} times"


def differ(a: Record, b: Record) -> bool:
    """Whether the quartiles of two records' samples lie apart, so that a difference may be stated."""
    low_a, high_a = quartiles(a.samples_ms)
    low_b, high_b = quartiles(b.samples_ms)
    return high_a < low_b or high_b < low_a


def faster(name_a: str, a: Record, name_b: str, b: Record) -> str:
    """Which of two is faster, and by how much: a clause without a full stop. Where quartiles overlap it says so."""
    if not differ(a, b):
        low, high = sorted([median_ms(a), median_ms(b)])
        return f"{name_a} and {name_b} cannot be told apart (medians {high / low - 1:.0%} apart, quartiles overlap)"
    first, second, factor = name_a, name_b, median_ms(b) / median_ms(a)
    if factor < 1:
        first, second, factor = name_b, name_a, 1 / factor
    return f"{first} is {times(factor)} as fast as {second}"


def from_which(
    name_a: str, a: Mapping[float, Record], name_b: str, b: Mapping[float, Record], what: str = "{:,g}"
) -> str:
    """From which size on `name_a` is faster than `name_b`: a clause over all sizes that both have."""
    sizes = sorted(a.keys() & b.keys())
    if not sizes:
        return f"{name_a} and {name_b} were not measured at the same size"
    wins = [median_ms(a[size]) < median_ms(b[size]) and differ(a[size], b[size]) for size in sizes]
    loses = [median_ms(a[size]) > median_ms(b[size]) and differ(a[size], b[size]) for size in sizes]
    if all(wins):
        return f"{name_a} is faster than {name_b} at every size measured"
    if all(loses):
        return f"{name_b} is faster than {name_a} at every size measured"
    if not any(wins) and not any(loses):
        return f"{name_a} and {name_b} cannot be told apart at any size measured"
    for place, size in enumerate(sizes):
        if all(wins[place:]) and not any(wins[:place]):
            return f"{name_a} is faster than {name_b} from {what.format(size)} on, and not below"
        if all(loses[place:]) and not any(loses[:place]):
            return f"{name_b} is faster than {name_a} from {what.format(size)} on, and not below"
    won = joined(what.format(size) for size, win in zip(sizes, wins, strict=True) if win) if any(wins) else "no size"
    lost = joined(what.format(size) for size, lose in zip(sizes, loses, strict=True) if lose) if any(loses) else "none"
    return f"{name_a} is faster than {name_b} at {won}, slower at {lost}"


def prediction_error(pairs: Sequence[tuple[float, float]]) -> str:
    """How far predictions are off: `(predicted, measured)` pairs as a clause, with the median and range of ratios."""
    if not pairs:
        return "nothing was measured"
    ratios = sorted(predicted / measured for predicted, measured in pairs)
    middle = median(ratios)
    where = f"lies {abs(middle - 1):.0%} {'below' if middle < 1 else 'above'}" if abs(middle - 1) >= 0.005 else "equals"
    return f"the prediction {where} the measurement in the median ({ratios[0]:.2f} to {ratios[-1]:.2f} of it)"


def span(values: Iterable[float], form: str = "{:.2g}") -> str:
    """`2.7 to 3.1`, from the least to the greatest; one number where both look the same."""
    ordered = sorted(values)
    low, high = form.format(ordered[0]), form.format(ordered[-1])
    return low if low == high else f"{low} to {high}"


def apart(a: Record, b: Record) -> str:
    """That two records were not measured one after the other, as a sentence; nothing if they were."""
    first, second = (datetime.fromisoformat(str(each.environment["date"])) for each in (a, b))
    minutes = abs((second - first).total_seconds()) / 60
    if minutes < 30:
        return ""
    span = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    return f"The two were measured {span} apart, not in turn: what else the machine did then is part of the difference."
