"""Merges the traces of all ranks into one Chrome-trace JSON that Perfetto (https://ui.perfetto.dev) opens.

Clocks are aligned (`align.py`) and every rank has processes of its own, rank * 1000 + 1, + 2 ... Arrows inside
a rank are torch's: from forward to backward, and from a launch to its kernel. Ours lead between ranks: from the last
rank's entry into a collective to the end of each other rank's wait. As they lead from cause to effect, those of an
all-reduce never point back in time if clocks are right. (In a broadcast ranks wait only for the source.)
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from cs336_systems.errors import UserError
from cs336_systems.profiling.align import Alignment, aligned, match, offsets
from cs336_systems.profiling.intervals import pack, subtraction, union
from cs336_systems.profiling.memory import memory_timeline
from cs336_systems.profiling.nesting import Node, innermost, nest, nested
from cs336_systems.profiling.timeline import IN_FLIGHT, OTHER, lane_number, roles
from cs336_systems.profiling.trace import FRAME, HOST, KERNEL, ON_GPU, Lane, Place, Span, Trace, grouped

SECOND = 10**9
PER_RANK = 1000  # process numbers of one rank
Event = dict[str, Any]


class Track(NamedTuple):
    """One line of the merged trace: slices that nest. A lane's further tracks hold spans that cross others."""

    pid: int
    tid: int
    nodes: list[Node]  # in order of start, parents before children


Row = tuple[int, str, Any, Track]  # of an event: its time in nanoseconds, and what `_event` makes it of
End = tuple[int, Track]  # of an arrow: time in nanoseconds, and track
Arrow = tuple[str, str, End, list[End]]  # its category, name, source and targets


def _lay_out(trace: Trace) -> tuple[list[Event], dict[Lane, list[Track]]]:
    """Events that name a rank's processes and threads, and for each of its lanes the tracks that hold its spans."""
    lanes = grouped(trace.spans, lambda span: span.lane)
    kinds: dict[Any, int] = {}  # 0 for a process of Python, 1 for a GPU, 2 for the profiler's own
    for (old, _), spans in lanes.items():
        kind = min(0 if span.category in HOST else 1 if span.category in ON_GPU else 2 for span in spans)
        kinds[old] = min(kind, kinds.get(old, kind))
    named, tracks = list[Event](), dict[Lane, list[Track]]()

    def name(what: str, pid: int, tid: int, name: str, order: int) -> None:
        for key, value in (("name", name), ("sort_index", order)):
            named.append({"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_{key}", "args": {key: value}})

    places = {lane: place for place, lane in enumerate(roles(trace))}
    from_the_top = sorted(lanes, key=lambda lane: (places.get(lane, len(places)), lane_number(lane), str(lane)))
    processes = sorted(kinds, key=lambda old: (kinds[old], str(old).zfill(9)))
    for pid, old in enumerate(processes, trace.rank * PER_RANK + 1):
        about = f" ({trace.host}, pid {old})" if trace.host else f" (pid {old})"
        name("process", pid, 0, f"rank {trace.rank}" + (about, f" GPU {old}", ", the profiler")[kinds[old]], pid)
        tids = count(pid * PER_RANK)
        for order, lane in enumerate(lane for lane in from_the_top if lane[0] == old):
            tracks[lane], lane_name = [], _lane_name(trace, lane, lanes[lane], kinds[old] == 1)
            for number, nodes in enumerate(untangle(lanes[lane], nested(trace).get(lane))):
                tracks[lane].append(Track(pid, next(tids), nodes))
                name("thread", *tracks[lane][-1][:2], lane_name + f", crossing {number}" * bool(number), order)
    return named, tracks


def untangle(spans: Sequence[Span], known: list[Node] | None = None) -> list[list[Node]]:
    """One lane's spans: on a first track those that nest, on further ones the rest, of which none overlap; Python
    frames that do not nest are left out, as in `nest`. `known` are its nodes of a CPU's spans."""
    first = known if known and all(span.category in HOST for span in spans) else nest(spans)
    kept = {id(node.span) for node in first}
    rest = pack(span for span in spans if id(span) not in kept and span.category != FRAME)
    return [first, *([Node(span, span.end) for span in track] for track in rest)]


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
    """Merge traces; the result does not depend on their order. Its clock is that of the lowest rank.
    With `lazily` its events are made when they are read, so that they need no memory.

    Under "ranks" it keeps each rank's `distributedInfo`, host, and clock: offset and bound in nanoseconds, and their
    source. Raises UserError for traces of runs of different sizes.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    for one, other in pairwise(traces):
        if one.world_size != other.world_size:
            sizes = f"rank {one.rank} was one of {one.world_size} ranks and rank {other.rank} one of {other.world_size}"
            raise UserError(f"{sizes}: these traces are not of one run")
    clocks, traces = offsets(traces), aligned(traces)
    # A whole second before the first event, so that times in microseconds are small enough to be exact to 1 ns.
    starts = [span.start for trace in traces for span in trace.spans[:1]]  # in order
    starts += [each.time for trace in traces for each in trace.allocations[:1]]
    base = min(starts, default=0) // SECOND * SECOND
    named, rows = list[Event](), list[Row]()
    arrows, places = list[Arrow](), dict[int, tuple[Track, Node]]()
    for trace in traces:
        names, lanes = _lay_out(trace)
        tracks = [track for each in lanes.values() for track in each]
        if len(traces) > 1:
            places |= {id(node.span): (track, node) for track in tracks for node in track.nodes}
        named += names
        rows += [(node.span.start, "X", node, track) for track in tracks for node in track.nodes]
        for device in sorted({each.device for each in trace.allocations}) if trace.spans else []:
            memory, track = memory_timeline(trace, device), Track(trace.rank * PER_RANK + 1, 0, [])
            levels = zip(memory.times, memory.totals, strict=True)
            rows += [(max(base, time), "C", (device, nbytes), track) for time, nbytes in levels]
        arrows += _arrows_inside(trace, lanes)
    # At equal times a viewer reads events in the file's order, and an arrow must come after its slice.
    rows += _ends([*arrows, *_arrows_between(traces, places)])
    rows.sort(key=itemgetter(0))
    events = chain(named, (_event((time - base) / 1000, *row) for time, *row in rows))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "ranks": {str(trace.rank): _about(trace, clocks[trace.rank]) for trace in traces},
        "traceEvents": events if lazily else [*events],
    }


def _about(trace: Trace, clock: Alignment) -> dict[str, Any]:
    about = {"host": trace.host, "distributedInfo": trace.chrome.get("distributedInfo", {})}
    about |= {"clock_offset_ns": clock.nanoseconds, "clock_bound_ns": clock.bound, "clock_source": clock.source}
    return about | {key: it for key, it in trace.ours.items() if key not in ("held", "marks") and "clock" not in key}


def _event(ts: float, phase: str, what: Any, track: Track) -> Event:
    """An event of the file: a slice of a node, the bytes alive on a device, or one end of an arrow."""
    event = {"ph": phase, "pid": track.pid, "tid": track.tid, "ts": ts}
    if phase == "X":
        name, category, _, _, _, args = what.span
        return event | {"name": name, "cat": category, "args": args, "dur": what.duration / 1000}
    if phase == "C":
        device, nbytes = what
        return event | {"name": f"active memory, {device}", "args": {"MiB": round(nbytes / 2**20, 3)}}
    category, name, number = what
    return event | {"name": name, "cat": category, "id": number} | ({"bp": "e"} if phase == "f" else {})


def _arrows_inside(trace: Trace, lanes: dict[Lane, list[Track]]) -> Iterator[Arrow]:
    """torch's own arrows, if both ends lie in slices that are still there."""
    nodes = {lane: tracks[0].nodes for lane, tracks in lanes.items()}
    around = innermost(nodes, [place for both in trace.flows.values() for ends in both for place in ends])

    def inside(places: list[Place]) -> list[End]:
        return [(time, lanes[lane][0]) for lane, time in sorted(places, key=itemgetter(1)) if around[lane, time]]

    for (category, name, _), (sources, targets) in trace.flows.items():
        if len(begin := inside(sources)) == 1:
            yield category, name, begin[0], inside(targets)


def _arrows_between(traces: list[Trace], places: dict[int, tuple[Track, Node]]) -> Iterator[Arrow]:
    """Arrows from the last rank that joined a collective to the end of it on each of the others."""

    def ends(spans: Iterable[Span], last: bool) -> list[End]:
        found = (places[id(span)] for span in spans if id(span) in places)
        return [(time, track) for track, node in found if (time := own_moment(node, last)) is not None]

    for matched in match(traces):
        last = max(matched.spans, key=lambda rank: (matched.spans[rank].start, -rank))
        leaving = [span for rank in matched.spans if rank != last and (span := matched.leaving(rank))]
        for source in ends([matched.spans[last]], last=False):
            yield "collective", matched.key, source, ends(leaving, last=True)


def _ends(arrows: list[Arrow]) -> Iterator[Row]:
    """Number the arrows, as Perfetto identifies one by number, category and name, and drop those back in time."""
    number = 0
    for category, name, source, targets in arrows:
        after = [("f", target) for target in targets if target[0] >= source[0]]
        number += bool(after)
        for phase, (time, track) in after and [("s", source), *after]:
            yield time, phase, (category, name, number), track


def own_moment(node: Node, last: bool = False) -> int | None:
    """The first or last nanosecond strictly inside a span in which nothing inside it runs; None if there is none.

    A viewer attaches an arrow to the innermost slice at its time.
    """
    inside = union((child.span.start, child.end) for child in node.children)
    free = subtraction([(node.span.start + 1, node.end)], inside)
    return None if not free else free[-1][1] - 1 if last else free[0][0]
