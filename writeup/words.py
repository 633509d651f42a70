"""Sentences that are generated from the data, so that a commentary is true on any machine."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import comb
from statistics import median

from benchmarks.records import Record
from writeup.cells import median_ms, predicted_ms, quartiles


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


def differ(a: Record, b: Record) -> bool:
    """True if a difference in time may be stated.

    Of pairs: the quartiles of their ratios exclude 1, and chance puts as many on one side in at most one of ten
    cases (sign test). Otherwise: measured within half an hour, no sample of one lies among the other's, and
    there are four of each (a permutation does that in one of 35 cases).
    """
    if in_turn(a, b):
        ratios = pair_ratios(a, b)
        low, high = quartiles(ratios)
        return (low > 1 or high < 1) and _by_chance(ratios) <= 0.1
    if hours_apart(a, b) > 0.5 or min(len(a.samples_ms), len(b.samples_ms)) < 4:
        return False
    return max(a.samples_ms) < min(b.samples_ms) or max(b.samples_ms) < min(a.samples_ms)


def turns(ratios: Sequence[float], name: str = "") -> str:
    """`4 of 5 turns` in which the first of two took longer, or less; with a name, `A slower in 4 of 5 turns, ...`."""
    above, count = sum(ratio > 1 for ratio in ratios), len(ratios)
    most = max(above, count - above)
    if not name:
        return f"{most} of {count} turns"
    side = "slower" if most == above else "faster"
    return f"{name} was {side} in {most} of {count} turns (ratio {median(ratios):.2f} in the median)"


def _by_chance(ratios: Sequence[float]) -> float:
    """Probability that this many ratios, or more, lie on one side of 1 if both sides are equally likely."""
    above = sum(ratio > 1 for ratio in ratios)
    most, count = max(above, len(ratios) - above), len(ratios)
    return min(1.0, 2 * sum(comb(count, k) for k in range(most, count + 1)) / 2**count)


def hours_apart(a: Record, b: Record) -> float:
    """Hours between the beginnings of two runs."""
    first, second = (datetime.fromisoformat(str(each.environment["date"])) for each in (a, b))
    return abs((second - first).total_seconds()) / 3600


def faster(name_a: str, a: Record, name_b: str, b: Record) -> str:
    """State the faster of two, and by how much: a clause without a full stop, which says so if it cannot be told."""
    if hours_apart(a, b) > 0.5:
        return f"{name_a} and {name_b} were not measured together ({_hours(a, b)} apart), so they are not compared"
    ratios = pair_ratios(a, b)
    if differ(a, b) and abs(median(ratios) - 1) < 0.01:
        return f"{name_a} and {name_b} take the same time, within 1%"
    if not differ(a, b):
        return f"{name_a} against {name_b} is undecided: {turns(ratios, name_a)}"
    first, second, factor = name_b, name_a, median(ratios)
    if factor < 1:
        first, second, factor = name_a, name_b, 1 / factor
    return f"{first} is {times(factor)} as fast as {second}"


def from_which(
    name_a: str, a: Mapping[float, Record], name_b: str, b: Mapping[float, Record], what: str = "{:,g}"
) -> str:
    """State the size from which on `name_a` is faster than `name_b`: a clause over all sizes that both have."""
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
        return f"{name_a} against {name_b} is undecided at every size measured"
    for place, size in enumerate(sizes):
        if all(wins[place:]) and not any(wins[:place]):
            return f"{name_a} is faster than {name_b} from {what.format(size)} on, and not below"
        if all(loses[place:]) and not any(loses[:place]):
            return f"{name_b} is faster than {name_a} from {what.format(size)} on, and not below"
    won = joined(what.format(size) for size, win in zip(sizes, wins, strict=True) if win) if any(wins) else "no size"
    lost = joined(what.format(size) for size, lose in zip(sizes, loses, strict=True) if lose) if any(loses) else "none"
    return f"{name_a} is faster than {name_b} at {won}, slower at {lost}"


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


def _hours(a: Record, b: Record) -> str:
    hours = hours_apart(a, b)
    return f"{60 * hours:.0f} minutes" if hours < 2 else f"{hours:.0f} hours"
