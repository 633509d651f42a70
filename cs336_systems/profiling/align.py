"""One clock for all ranks: how far each rank's is ahead of the first's, and traces shifted onto it.

Three witnesses, the surest first:

1. Collectives. Nobody leaves an all-reduce before everybody has entered it. So if rank a's span starts at start_a and
   rank b's ends at end_b, each on its own clock, then clock_b - clock_a <= end_b - start_a. All collectives together
   hold every difference inside an interval. Chained over ranks (a shortest path), that reaches also those which never
   meet the first rank (Lamport, Time, clocks, and the ordering of events, 1978, gives the order behind it).
2. The ping-pong that `Capture` makes before it starts (`comm/clock.py`).
3. Ranks on one host read one clock.

Intervals that overlap are intersected. One that contradicts a surer witness is dropped: collectives speak of the very
times in the trace, while a clock may be set anew after a ping-pong, and a host's name may be shared by two machines.
The middle of what is left is the offset, half its width the bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cs336_systems.profiling.matching import Matched, match
from cs336_systems.profiling.memo import of_ranks
from cs336_systems.profiling.trace import Link, Span, Trace

# torch.profiler counts a processor's ticks and converts them. Its times were seen to miss the clock by up to 15 us.
CONVERSION = 15_000  # nanoseconds

Interval = tuple[int, int]


@dataclass(frozen=True)
class Alignment:
    """This rank's clock is `nanoseconds` ahead of the first rank's, give or take `bound`; None if nobody can tell."""

    nanoseconds: int
    bound: int | None
    source: str


def offsets(traces: Iterable[Trace]) -> dict[int, Alignment]:
    """Every rank's clock against that of the lowest rank there is, by rank."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    return of_ranks(traces, "offsets", lambda: _offsets(traces)) if traces else {}


def _offsets(traces: list[Trace]) -> dict[int, Alignment]:
    first, joint = traces[0], _joint(match(traces), traces[0].rank)
    result = {first.rank: Alignment(0, 0, "reference")}
    for trace in traces[1:]:
        witnesses = [
            ("collectives", joint.get(trace.rank)),
            ("ping-pong", _ping_pong(first, trace)),
            ("same host", (-2 * CONVERSION, 2 * CONVERSION) if first.host and first.host == trace.host else None),
        ]
        result[trace.rank] = _judge(witnesses)
    return result


def _judge(witnesses: list[tuple[str, Interval | None]]) -> Alignment:
    agreed: Interval | None = None
    heard, dropped = [], []
    for name, interval in witnesses:
        if interval is None:
            continue
        low, high = (max(agreed[0], interval[0]), min(agreed[1], interval[1])) if agreed else interval
        if low <= high:
            agreed = (low, high)
            heard.append(name)
        else:
            dropped.append(name)
    if agreed is None:
        return Alignment(0, None, "nothing: taken to agree")
    source = ", ".join(heard) + (f"; contradicted: {', '.join(dropped)}" if dropped else "")
    return Alignment((agreed[0] + agreed[1]) // 2, (agreed[1] - agreed[0] + 1) // 2, source)


def _ping_pong(first: Trace, trace: Trace) -> Interval | None:
    """What was measured when the traces began, each against rank 0."""
    if not (_measured(first) and _measured(trace)):
        return None
    offset = int(trace.ours["clock_offset_ns"]) - int(first.ours["clock_offset_ns"])
    bound = int(trace.ours["clock_bound_ns"]) + int(first.ours["clock_bound_ns"]) + 2 * CONVERSION
    return offset - bound, offset + bound


def _measured(trace: Trace) -> bool:
    """A bound of nothing stands for no ping-pong at all, except at rank 0, whose clock is the measure."""
    there = "clock_offset_ns" in trace.ours and "clock_bound_ns" in trace.ours
    return there and (trace.rank == 0 or trace.ours["clock_bound_ns"] > 0)


def _joint(matches: list[Matched], first: int) -> dict[int, Interval]:
    """Between what every rank's clock is ahead of the first's, for those that collectives join to it."""
    sure = [matched for matched in matches if matched.joins]
    # Spans of a backend are matched by counting, which may be one off: then ours alone are believed.
    for believed in (sure, [matched for matched in sure if matched.waits]):
        ahead = _most_ahead(believed)
        if all(ahead[a, b] >= 0 for a, b in ahead if a == b):
            return {b: (-ahead[b, a], ahead[a, b]) for a, b in ahead if a == first != b and (b, a) in ahead}
    return {}


def _most_ahead(matches: list[Matched]) -> dict[tuple[int, int], int]:
    """For ranks (a, b) how far b's clock is ahead of a's at most.

    These are difference constraints, clock_b - clock_a <= weight; the tightest that follow from all of them together
    are the shortest paths between every two ranks, here by Floyd and Warshall's algorithm (Cormen et al., Introduction
    to Algorithms, chapters on shortest paths).
    """
    ahead: dict[tuple[int, int], int] = {}
    for matched in matches:
        leaving = {rank: span.end for rank in matched.spans if (span := matched.leaving(rank))}
        for a, span in matched.spans.items():
            for b, end in leaving.items():
                if a != b:
                    ahead[a, b] = min(ahead.get((a, b), end - span.start), end - span.start)
    ranks = sorted({rank for pair in ahead for rank in pair})
    for via in ranks:
        for a in ranks:
            for b in ranks:
                if (a, via) in ahead and (via, b) in ahead:
                    around = ahead[a, via] + ahead[via, b]
                    ahead[a, b] = min(ahead.get((a, b), around), around)
    return ahead


def aligned(traces: Iterable[Trace]) -> list[Trace]:
    """The traces on the clock of the lowest rank there is, as `offsets` tells it."""
    traces, known = list(traces), offsets(traces)
    return of_ranks(traces, "aligned", lambda: [_shifted(trace, known[trace.rank].nanoseconds) for trace in traces])


def _shifted(trace: Trace, ahead: int) -> Trace:
    if not ahead:
        return trace
    ours = dict(trace.ours)
    if "clock_offset_ns" in ours:
        ours["clock_offset_ns"] = int(ours["clock_offset_ns"]) - ahead
    if "marks" in ours:
        ours["marks"] = [[time - ahead, *rest] for time, *rest in ours["marks"]]
    return replace(
        trace,
        spans=[_earlier(span, ahead) for span in trace.spans],
        allocations=[replace(each, time=each.time - ahead) for each in trace.allocations],
        links=[
            Link((link.source[0], link.source[1] - ahead), (link.target[0], link.target[1] - ahead))
            for link in trace.links
        ],
        ours=ours,
        base=trace.base - ahead,
    )


def _earlier(span: Span, ahead: int) -> Span:
    return Span(span.name, span.category, span.start - ahead, span.end - ahead, span.lane, span.args)
