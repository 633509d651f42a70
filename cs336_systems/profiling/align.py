"""Match collectives across ranks, derive each rank's clock offset from them, and shift all traces to one clock.

Our annotations match by group and number. A backend's spans (gloo's on its threads, NCCL's on a GPU) have neither: the
k-th of a name and shape on one rank matches the k-th on the others, since collectives of a group run in order. Spans
that could belong to several groups are not matched.

An offset is the middle of the interval that collectives allow (`_most_ahead`), its bound half of the width. Ranks on
one host read one clock, unless collectives contradict: two machines may share a host's name.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from cs336_systems.profiling.collectives import CONVERSION, transfers
from cs336_systems.profiling.intervals import Interval
from cs336_systems.profiling.names import LINE_UP, parse_collective
from cs336_systems.profiling.trace import Span, Trace, once

# No rank leaves these before all have entered. Not so a broadcast, or an all-to-all where two send each other nothing.
JOINING = re.compile(r"all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|barrier", re.IGNORECASE)
ONE_CLOCK = (-2 * CONVERSION, 2 * CONVERSION)  # offsets that may be seen between ranks that read one clock
POINT_TO_POINT = re.compile(r":(i?send|i?recv)|SendRecv", re.IGNORECASE)
MESSAGES = ("send", "receive")  # their numbers are those of a pair of ranks, which the annotation does not name
DRIFT = 10_000  # nanoseconds in which two clocks may drift apart by one


@dataclass
class Matched:
    """One collective as several ranks saw it."""

    key: str
    spans: dict[int, Span]  # by rank: the span in which it joined
    waits: dict[int, Span] = field(default_factory=dict)  # our annotations, if waiting blocks a thread: not with NCCL
    joins: bool = False  # no rank can leave before all have entered

    def leaving(self, rank: int) -> Span | None:
        """The span at whose end the collective is over for the rank; None if the trace does not show it."""
        return self.waits.get(rank) if parse_collective(self.spans[rank].name) else self.spans[rank]


@once
def match(traces: list[Trace]) -> list[Matched]:
    """The collectives in the traces of at least two ranks, in order of the earliest start."""
    if len(traces) < 2:
        return []
    met = {trace.rank: span for trace in traces for span in trace.spans if span.category == LINE_UP}
    every = [Matched(LINE_UP, met, met, joins=True), *_annotated(traces), *_of_backend(traces)]
    found = [each for each in every if len(each.spans) > 1]
    return sorted(found, key=lambda each: (min(span.start for span in each.spans.values()), each.key))


def _annotated(traces: list[Trace]) -> Iterable[Matched]:
    found: dict[tuple[str, str], Matched] = {}
    for trace in traces:
        ranks = {name: members for name, members in _groups(trace) if name}
        nccl = any(span.name.startswith("nccl:") for span in trace.annotated)
        blocking = not nccl and not any(span.category == "kernel" for span in transfers(trace))
        # Calls of torch.distributed; an empty tensor is not sent.
        sent = sorted((str(s.lane), s.start) for s in trace.spans if s.name.startswith("c10d::") and _filled(s))
        for about, span in (each for each in trace.collectives if each[0].verb not in MESSAGES):
            key = about.key, ranks.get(about.group, "")  # halves of a split may share a name
            matched = found.setdefault(key, Matched(about.key, {}, joins=True))
            if about.action == "launch":
                matched.spans.setdefault(trace.rank, span)
                first, last = (bisect_left(sent, (str(span.lane), time)) for time in (span.start, span.end))
                matched.joins &= bool(JOINING.search(about.verb)) and first < last
            elif blocking:
                matched.waits.setdefault(trace.rank, span)
    return found.values()


def _groups(trace: Trace) -> list[tuple[str, str]]:
    """(name, ranks) of the groups of a rank that have several ranks; a group without a name has an empty one."""
    groups = trace.chrome.get("distributedInfo", {}).get("pg_config", [])
    everyone = list(range(trace.world_size))  # an empty list stands for all
    found = [(each.get("pg_name", ""), each.get("ranks") or everyone) for each in groups if isinstance(each, dict)]
    return list(dict.fromkeys((str(name), str(ranks)) for name, ranks in found if len(ranks) > 1))


def _filled(span: Span) -> bool:
    """True unless one of its tensors is known to be empty."""
    return not re.search(r"\[0[\],]| 0[\],]", str(span.args.get("Input Dims", "")))


def _of_backend(traces: list[Trace]) -> Iterator[Matched]:
    found: dict[tuple[str, str, str, str], dict[int, list[Span]]] = {}
    for trace in traces:
        groups = _groups(trace)
        for span in (span for span in transfers(trace) if not POINT_TO_POINT.search(span.name)):
            if name := span.args.get("Process Group Name"):
                group = f"{name} {span.args.get('Process Group Ranks', '')}"  # halves of a split may share a name
            elif len(groups) > 1:
                continue
            else:
                group = groups[0][1] if groups else ""
            about = (("Input Dims", "In msg nelems"), ("Input type", "dtype"))
            shape, kind = (str(span.args.get(a, span.args.get(b)) or "").replace("'", "") for a, b in about)
            found.setdefault((span.name, shape, kind, group), {}).setdefault(trace.rank, []).append(span)
    for (name, shape, kind, _), by_rank in found.items():
        counts = set(map(len, by_rank.values()))
        for k in range(min(counts)):
            spans = {rank: each[k] for rank, each in by_rank.items()}
            sure = len(counts) == 1 and JOINING.search(name) and all(map(_filled, spans.values()))
            yield Matched(" ".join(f"{name.split('(')[0]} {shape} {kind} #{k}".split()), spans, joins=bool(sure))


class Alignment(NamedTuple):
    """This rank's clock is `nanoseconds` ahead of the first rank's, within +- `bound`; None if it is not known."""

    nanoseconds: int
    bound: int | None
    source: str


@once
def offsets(traces: list[Trace]) -> dict[int, Alignment]:
    """Every rank's clock against that of the lowest rank present, by rank."""
    if not traces:
        return {}
    first, *others = sorted(traces, key=lambda trace: trace.rank)
    collectives = _from_collectives(match(traces), first.rank)
    result = {first.rank: Alignment(0, 0, "reference")}
    for trace in others:
        bounds, source = collectives.get(trace.rank), "collectives"
        if first.host and first.host == trace.host:
            low, high = bounds or ONE_CLOCK
            low, high = max(low, ONE_CLOCK[0]), min(high, ONE_CLOCK[1])
            if low <= high:
                bounds, source = (low, high), "collectives, same host" if bounds else "same host"
            else:
                source = "collectives; contradicted: same host"
        result[trace.rank] = Alignment(0, None, "nothing: taken to agree")
        if bounds:
            result[trace.rank] = Alignment(sum(bounds) // 2, (bounds[1] - bounds[0] + 1) // 2, source)
    return result


def _from_collectives(matches: list[Matched], first: int) -> dict[int, Interval]:
    """Bounds of every clock against the first rank's, for the ranks that collectives connect to it."""
    sure = [matched for matched in matches if matched.joins]
    mine = [each.spans[first] for each in sure if first in each.spans]
    lasted = max((span.end for span in mine), default=0) - min((span.start for span in mine), default=0)
    # Spans of a backend are matched by counting, which may be one off: then only our own are used.
    for drift, believed in product((0, lasted // DRIFT), (sure, [matched for matched in sure if matched.waits])):
        ahead = _most_ahead(believed, drift)
        if ahead and all(ahead[a, b] >= 0 for a, b in ahead if a == b):
            return {b: (-ahead[b, a], ahead[a, b]) for a, b in ahead if a == first != b and (b, a) in ahead}
    return {}


def _most_ahead(matches: list[Matched], drift: int) -> dict[tuple[int, int], int]:
    """Upper bound, for ranks (a, b), of how far b's clock is ahead of a's, which changes by `drift` at most.

    No rank leaves an all-reduce before all have entered it: if a's span starts at start_a and b's ends at end_b, each
    on its own clock, clock_b - clock_a <= end_b - start_a. The tightest bounds that follow are the shortest paths
    between ranks (Floyd and Warshall), even between ranks that share no collective.
    """
    ahead: dict[tuple[int, int], int] = {}
    for matched in matches:
        for a, b in product(matched.spans, matched.spans):
            if a != b and (leaving := matched.leaving(b)):
                weight = leaving.end - matched.spans[a].start + drift
                ahead[a, b] = min(ahead.get((a, b), weight), weight)
    ranks = sorted({rank for pair in ahead for rank in pair})
    for via, a, b in product(ranks, ranks, ranks):
        if (a, via) in ahead and (via, b) in ahead:
            around = ahead[a, via] + ahead[via, b]
            ahead[a, b] = min(ahead.get((a, b), around), around)
    return ahead


@once
def aligned(traces: list[Trace]) -> list[Trace]:
    """Shift the traces to the clock of the lowest rank present, by `offsets`."""
    known = offsets(traces)
    return [_shifted(trace, ahead) if (ahead := known[trace.rank].nanoseconds) else trace for trace in traces]


def _shifted(trace: Trace, ahead: int) -> Trace:
    marks, flows = [[time - ahead, *rest] for time, *rest in trace.ours.get("marks", ())], trace.flows.items()
    return replace(
        trace,
        spans=[span._replace(start=span.start - ahead, end=span.end - ahead) for span in trace.spans],
        allocations=[each._replace(time=each.time - ahead) for each in trace.allocations],
        flows={key: [[(lane, time - ahead) for lane, time in each] for each in ends] for key, ends in flows},
        ours=trace.ours | ({"marks": marks} if marks else {}),
        base=trace.base - ahead,
    )
