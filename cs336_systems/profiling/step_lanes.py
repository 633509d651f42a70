"""What a rank did in one step, sorted into lanes: phases, blocks of the model, computation, collectives.

Numbers only; `timeline_svg.py` draws them. A trace of plain torch.profiler has no phases of ours, so backward is then
where autograd's engine ran, and one without steps is one step.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cs336_systems.errors import UserError
from cs336_systems.profiling.attribution import ENGINE, PHASES, Placed, attribute
from cs336_systems.profiling.flights import Flight, flights
from cs336_systems.profiling.intervals import Interval, intersection, length, union
from cs336_systems.profiling.names import step_number
from cs336_systems.profiling.overlap import activity, waits_of
from cs336_systems.profiling.tags import kind_of, parse_tag
from cs336_systems.profiling.trace import Span, Trace

OPERATORS = "operators"  # the lane of a CPU


@dataclass(frozen=True)
class Box:
    """Something to be drawn: [start, end) in nanoseconds since the epoch, what it is and what kind."""

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
class StepLanes:
    """One rank's step. `compute` and `bars` have a list for each stream or lane; the others have one lane.

    `overlapped`, `communication` and `blocked` are nanoseconds of this step alone.
    """

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

    @property
    def communication(self) -> int:
        return length(self.communicating)

    @property
    def overlapped(self) -> int:
        return length(self.hidden)

    @property
    def blocked(self) -> int:
        return length(union((wait.start, wait.end) for wait in self.waits))


def steps_of(trace: Trace) -> dict[int, Interval]:
    """When each step was, by number; a trace without steps is step 0."""
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


def lanes_of(trace: Trace, step: int, last: Mapping[int, int]) -> StepLanes:
    """One rank's step; `last` says when the last rank joined, by identity of the span (`overlap.last_starts`)."""
    window = steps_of(trace)[step]
    what = activity(trace)
    phases = _phases(trace)
    inside = [flight for flight in flights(trace) if window[0] <= flight.start < window[1]]
    bars = [_bar(flight, last) for flight in inside]
    communicating = intersection(what.communicating, [window])
    waits = [Box(s.start, s.end, s.name, "wait") for s in waits_of(trace)]
    return StepLanes(
        rank=trace.rank,
        start=window[0],
        end=max([window[1], *(bar.end for bar in bars if not bar.posted)]),
        phases=_within(phases, window),
        blocks=_within(_blocks(attribute(trace)), window),
        waits=_within(waits, window),
        compute=_compute(trace, what.compute, phases, window),
        bars=pack(bars),
        launches=[flight.start for flight in inside if flight.launch],
        hidden=intersection(communicating, what.computing),
        communicating=communicating,
    )


def _within(blocks: Iterable[Box], window: Interval) -> list[Box]:
    return [block for block in blocks if block.start < window[1] and block.end > window[0]]


def _phases(trace: Trace) -> list[Box]:
    """In order. Where nothing says otherwise, what autograd's engine and an optimizer did."""
    annotated = [span for span in trace.spans if span.category == "user_annotation"]
    found = [Box(s.start, s.end, s.name, s.name) for s in annotated if s.name in PHASES]
    if found:
        return found
    engine = union((s.start, s.end) for s in trace.spans if s.name.startswith(ENGINE))
    steps = union((s.start, s.end) for s in annotated if s.name.startswith("Optimizer.step#"))
    named = [(engine, "backward"), (steps, "optimizer")]
    return sorted((Box(a, b, name, name) for times, name in named for a, b in times), key=lambda block: block.start)


def _blocks(placed: Iterable[Placed]) -> list[Box]:
    """The transformer blocks as they come, forward and backward; neighbours of one block are one."""
    found: list[Box] = []
    for each in placed:
        tagged = parse_tag(each.span.name) if each.span.category == "user_annotation" else None
        if not (tagged or each.span.name.startswith(ENGINE)):
            continue
        name = next((name for name, kind in reversed(each.modules) if kind_of(kind) == "block"), "")
        if name and found and found[-1].name == name and found[-1].kind == each.direction:
            start = found.pop().start
            found.append(Box(start, max(each.span.end, each.node.end), name, each.direction))
        elif name:
            found.append(Box(each.span.start, each.span.end, name, each.direction))
    return sorted(_widest(found), key=lambda block: block.start)


def _widest(blocks: list[Box]) -> list[Box]:
    """A block that begins inside the one before has its own lane nowhere, so it is cut."""
    done, result = 0, []
    for block in sorted(blocks, key=lambda block: block.start):
        if block.end > done:
            result.append(Box(max(block.start, done), block.end, block.name, block.kind))
            done = block.end
    return result


def _compute(trace: Trace, spans: Iterable[Span], phases: list[Box], window: Interval) -> dict[str, list[Box]]:
    """What was computed by stream, of the phase in which a CPU thread asked for it."""
    calls = {
        s.args["correlation"]: s for s in trace.spans if s.category.startswith("cuda_") and "correlation" in s.args
    }
    starts = [phase.start for phase in phases]
    result: dict[str, list[Box]] = {}
    for span in spans:
        call = calls.get(span.args.get("correlation"), span)
        if not window[0] <= call.start < window[1]:
            continue
        place = bisect_right(starts, call.start) - 1
        phase = phases[place].kind if place >= 0 and call.start < phases[place].end else "other"
        lane = f"stream {span.args['stream']}" if span.category == "kernel" else OPERATORS
        result.setdefault(lane, []).append(Box(span.start, span.end, span.name, phase))
    return result


def _bar(flight: Flight, last: Mapping[int, int]) -> Bar:
    """A transfer that a backend timed lasts as long as that says; one that was posted, from launch to wait."""
    timed = bool(flight.transfers) and not flight.posted
    start = flight.transfers[0].start if timed else flight.start
    end = max(span.end for span in flight.transfers) if timed else flight.end
    key = id(flight.transfers[0]) if timed else id(flight.launch)
    joined = min(max(last.get(key, start), start), end)
    name = flight.label or flight.verb
    detail = f"{flight.verb} {flight.number} {flight.label}".strip()
    return Bar(start, end, name, flight.verb, joined, not timed, detail)


def pack(bars: Iterable[Bar]) -> list[list[Bar]]:
    """The bars on as few lanes as leave none over another, each on the first that is free."""
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        free = next((lane for lane in lanes if lane[-1].end <= bar.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(bar)
    return lanes
