"""One rank's step, sorted into tracks: phases, blocks of the model, computation, collectives.

Numbers only; `timeline_picture.py` draws them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cs336_systems.profiling.collectives import Flight, flights
from cs336_systems.profiling.intervals import Interval, intersection
from cs336_systems.profiling.names import ENGINE, kind_of, step_number
from cs336_systems.profiling.overlap import activity, waits_of
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Span, Trace

OPERATORS = "operators"  # the track of a CPU


class Box(NamedTuple):
    """Something to be drawn: [start, end) in nanoseconds since the epoch."""

    start: int
    end: int
    name: str
    kind: str  # its phase, or a collective's verb
    joined: int = 0  # when the last rank joined
    posted: bool = False  # it may have ended before
    detail: str = ""


class StepTracks:
    """One rank's step. `compute` has a list for each stream, `bars` one for each track of collectives; `last` says when
    the last rank joined, by identity of the span (`overlap.last_starts`)."""

    def __init__(self, trace: Trace, step: int, last: Mapping[int, int]) -> None:
        window = steps_of(trace)[step]
        what, phases = activity(trace), timeline(trace).phases

        def within(boxes: Iterable[Box]) -> list[Box]:
            return [box for box in boxes if box.start < window[1] and box.end > window[0]]

        inside = [flight for flight in flights(trace) if window[0] <= flight.start < window[1]]
        bars = [_bar(flight, last) for flight in inside]
        self.rank, self.start = trace.rank, window[0]
        self.end = max([window[1], *(bar.end for bar in bars if not bar.posted)])
        self.phases = within(Box(phase.start, phase.end, phase.name, phase.name) for phase in phases)
        self.blocks = within(_blocks(trace))
        self.waits = within(Box(span.start, span.end, span.name, "wait") for span in waits_of(trace))
        self.compute = _compute(trace, phases, window)
        self.bars = pack(bars)
        self.launches = [flight.start for flight in inside if flight.launch]
        self.communicating = intersection(what.communicating, [window])
        self.hidden = intersection(self.communicating, what.computing)
        # On a CPU the thread that waits is the one that computes; else waits need a track.
        self.waits_apart = bool(self.waits) and OPERATORS not in self.compute


def steps_of(trace: Trace) -> dict[int, Interval]:
    """The interval of each step, by number; a trace without steps is step 0."""
    found: dict[int, Interval] = {}
    for span in timeline(trace).steps:
        found.setdefault(step_number(span.name) or 0, (span.start, span.end))
    if not found and trace.spans:
        found[0] = (trace.spans[0].start, max(span.end for span in trace.spans))
    return found


def _blocks(trace: Trace) -> list[Box]:
    """The transformer blocks as they come, forward and backward; neighbours of one block are one."""
    found: list[Box] = []
    for node in timeline(trace).nodes:
        span = node.span
        name = next((name for name, kind in reversed(node.modules) if kind_of(kind) == "block"), "")
        if not name or not (node.is_tag or span.name.startswith(ENGINE)):
            continue
        if found and found[-1].name == name and found[-1].kind == node.direction:
            found.append(Box(found.pop().start, max(span.end, node.end), name, node.direction))
        else:
            found.append(Box(span.start, span.end, name, node.direction))
    done, result = 0, []
    for box in sorted(found, key=lambda box: box.start):
        if box.end > done:  # one that begins inside the one before is cut
            result.append(box._replace(start=max(box.start, done)))
            done = box.end
    return result


def _compute(trace: Trace, phases: Sequence[Span], window: Interval) -> dict[str, list[Box]]:
    """The computation by stream, of the phase in which a CPU thread asked for it."""
    launched = [span for span in trace.spans if span.category.startswith("cuda_") and "correlation" in span.args]
    calls = {span.args["correlation"]: span for span in launched}
    starts = [phase.start for phase in phases]
    result: dict[str, list[Box]] = {}
    for span in activity(trace).compute:
        call = calls.get(span.args.get("correlation"), span)
        if window[0] <= call.start < window[1]:
            place = bisect_right(starts, call.start) - 1
            phase = phases[place].name if place >= 0 and call.start < phases[place].end else "other"
            track = f"stream {span.args['stream']}" if span.category == "kernel" else OPERATORS
            result.setdefault(track, []).append(Box(span.start, span.end, span.name, phase))
    return result


def _bar(flight: Flight, last: Mapping[int, int]) -> Box:
    """A transfer that a backend timed lasts as long as that says; one that was posted, from launch to wait."""
    timed = bool(flight.transfers) and not flight.posted
    start = flight.transfers[0].start if timed else flight.start
    end = max(span.end for span in flight.transfers) if timed else flight.end
    key = id(flight.transfers[0]) if timed else id(flight.launch)
    joined = min(max(last.get(key, start), start), end)
    detail = f"{flight.verb} {flight.number} {flight.label}".strip()
    return Box(start, end, flight.label or flight.verb, flight.verb, joined, not timed, detail)


def pack(bars: Iterable[Box]) -> list[list[Box]]:
    """The bars on as few tracks as leave none over another, each on the first that is free."""
    tracks: list[list[Box]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((track for track in tracks if track[-1].end <= bar.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(bar)
    return tracks
