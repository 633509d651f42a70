"""Merges the traces of all ranks into one Chrome-trace JSON that Perfetto (https://ui.perfetto.dev) opens.

Clocks are aligned (`align.py`) and every rank has processes of its own, rank * 1000 + 1, + 2 ... Arrows inside a rank
are torch's: from forward to backward, and from a launch to its kernel. Ours lead between ranks: from the last rank's
entry into a collective to the end of each other rank's wait.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

from cs336_systems.errors import UserError
from cs336_systems.profiling.align import aligned, match
from cs336_systems.profiling.nesting import Node, nest, nested
from cs336_systems.profiling.timeline import IN_FLIGHT, OTHER, lane_number, roles
from cs336_systems.profiling.trace import HOST, KERNEL, ON_GPU, Lane, Span, Trace, grouped

CROSSING = "note: {} slices cross others of their thread or stream, and are left out"
SECOND = 10**9
PER_RANK = 1000  # process numbers of one rank, and lines of one process
Event = dict[str, Any]
Line = tuple[int, int]  # one line of slices in the merged trace: its process's and its thread's number
Row = tuple[int, str, Any, Line]  # of an event: its time in nanoseconds, and what `_event` makes it of
End = tuple[int, Line]  # of an arrow: time in nanoseconds, and line
Slices = dict[int, tuple[Node, Line]]  # by the identity of their spans
Arrow = tuple[str, str, End, list[End]]  # its category, name, source and targets


def _lay_out(trace: Trace) -> tuple[list[Event], dict[Lane, Line]]:
    """Events that name a rank's processes and threads, and the line of each of its lanes."""
    lanes = grouped(trace.spans, lambda span: span.lane)
    kinds: dict[Any, int] = {}  # 0 for a process of Python, 1 for a GPU, 2 for the profiler's own
    for (old, _), spans in lanes.items():
        kind = min(0 if span.category in HOST else 1 if span.category in ON_GPU else 2 for span in spans)
        kinds[old] = min(kind, kinds.get(old, kind))
    named, lines = list[Event](), dict[Lane, Line]()

    def name(what: str, line: Line, name: str, order: int) -> None:
        for key, value in (("name", name), ("sort_index", order)):
            about = {"name": f"{what}_{key}", "args": {key: value}}
            named.append({"ph": "M", "pid": line[0], "tid": line[1], **about})

    places = {lane: place for place, lane in enumerate(roles(trace))}
    from_the_top = sorted(lanes, key=lambda lane: (places.get(lane, len(places)), lane_number(lane), str(lane)))
    processes = sorted(kinds, key=lambda old: (kinds[old], str(old).zfill(9)))
    for pid, old in enumerate(processes, trace.rank * PER_RANK + 1):
        about = f" ({trace.host}, pid {old})" if trace.host else f" (pid {old})"
        name("process", (pid, 0), f"rank {trace.rank}" + (about, f" GPU {old}", ", the profiler")[kinds[old]], pid)
        for order, lane in enumerate(lane for lane in from_the_top if lane[0] == old):
            lines[lane] = pid, pid * PER_RANK + order
            name("thread", lines[lane], _lane_name(trace, lane, lanes[lane], kinds[old] == 1), order)
    return named, lines


def _lane_name(trace: Trace, lane: Lane, spans: list[Span], is_gpu: bool) -> str:
    """`stream 7` of a GPU, `main thread (5)`, or what the profiler says of a thread without a role."""
    if is_gpu:
        carries = any(KERNEL.search(span.name) for span in spans if span.category == "kernel")
        return f"stream {lane[1]}" + (", communication" if carries else "")
    role = roles(trace).get(lane, OTHER)
    if role.startswith(OTHER):
        return trace.threads.get(lane, f"thread {lane[1]}")
    return role if role.startswith(IN_FLIGHT) else f"{role} ({lane[1]})"


def merge(traces: Iterable[Trace], lazily: bool = False) -> dict[str, Any]:
    """Merge traces, given in any order, on the clock of the lowest rank. Slices that cross others of their line are
    left out, and counted in `otherData`. With `lazily` events are made when they are read, so that they need no
    memory. Raises UserError for traces of runs of different sizes."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    for one, other in pairwise(traces):
        if one.world_size != other.world_size:
            sizes = f"rank {one.rank} was one of {one.world_size} ranks and rank {other.rank} one of {other.world_size}"
            raise UserError(f"{sizes}: these traces are not of one run")
    traces = aligned(traces)
    # A whole second before the first event, so that times in microseconds are small enough to be exact to 1 ns.
    base = min((span.start for trace in traces for span in trace.spans[:1]), default=0) // SECOND * SECOND
    named, rows, arrows, slices = list[Event](), list[Row](), list[Arrow](), Slices()
    for trace in traces:
        names, lines = _lay_out(trace)
        named += names
        for lane, spans in grouped(trace.spans, lambda span: span.lane).items():
            nodes = nested(trace)[lane] if all(span.category in HOST for span in spans) else nest(spans)
            rows += [(node.span.start, "X", node, lines[lane]) for node in nodes]
            slices |= {id(node.span): (node, lines[lane]) for node in nodes}
        arrows += _arrows_inside(trace, lines)
    crossing = sum(len(trace.spans) for trace in traces) - len(slices)
    # At equal times a viewer reads events in the file's order, and an arrow must come after its slice.
    rows += _ends([*arrows, *_arrows_between(traces, slices)])
    rows.sort(key=itemgetter(0))
    events = chain(named, (_event((time - base) / 1000, *row) for time, *row in rows))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "otherData": {"crossing": crossing},
        "traceEvents": events if lazily else [*events],
    }


def _event(ts: float, phase: str, what: Any, line: Line) -> Event:
    """An event of the file: a slice of a node, or one end of an arrow."""
    event = {"ph": phase, "pid": line[0], "tid": line[1], "ts": ts}
    if phase == "X":
        name, category, _, _, _, args = what.span
        return event | {"name": name, "cat": category, "args": args, "dur": what.duration / 1000}
    category, name, number = what
    return event | {"name": name, "cat": category, "id": number} | ({"bp": "e"} if phase == "f" else {})


def _arrows_inside(trace: Trace, lines: dict[Lane, Line]) -> Iterator[Arrow]:
    """torch's own arrows."""
    for (category, name, _), both in trace.flows.items():
        begin, ends = ([(time, lines[lane]) for lane, time in places if lane in lines] for places in both)
        if len(begin) == 1:
            yield category, name, begin[0], sorted(ends)


def _arrows_between(traces: list[Trace], slices: Slices) -> Iterator[Arrow]:
    """Arrows from the last rank that joined a collective to the end of it on each of the others; a nanosecond inside,
    and outside of their children if there is time, as a viewer attaches an arrow to the innermost slice at its time."""
    for matched in match(traces):
        last = max(matched.spans, key=lambda rank: (matched.spans[rank].start, -rank))
        leaving = [span for rank in matched.spans if rank != last and (span := matched.leaving(rank))]
        if joined := slices.get(id(matched.spans[last])):
            (node, line), ends = joined, [slices[id(span)] for span in leaving if id(span) in slices]
            begin = first = node.span.start + 1
            for child in node.children:
                begin = child.end if child.span.start <= begin < child.end else begin
            begin = begin if begin < min([node.end, *(end.end for end, _ in ends if end.end > first)]) else first
            yield "collective", matched.key, (begin, line), [(_leaving(end, begin), line) for end, line in ends]


def _leaving(node: Node, begin: int) -> int:
    """The last moment of a slice outside of its children; or its last, if all after `begin` lies inside of them."""
    end = node.end - 1
    for child in reversed(node.children):
        end = child.span.start - 1 if child.span.start <= end < child.end else end
    return end if end >= max(begin, node.span.start) else node.end - 1


def _ends(arrows: list[Arrow]) -> Iterator[Row]:
    """Number the arrows, as Perfetto identifies one by number, category and name, and drop those back in time."""
    number = 0
    for category, name, source, targets in arrows:
        after = [("f", target) for target in targets if target[0] >= source[0]]
        number += bool(after)
        for phase, (time, line) in after and [("s", source), *after]:
            yield time, phase, (category, name, number), line
