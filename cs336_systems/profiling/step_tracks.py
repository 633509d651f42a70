"""One rank's step, sorted into tracks: phases, blocks of the model, computation, waits, collectives.

Numbers only; `timeline_picture.py` draws them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cs336_systems.profiling.collectives import Flight, flights
from cs336_systems.profiling.intervals import Interval, intersection, subtraction
from cs336_systems.profiling.names import ENGINE, kind_of, step_number
from cs336_systems.profiling.overlap import activity, waits_of
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace


class Bar(NamedTuple):
    """Something that lasted: [start, end) in nanoseconds since the epoch."""

    start: int
    end: int
    name: str
    kind: str  # its phase, a collective's verb, or the track's name
    label: str = ""
    joined: int = 0  # when the last rank joined
    posted: bool = False  # it may have ended before


class StepTracks:
    """One rank's step. `tracks` are (name, bars) from top to bottom; `last` says when the last rank joined a
    collective, by identity of the span (`overlap.last_starts`)."""

    def __init__(self, trace: Trace, step: int, last: Mapping[int, int]) -> None:
        window = steps_of(trace)[step]
        what = activity(trace)

        def within(bars: Iterable[Bar]) -> list[Bar]:
            return [bar for bar in bars if bar.start < window[1] and bar.end > window[0]]

        inside = [flight for flight in flights(trace) if window[0] <= flight.start < window[1]]
        self.collectives = [_collective(flight, last) for flight in inside]
        self.rank, self.start = trace.rank, window[0]
        self.end = max([window[1], *(bar.end for bar in self.collectives if not bar.posted)])
        self.launches = [flight.start for flight in inside if flight.launch]
        self.communicating = intersection(what.communicating, [window])
        self.hidden = intersection(self.communicating, what.computing)
        self.waits = within(Bar(span.start, span.end, span.name, "wait") for span in waits_of(trace))
        phases = within(Bar(s.start, s.end, s.name, s.name, s.name) for s in timeline(trace).phases)
        overlap = [Bar(*each, "hidden", "hidden") for each in self.hidden]
        overlap += [Bar(*each, "exposed", "exposed") for each in subtraction(self.communicating, self.hidden)]
        self.tracks = [("phase", phases), ("block", within(_blocks(trace))), *sorted(_compute(trace, window).items())]
        self.tracks += [("waits", self.waits), *(("collectives", bars) for bars in pack(self.collectives))]
        self.tracks = [(name, bars) for name, bars in [*self.tracks, ("overlap", overlap)] if bars]


def steps_of(trace: Trace) -> dict[int, Interval]:
    """The interval of each step, by number; a trace without steps is step 0."""
    found: dict[int, Interval] = {}
    for span in timeline(trace).steps:
        found.setdefault(step_number(span.name) or 0, (span.start, span.end))
    if not found and trace.spans:
        found[0] = (trace.spans[0].start, max(span.end for span in trace.spans))
    return found


def _blocks(trace: Trace) -> list[Bar]:
    """The transformer blocks as they come, forward and backward; neighbours of one block are one."""
    found: list[Bar] = []
    for node in timeline(trace).nodes:
        name = next((name for name, kind in reversed(node.modules) if kind_of(kind) == "block"), "")
        if not name or not (node.is_tag or node.span.name.startswith(ENGINE)):
            continue
        start, key = node.span.start, (name, node.direction)
        if found and (found[-1].name, found[-1].kind) == key:
            start = found.pop().start
        found.append(Bar(start, node.end, *key, name))
    return found


def _compute(trace: Trace, window: Interval) -> dict[str, list[Bar]]:
    """The computation by stream, of the phase in which a CPU thread asked for it."""
    launched = [span for span in trace.spans if span.category.startswith("cuda_") and "correlation" in span.args]
    calls = {span.args["correlation"]: span for span in launched}
    phases = timeline(trace).phases
    result: dict[str, list[Bar]] = {}
    for span in activity(trace).compute:
        call = calls.get(span.args.get("correlation"), span)
        if window[0] <= call.start < window[1]:
            place = bisect_right(phases, call.start, key=lambda phase: phase.start) - 1
            phase = phases[place].name if place >= 0 and call.start < phases[place].end else "other"
            track = f"stream {span.args['stream']}" if span.category == "kernel" else "operators"
            result.setdefault(track, []).append(Bar(span.start, span.end, span.name, phase))
    return result


def _collective(flight: Flight, last: Mapping[int, int]) -> Bar:
    """A transfer that a backend timed lasts as long as that says; one that was posted, from launch to wait."""
    timed = bool(flight.transfers) and not flight.posted
    start = flight.transfers[0].start if timed else flight.start
    end = max(span.end for span in flight.transfers) if timed else flight.end
    joined = last.get(id(flight.transfers[0]) if timed else id(flight.launch), start)
    name = f"{flight.verb} {flight.number} {flight.label}".strip()
    return Bar(start, end, name, flight.verb, flight.label or flight.verb, min(max(joined, start), end), not timed)


def pack(bars: Iterable[Bar]) -> list[list[Bar]]:
    """The bars on as few tracks as leave none over another, each on the first that is free."""
    tracks: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((track for track in tracks if track[-1].end <= bar.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(bar)
    return tracks
