"""One trace for all ranks, a Chrome-trace JSON that Perfetto (https://ui.perfetto.dev) opens.

Clocks are aligned (`align.py`), every rank has its own processes with names (`lanes.py`), and arrows join what belongs
together: torch's own inside a rank, from forward to backward and from a launch to its kernel, and ours between ranks.
An arrow of a collective starts where the last rank joins it, the one that all others waited for, and ends where each
of the others gets away. It follows the cause, so with true clocks none of an all-reduce ever points back in time. (In a
broadcast only the source is waited for; an arrow there says no more than what belongs together.)
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from cs336_systems.errors import UserError
from cs336_systems.profiling.align import Alignment, aligned, offsets
from cs336_systems.profiling.allocations import timeline
from cs336_systems.profiling.intervals import subtraction, union
from cs336_systems.profiling.lanes import Process, Row, lay_out
from cs336_systems.profiling.matching import Matched, match
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.trace import Lane, Span, Trace, uncollected

Event = dict[str, Any]
Place = tuple[Row, Node]  # where a span lies in the picture

BETWEEN_RANKS = "collective"  # the category of the arrows between ranks
SECOND = 10**9
MEBIBYTE = 2**20


@uncollected()
def merge(traces: Iterable[Trace]) -> dict[str, Any]:
    """The merged trace; the same for the same traces, in whatever order. Its clock is that of the lowest rank.

    Under "ranks" it keeps each rank's `distributedInfo`, host, and clock: offset and bound in nanoseconds, and how they
    are known. Raises UserError for no traces, for two of one rank, and for traces of runs of different sizes.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    _check(traces)
    known = offsets(traces)
    traces = aligned(traces)
    base = _base(traces)
    events: list[Event] = []
    places: dict[int, Place] = {}
    flows = _Flows(base)
    for trace in traces:
        processes, lanes = lay_out(trace)
        rows = [row for each in lanes.values() for row in each]
        places |= {id(node.span): (row, node) for row in rows for root in row.roots for node in root.walk()}
        events += _names(processes, rows)
        events += _slices(rows, base)
        events += _instants(trace, lanes, base)
        if processes:
            events += _memory(trace, processes[0].pid, base)
        flows.add_inside(trace, lanes)
    for matched in match(traces):
        flows.add_between(matched, places)
    # At equal times a viewer takes events as they stand, and an arrow needs its slice to be there.
    events = sorted(events + flows.events, key=lambda it: (it["ph"] != "M", it.get("ts", 0), it["ph"] in ("s", "f")))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "ranks": {str(trace.rank): _about(trace, known[trace.rank]) for trace in traces},
        "traceEvents": events,
    }


def _check(traces: list[Trace]) -> None:
    if not traces:
        raise UserError("there is no trace to merge")
    for one, other in pairwise(traces):
        if one.rank == other.rank:
            raise UserError(f"two of the traces are of rank {one.rank}; a merged one has each rank once")
        if one.world_size != other.world_size:
            raise UserError(
                f"rank {one.rank} was one of {one.world_size} ranks and rank {other.rank} one of {other.world_size}: "
                "these traces are not of one run"
            )


def _base(traces: list[Trace]) -> int:
    """A whole second before everything, so that times in microseconds stay small enough to be exact to 1 ns."""
    starts = [span.start for trace in traces for span in trace.spans]
    starts += [each.time for trace in traces for each in trace.allocations]
    return min(starts, default=0) // SECOND * SECOND


def _about(trace: Trace, alignment: Alignment) -> dict[str, Any]:
    return {
        "host": trace.host,
        "distributedInfo": trace.chrome.get("distributedInfo", {}),
        "clock_offset_ns": alignment.nanoseconds,
        "clock_bound_ns": alignment.bound,
        "clock_source": alignment.source,
        **{key: value for key, value in trace.ours.items() if key not in ("held", "marks") and "clock" not in key},
    }


def microseconds(time: int, base: int = 0) -> float:
    """Nanoseconds as the microseconds of a Chrome trace, with three decimals."""
    return round((time - base) / 1000, 3)


def _names(processes: list[Process], rows: list[Row]) -> Iterator[Event]:
    for process in processes:
        about = {"ph": "M", "pid": process.pid, "tid": 0}
        yield about | {"name": "process_name", "args": {"name": process.name}}
        yield about | {"name": "process_sort_index", "args": {"sort_index": process.order}}
    for row in rows:
        about = {"ph": "M", "pid": row.pid, "tid": row.tid}
        yield about | {"name": "thread_name", "args": {"name": row.name}}
        yield about | {"name": "thread_sort_index", "args": {"sort_index": row.order}}


def _slices(rows: list[Row], base: int) -> Iterator[Event]:
    for row in rows:
        for node in (node for root in row.roots for node in root.walk()):
            span = node.span
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": row.pid,
                "tid": row.tid,
                "ts": microseconds(span.start, base),
                "dur": microseconds(node.duration),
                "args": dict(span.args),
            }


def _instants(trace: Trace, lanes: dict[Lane, list[Row]], base: int) -> Iterator[Event]:
    """Marks on a thread, except the thousands of allocations, which become a curve."""
    for event in trace.chrome["traceEvents"]:
        rows = lanes.get((event.get("pid"), event.get("tid")))
        if event["ph"] == "i" and event.get("name") != "[memory]" and rows:
            time = trace.base + round(1000 * float(event["ts"]))
            if time >= base:
                yield event | {"pid": rows[0].pid, "tid": rows[0].tid, "ts": microseconds(time, base)}


def _memory(trace: Trace, pid: int, base: int) -> Iterator[Event]:
    """Active memory over time, by device, as `allocations.py` adds it up."""
    for device in sorted({each.device for each in trace.allocations}):
        memory = timeline(trace, device)
        for time, nbytes in zip(memory.times, memory.totals, strict=True):
            yield {
                "ph": "C",
                "name": f"active memory, {device}",
                "pid": pid,
                "tid": 0,
                "ts": microseconds(max(time, base), base),
                "args": {"MiB": round(nbytes / MEBIBYTE, 3)},
            }


class _Flows:
    """Arrows. Perfetto tells one from another by a number, a category and a name over all processes."""

    def __init__(self, base: int) -> None:
        self.base, self.count = base, 0
        self.events: list[Event] = []

    def add_inside(self, trace: Trace, lanes: dict[Lane, list[Row]]) -> None:
        """torch's own, if both ends lie in slices that are still there."""
        found: dict[tuple[str, str, Any], list[tuple[str, int, Row | None]]] = {}
        for event in trace.chrome["traceEvents"]:
            if event["ph"] in ("s", "t", "f"):
                time = trace.base + round(1000 * float(event["ts"]))
                rows = lanes.get((event.get("pid"), event.get("tid")), [])
                row = rows[0] if rows and covers(rows[0].roots, time) else None
                key = (event.get("cat", ""), event.get("name", ""), event.get("id"))
                found.setdefault(key, []).append((event["ph"], time, row))
        for (category, name, _), points in found.items():
            source = [(time, row) for phase, time, row in points if phase == "s" and row]
            targets = [(time, row) for phase, time, row in points if phase != "s" and row]
            if len(source) == 1:
                self._add(category, name, source[0], targets)

    def add_between(self, matched: Matched, places: dict[int, Place]) -> None:
        """From the last rank that joined a collective to where each of the others left it."""
        last = max(matched.spans, key=lambda rank: (matched.spans[rank].start, -rank))
        leaving = [span for rank in matched.spans if rank != last and (span := matched.leaving(rank))]
        source = [(own_moment(node), row) for row, node in _found([matched.spans[last]], places)]
        targets = [(own_moment(node, last=True), row) for row, node in _found(leaving, places)]
        if source and source[0][0] is not None:
            begin = (source[0][0], source[0][1])
            self._add(BETWEEN_RANKS, matched.key, begin, [(time, row) for time, row in targets if time is not None])

    def _add(self, category: str, name: str, source: tuple[int, Row], targets: list[tuple[int, Row]]) -> None:
        after = [(time, row) for time, row in targets if time >= source[0]]
        if not after:
            return
        self.count += 1
        about = {"name": name, "cat": category, "id": self.count}
        for phase, (time, row) in (("s", source), *(("f", target) for target in after)):
            event = {"ph": phase, **about, "pid": row.pid, "tid": row.tid, "ts": microseconds(time, self.base)}
            self.events.append(event | ({"bp": "e"} if phase == "f" else {}))


def _found(spans: list[Span], places: dict[int, Place]) -> list[Place]:
    return [places[id(span)] for span in spans if id(span) in places]


def covers(roots: list[Node], time: int) -> bool:
    """Whether one of some roots in order runs at a time."""
    place = bisect_right(roots, time, key=lambda root: root.span.start) - 1
    return place >= 0 and time < roots[place].end


def own_moment(node: Node, last: bool = False) -> int | None:
    """The first or last nanosecond strictly inside a span in which nothing inside it runs; None if there is none.

    A viewer hangs an arrow on the innermost slice of the moment.
    """
    inside = union((child.span.start, child.end) for child in node.children)
    free = subtraction([(node.span.start + 1, node.end)], inside)
    if not free:
        return None
    return free[-1][1] - 1 if last else free[0][0]
