"""Picture of one step: every rank's computation, its communication at the same time, and its waits.

A group of tracks for each rank on one axis of time, with the ranks' clocks aligned. The last track of a group shows
the overlap: communication is green while the rank also computes, and red while it does not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cs336_systems.host.text import plot_text
from cs336_systems.profiling.align import aligned, offsets
from cs336_systems.profiling.collectives import Flight, flights
from cs336_systems.profiling.intervals import Interval, intersection, length, pack, subtraction, union
from cs336_systems.profiling.names import ENGINE, kind_of, step_number
from cs336_systems.profiling.overlap import activity, last_starts, waits_of
from cs336_systems.profiling.pictures import GREY, INK, OTHER, PAINTS, ROW, STYLE, Box, draw_boxes, page, save
from cs336_systems.profiling.timeline import phase_at, timeline
from cs336_systems.profiling.trace import Trace

FILLS = {
    **PAINTS,
    "wait": "#ffffff",
    "all-reduce": "#0072b2",
    "all-gather": "#a8447f",
    "reduce-scatter": "#d55e00",
    "broadcast": "#5b4a9c",
    "overlapped": "#2f9e44",
    "exposed": "#d6263b",
}
JOINING = "\\\\\\\\\\"  # the hatch while another rank has not joined
BLOCKED = "/////"  # the hatch while a CPU thread is blocked in a wait


def write_timeline(traces: Sequence[Trace], path: Path) -> list[Path]:
    """Write the picture of the last step that all ranks have; returns its path. Without such a step there is none."""
    common = set.intersection(*(set(steps_of(trace)) for trace in traces))
    if not common:
        return []
    wrapper = str(traces[0].ours.get("wrapper", "none"))
    what = f"{wrapper}, step {max(common)}" if wrapper != "none" else f"Step {max(common)}"
    title = f"{what} on {len(traces)} rank{'s' * (len(traces) > 1)}: computation and communication"
    save(draw_timeline(traces, max(common), title), path, title)
    return [path]


class Bar(NamedTuple):
    """A bar of the picture: [start, end) in nanoseconds since the epoch."""

    start: int
    end: int
    name: str
    kind: str  # its phase, a collective's verb, or the track's name
    label: str = ""
    joined: int = 0  # when the last rank joined
    posted: bool = False  # it may have ended earlier


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
        self.overlapped = intersection(self.communicating, what.computing)
        self.waits = within(Bar(span.start, span.end, span.name, "wait") for span in waits_of(trace))
        phases = within(Bar(s.start, s.end, s.name, s.name, s.name) for s in timeline(trace).phases)
        overlap = [Bar(*each, "overlapped", "overlapped") for each in self.overlapped]
        overlap += [Bar(*each, "exposed", "exposed") for each in subtraction(self.communicating, self.overlapped)]
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
    """Bars of the transformer blocks in order, forward and backward; adjacent spans of one block are merged."""
    found: list[Bar] = []
    for node in timeline(trace).nodes:
        if not (node.tag or node.span.name.startswith(ENGINE)):
            continue
        blocks = [name for name, kind in node.modules if kind_of(kind) == "block"]
        for name in blocks[-1:]:
            again = found and (found[-1].name, found[-1].kind) == (name, node.direction)
            start = found.pop().start if again else node.span.start
            found.append(Bar(start, node.end, name, node.direction, name))
    return found


def _compute(trace: Trace, window: Interval) -> dict[str, list[Bar]]:
    """Bars of the computation by stream, with the phase in which a CPU thread launched it."""
    phase_of = phase_at(timeline(trace).phases)
    result: dict[str, list[Bar]] = {}
    for span in activity(trace).compute:
        call = trace.calls.get(span.args.get("correlation"), span)
        if window[0] <= call.start < window[1]:
            track = f"stream {span.args.get('stream')}" if span.category == "kernel" else "operators"
            result.setdefault(track, []).append(Bar(span.start, span.end, span.name, phase_of(call.start)))
    return result


def _collective(flight: Flight, last: Mapping[int, int]) -> Bar:
    """Bar of a transfer: as long as the backend timed it; for a send or receive from launch to wait."""
    timed = bool(flight.transfers) and not flight.posted
    start = flight.transfers[0].start if timed else flight.start
    end = max(span.end for span in flight.transfers) if timed else flight.end
    joined = last.get(id(flight.transfers[0]) if timed else id(flight.launch), start)
    name = f"{flight.verb} {flight.number} {flight.label}".strip()
    return Bar(start, end, name, flight.verb, flight.label or flight.verb, min(max(joined, start), end), not timed)


@rc_context(STYLE)
def draw_timeline(traces: Sequence[Trace], step: int, title: str) -> Figure:
    """Draw a step that all ranks have."""
    moved = sorted(aligned(list(traces)), key=lambda trace: trace.rank)
    ranks = [StepTracks(trace, step, last_starts(moved)) for trace in moved]
    start, end = min(rank.start for rank in ranks), max(rank.end for rank in ranks)
    heights = [max(1, len(rank.tracks)) for rank in ranks]
    figure = page(140 + sum(ROW * height + 36 for height in heights))
    rows = figure.subplots(len(ranks), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, rank, height in zip(rows, ranks, heights, strict=True):
        axes.set(xlim=(0, max(1, end - start) / 1e6), ylim=(height - 0.5, -0.5))
        _draw_rank(axes, rank, start, end)
    clocks = "time in ms"
    if len(traces) > 1:
        bounds = [each.bound for each in offsets(list(traces)).values()]
        sure = [bound for bound in bounds if bound is not None]
        clocks += f", clocks aligned to ±{_ms(max(sure))}" if len(sure) == len(bounds) else ", clocks taken to agree"
    rows[-1].set_xlabel(clocks)
    legend = _legend(ranks)
    ncols = (len(legend) + 1) // 2
    figure.legend(handles=legend, title=plot_text(title), loc="outside upper left", alignment="left", ncols=ncols)
    return figure


def _legend(ranks: Sequence[StepTracks]) -> list[Patch | Line2D]:
    bars = [bar for rank in ranks for _, bars in rank.tracks for bar in bars]
    kinds, blue, red = {bar.kind for bar in bars} - {"wait"}, FILLS["all-reduce"], FILLS["exposed"]
    order = [kind for kind in [*FILLS, *sorted(kinds - {*FILLS})] if kind in kinds]
    legend: list[Patch | Line2D] = [Patch(color=FILLS.get(kind, OTHER), label=plot_text(kind)) for kind in order]
    if any(rank.waits for rank in ranks):
        legend.append(Patch(facecolor="white", edgecolor=red, hatch=BLOCKED, label="CPU thread waits"))
    if any(bar.joined > bar.start for bar in bars):
        legend.append(Patch(facecolor=blue, edgecolor="white", hatch=JOINING, label="until all ranks joined"))
    if any(bar.posted for bar in bars):
        legend.append(Patch(facecolor=OTHER, edgecolor=INK, label="ended here or earlier"))
    if any(rank.launches for rank in ranks):
        legend.append(Line2D([], [], color=INK, marker="|", ls="", label="launch of a collective"))
    return legend


def _draw_rank(axes: Axes, rank: StepTracks, start: int, end: int) -> None:
    communication, overlapped = length(rank.communicating), length(rank.overlapped)
    words = f"rank {rank.rank}: no communication"
    if communication:
        relation = "≤" if any(bar.posted for bar in rank.collectives) else "="
        words = f"rank {rank.rank}: {100 * overlapped / communication:.1f} % overlapped, communication {relation} "
        words += f"{_ms(communication)}, exposed {relation} {_ms(communication - overlapped)}"
    if rank.waits:
        words += f", CPU in waits = {_ms(length(union((wait.start, wait.end) for wait in rank.waits)))}"
    axes.set_title(words, loc="left", size=12)
    names = [name for name, _ in rank.tracks]
    labels = [plot_text("" if name in names[:row] else name) for row, name in enumerate(names)]
    axes.set_yticks(range(len(names)), labels=labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x")
    for row, (name, bars) in enumerate(rank.tracks):
        draw_boxes(axes, (box for bar in bars for box in _boxes(bar, name, row, start, end)))
    launches = [(time - start) / 1e6 for time in rank.launches]
    axes.plot(launches, [0.38] * len(launches), "|", color=INK, markersize=4, zorder=4)


def _boxes(bar: Bar, track: str, row: int, start: int, end: int) -> Iterator[Box]:
    """The box of a bar, and over it the time until the last rank had joined."""

    def place(first: int, last: int) -> tuple[float, float, float]:
        first, last = max(first, start), min(last, end)
        return (first - start) / 1e6, (last - first) / 1e6, row

    tip = f"{bar.name}: {_ms(bar.end - bar.start)}"
    if bar.joined > bar.start:
        tip += f", of which {_ms(bar.joined - bar.start)} until the last rank had joined"
    name = bar.label.removeprefix("gradient of ").removesuffix(".weight").split(",")[0]
    fill = "#ffffff" if track == "block" else FILLS.get(bar.kind, OTHER)
    edges = {"block": GREY, "overlap": "none", "waits": FILLS["exposed"], "collectives": INK if bar.posted else "white"}
    edge = edges.get(track, fill)
    labels, hatch = (name, name.split(".")[-1]), BLOCKED if track == "waits" else ""
    early = bar.start < bar.joined < (bar.start + bar.end) / 2  # then the label is right of the hatch
    yield Box(*place(bar.start, bar.end), fill, tip, () if early else labels, edge, hatch)
    if bar.joined > bar.start:
        yield Box(*place(bar.start, bar.joined), "none", tip, (), "white", JOINING)
    if early:
        yield Box(*place(bar.joined, bar.end), fill, tip, labels, edge)


def _ms(time: int) -> str:
    return f"{time / 1e6:.3g} ms" if time < 999_500_000 else f"{time / 1e6:,.0f} ms"
