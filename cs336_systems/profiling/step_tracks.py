"""One rank's step, sorted into tracks: phases, blocks of the model, computation, collectives.

Numbers only; `timeline_picture.py` draws them. In a trace of plain torch.profiler, without phases of ours, backward is
where autograd's engine ran; a trace without steps is one step.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cs336_systems.errors import UserError
from cs336_systems.profiling.flights import Flight, flights
from cs336_systems.profiling.intervals import Interval, intersection, union
from cs336_systems.profiling.module_spans import kind_of, parse_tag
from cs336_systems.profiling.names import ENGINE, PHASES, step_number
from cs336_systems.profiling.overlap import activity, waits_of
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace

OPERATORS = "operators"  # the track of a CPU


@dataclass(frozen=True)
class Box:
    """Something to be drawn: [start, end) in nanoseconds since the epoch, its name and its kind."""

    start: int
    end: int
    name: str
    kind: str


@dataclass(frozen=True)
class Bar(Box):
    """A collective: `kind` is its verb, `joined` when the last rank joined, `posted` that it may have ended before."""

    joined: int
    posted: bool
    detail: str


@dataclass(frozen=True)
class StepTracks:
    """One rank's step. `compute` has a list for each stream, `bars` one for each track; `hidden` is the communication
    during which something was computed."""

    rank: int
    start: int
    end: int
    phases: list[Box]
    blocks: list[Box]
    waits: list[Box]
    compute: dict[str, list[Box]]
    bars: list[list[Bar]]
    launches: list[int]
    hidden: list[Interval]
    communicating: list[Interval]


def steps_of(trace: Trace) -> dict[int, Interval]:
    """The interval of each step, by number; a trace without steps is step 0."""
    found: dict[int, Interval] = {}
    for span in trace.spans:
        if span.category == "user_annotation" and (number := step_number(span.name)) is not None:
            found.setdefault(number, (span.start, span.end))
    if not found and trace.spans:
        found[0] = (trace.spans[0].start, max(span.end for span in trace.spans))
    return found


def choose_step(traces: Sequence[Trace], step: int | None) -> int:
    """The step to draw, by default the last that every rank has. Raises UserError if there is none such."""
    common = set.intersection(*(set(steps_of(trace)) for trace in traces)) if traces else set()
    if not common:
        raise UserError("the traces share no step: profile all ranks over the same steps")
    if step is None:
        return max(common)
    if step not in common:
        raise UserError(f"no step {step} in the traces; there are {', '.join(map(str, sorted(common)))}")
    return step


def step_tracks(trace: Trace, step: int, last: Mapping[int, int]) -> StepTracks:
    """One rank's step; `last` says when the last rank joined, by identity of the span (`overlap.last_starts`)."""
    window = steps_of(trace)[step]

    def within(boxes: Iterable[Box]) -> list[Box]:
        return [box for box in boxes if box.start < window[1] and box.end > window[0]]

    what, phases = activity(trace), _phases(trace)
    inside = [flight for flight in flights(trace) if window[0] <= flight.start < window[1]]
    bars = [_bar(flight, last) for flight in inside]
    communicating = intersection(what.communicating, [window])
    return StepTracks(
        rank=trace.rank,
        start=window[0],
        end=max([window[1], *(bar.end for bar in bars if not bar.posted)]),
        phases=within(phases),
        blocks=within(_blocks(trace)),
        waits=within(Box(span.start, span.end, span.name, "wait") for span in waits_of(trace)),
        compute=_compute(trace, phases, window),
        bars=pack(bars),
        launches=[flight.start for flight in inside if flight.launch],
        hidden=intersection(communicating, what.computing),
        communicating=communicating,
    )


def _phases(trace: Trace) -> list[Box]:
    """In order. Without annotations of phases, the times of autograd's engine and of an optimizer."""
    annotated = [span for span in trace.spans if span.category == "user_annotation"]
    found = [Box(s.start, s.end, s.name, s.name) for s in annotated if s.name in PHASES]
    if found:
        return found
    engine = union((s.start, s.end) for s in trace.spans if s.name.startswith(ENGINE))
    steps = union((s.start, s.end) for s in annotated if s.name.startswith("Optimizer.step#"))
    named = [(engine, "backward"), (steps, "optimizer")]
    return sorted((Box(a, b, name, name) for times, name in named for a, b in times), key=lambda box: box.start)


def _blocks(trace: Trace) -> list[Box]:
    """The transformer blocks as they come, forward and backward; neighbours of one block are one."""
    found: list[Box] = []
    for node in timeline(trace).nodes:
        span = node.span
        tagged = span.category == "user_annotation" and parse_tag(span.name)
        name = next((name for name, kind in reversed(node.modules) if kind_of(kind) == "block"), "")
        if not name or not (tagged or span.name.startswith(ENGINE)):
            continue
        if found and found[-1].name == name and found[-1].kind == node.direction:
            found.append(Box(found.pop().start, max(span.end, node.end), name, node.direction))
        else:
            found.append(Box(span.start, span.end, name, node.direction))
    done, result = 0, []
    for box in sorted(found, key=lambda box: box.start):
        if box.end > done:  # one that begins inside the one before is cut
            result.append(Box(max(box.start, done), box.end, box.name, box.kind))
            done = box.end
    return result


def _compute(trace: Trace, phases: list[Box], window: Interval) -> dict[str, list[Box]]:
    """The computation by stream, of the phase in which a CPU thread asked for it."""
    launched = [span for span in trace.spans if span.category.startswith("cuda_") and "correlation" in span.args]
    calls = {span.args["correlation"]: span for span in launched}
    starts = [phase.start for phase in phases]
    result: dict[str, list[Box]] = {}
    for span in activity(trace).compute:
        call = calls.get(span.args.get("correlation"), span)
        if not window[0] <= call.start < window[1]:
            continue
        place = bisect_right(starts, call.start) - 1
        phase = phases[place].kind if place >= 0 and call.start < phases[place].end else "other"
        track = f"stream {span.args['stream']}" if span.category == "kernel" else OPERATORS
        result.setdefault(track, []).append(Box(span.start, span.end, span.name, phase))
    return result


def _bar(flight: Flight, last: Mapping[int, int]) -> Bar:
    """A transfer that a backend timed lasts as long as that says; one that was posted, from launch to wait."""
    timed = bool(flight.transfers) and not flight.posted
    start = flight.transfers[0].start if timed else flight.start
    end = max(span.end for span in flight.transfers) if timed else flight.end
    key = id(flight.transfers[0]) if timed else id(flight.launch)
    joined = min(max(last.get(key, start), start), end)
    detail = f"{flight.verb} {flight.number} {flight.label}".strip()
    return Bar(start, end, flight.label or flight.verb, flight.verb, joined, not timed, detail)


def pack(bars: Iterable[Bar]) -> list[list[Bar]]:
    """The bars on as few tracks as leave none over another, each on the first that is free."""
    tracks: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((track for track in tracks if track[-1].end <= bar.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(bar)
    return tracks
