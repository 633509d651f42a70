"""Rules for impossible figures, and for figures that contradict their neighbours: one function each, on plain values.

So a rule is the same for our records and for published figures. Each returns its reason in words, or nothing where the
figure may stand. A reason says that the figure is not what its label says, not that someone was careless.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp, hypot, log, sqrt
from statistics import median

from benchmarks.harness import CACHED_BYTES, SLACK
from cs336_systems.host.console import format_seconds

# Half of a decimal place on a logarithmic scale: a figure further than this from where it belongs would be nearer to it
# with its point one place further left or right.
MISPLACED = sqrt(10)
DECADES = 100  # sizes must span two decades before a time that stays the same says anything
SIGN_TEST = 5  # that many out of so many go one way by chance once in 32 times
STANDARD_ERRORS = 3  # apart, and chance gives such a difference once in 370 times


def over_link(nbytes: float, ranks: int, seconds: float, bandwidth: float) -> str:
    """An all-reduce above the link's bandwidth (bytes/s out of one accelerator).

    Whatever the algorithm, a rank must send all of its own numbers once, even if the switch adds them up. A ring sends
    2 (n - 1)/n times as much, the bus bandwidth. Faster than that: the timer stopped when the work had only started.
    """
    rate, bus = nbytes / seconds, 2 * (ranks - 1) / ranks * nbytes / seconds
    if ranks < 2 or rate <= SLACK * bandwidth:
        return ""
    return (
        f"{_rate(rate)} would have to leave every rank (bus bandwidth {_rate(bus)}), {rate / bandwidth:.1f} times what "
        f"the link carries, {_rate(bandwidth)}"
    )


def over_memory(nbytes: float, seconds: float, bandwidth: float) -> str:
    """An operation above the memory's bandwidth (bytes/s), of at least `nbytes` read and written: an element-wise
    operator or a norm must read its input and write its output once. Sizes that may stay in a cache are accepted."""
    if nbytes < CACHED_BYTES or nbytes / seconds <= SLACK * bandwidth:
        return ""
    return (
        f"at least {_rate(nbytes / seconds)} to and from memory, {nbytes / seconds / bandwidth:.1f} times what it "
        f"gives, {_rate(bandwidth)}"
    )


def over_peak(flops: float, seconds: float, peak: float) -> str:
    """More FLOP/s than the hardware's matrix units have (`peak`, dense)."""
    if flops / seconds <= SLACK * peak:
        return ""
    return f"{flops / seconds / 1e12:,.3g} TFLOP/s, where the hardware has {peak / 1e12:,.3g}"


def no_growth(times: Mapping[float, float], bandwidth: float) -> str:
    """A time (s) that does not grow with the size (bytes) that it moves.

    A transfer takes a start-up and its bytes over the bandwidth. The smallest size shows the start-up. If the largest
    at full bandwidth needs at least as long again, its time must be double: a shorter one was not waited for.
    """
    small, large = min(times), max(times)
    if large < DECADES * small or large / bandwidth < times[small] or times[large] >= 2 * times[small]:
        return ""
    return (
        f"{large / small:,.0f} times the bytes in {times[large] / times[small]:.2f} times the time: the "
        "timer stopped at the start of the transfer, not at its end"
    )


def repeats(part: Sequence[tuple[float, float]], whole: Sequence[tuple[float, float]]) -> str:
    """A table with the figures of another, which it should add to; each (value, worth of its last printed digit).

    Two measurements of even the same thing differ in their third digit more often than not; figures of a pass and of
    that pass with the next one must differ.
    """
    same = sum(
        abs(one - other) <= 0.5001 * max(digit, finer) for (one, digit), (other, finer) in zip(part, whole, strict=True)
    )
    if len(part) < SIGN_TEST or 2 * same < len(part):
        return ""
    return f"{same} of {len(part)} figures are those of the forward pass, to the last digit printed there"


def not_slower(part: float, whole: float) -> str:
    """Forward and backward together that take no longer than forward alone (s)."""
    return "" if whole > part else f"no slower than its forward pass alone, {format_seconds(part)}"


def misplaced(points: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Figures ten times away from their neighbours: what is expected, by index into (size, value), ordered by size.

    A power law through the two neighbours, sqrt(10) being the limit. The worst goes first and is taken out, since it
    would also make its neighbours look wrong. The ends have no second neighbour and are let pass.
    """
    left, found = list(range(len(points))), {}
    while len(left) > 2:
        ratios = {}
        for before, index, after in zip(left, left[1:], left[2:], strict=False):
            expected = _between(points[before], points[after], points[index][0])
            ratios[index] = abs(log(points[index][1] / expected)), expected
        worst = max(ratios, key=lambda index: ratios[index])
        if ratios[worst][0] <= log(MISPLACED):
            break
        found[worst] = ratios[worst][1]
        left.remove(worst)
    return found


def _between(low: tuple[float, float], high: tuple[float, float], at: float) -> float:
    share = log(at / low[0]) / log(high[0] / low[0])
    return exp(log(low[1]) * (1 - share) + log(high[1]) * share)


def smaller_yet_slower(points: Sequence[tuple[float, float, float]]) -> dict[int, str]:
    """Neighbours (size, mean, standard deviation), ordered by size, of which the larger takes less: by index of the
    smaller. The difference must be beyond chance, three standard deviations of it."""
    found = {}
    for index, ((_, mean, std), (_, next_mean, next_std)) in enumerate(pairwise(points)):
        apart = (mean - next_mean) / (hypot(std, next_std) or float("inf"))
        if apart > STANDARD_ERRORS:
            found[index] = (
                f"slower than the next larger one, {format_seconds(next_mean)}, by {apart:.0f} standard deviations"
            )
    return found


def always_faster(pairs: Sequence[tuple[float, float]]) -> str:
    """The same work with less in its way (ranks on one node) and with more (on two), as pairs of times: the second may
    be faster by chance, in one of two tries at most; in all of five it is not chance (a sign test)."""
    if len(pairs) < SIGN_TEST or any(second >= first for first, second in pairs):
        return ""
    return f"faster in all of {len(pairs)} rows, though the same work crosses a slower link"


def deviation_over_mean(mean: float, std: float) -> str:
    """A standard deviation above the mean. Times are positive, so few samples far above the rest made it, as when the
    first ones hold a start-up: the mean is then of two things."""
    return "" if std <= mean else f"a standard deviation of {std / mean:.0%} of the mean: few samples hold most of it"


def slow_start(samples: Sequence[float]) -> str:
    """A first sample sqrt(10) times the median of the others and above each of them: it holds a start-up, and the mean
    with it. The median is not affected."""
    if len(samples) < 3 or samples[0] <= max(samples[1:]) or samples[0] <= MISPLACED * median(samples[1:]):
        return ""
    return f"its first sample took {samples[0] / median(samples[1:]):.1f} times the median of the others"


def narrow_above_wide(wide: float, narrow: float) -> str:
    """Memory (bytes) with 16-bit numbers beside the same with 32. At worst autocast keeps all that it reads twice, and
    the copy in 16 bits is half as large: half as much again."""
    if narrow <= SLACK * 1.5 * wide:
        return ""
    return f"{narrow / wide:.2f} times what 32 bits need: even a 16-bit copy of everything would make it 1.5 times"


def _rate(bytes_per_second: float) -> str:
    scale, unit = (1e12, "TB/s") if bytes_per_second >= 1e12 else (1e9, "GB/s")
    return f"{bytes_per_second / scale:,.3g} {unit}"
