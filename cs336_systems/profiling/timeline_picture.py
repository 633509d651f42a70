"""A picture of one step: what every rank computed, what it sent meanwhile, and where it stood still.

A group of tracks for each rank on one axis of time, with the ranks' clocks aligned. The strip at the bottom of a group
is what the overlap is computed from: communication is green where it hides behind computation and red where not.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.errors import UserError
from cs336_systems.host.text import plot_text
from cs336_systems.profiling.align import aligned, offsets
from cs336_systems.profiling.intervals import length, union
from cs336_systems.profiling.overlap import last_starts
from cs336_systems.profiling.pictures import CHARACTER, INK, PAINTS, WIDTH, Picture, fitting, styled, swatch
from cs336_systems.profiling.step_tracks import OPERATORS, Box, StepTracks, steps_of
from cs336_systems.profiling.trace import Trace

LEFT, RIGHT, TOP = 130, 200, 124  # margins, in pixels
PLOT = WIDTH - LEFT - RIGHT
SMALL = 10  # size of the letters on bars
PHASE, TRACK, STRIP, GAP = 22, 15, 7, 3  # heights
OTHER, EDGE = "#777777", "#999999"
BRIEF = {"forward": "fwd", "backward": "bwd", "synchronise": "sync", "optimizer": "opt"}
VERBS = {"all-reduce": "#0072b2", "all-gather": "#a8447f", "reduce-scatter": "#d55e00", "broadcast": "#5b4a9c"}
HIDDEN, EXPOSED = "#2f9e44", "#d6263b"
BLOCKED: dict[str, Any] = {"hatch": "/////", "edgecolor": EXPOSED}
JOINING: dict[str, Any] = {"hatch": "\\\\\\\\\\", "edgecolor": "#ffffffc0"}


def write_timeline(traces: Sequence[Trace], path: Path) -> list[Path]:
    """Write the picture of the last step that all ranks have; returns its path. Raises UserError if there is none."""
    draw_timeline(traces).save(path)
    return [path]


@styled()
def draw_timeline(traces: Sequence[Trace]) -> Picture:
    """The picture of the last step that all ranks have. Raises UserError if there is none."""
    common = set.intersection(*(set(steps_of(trace)) for trace in traces)) if traces else set()
    if not common:
        raise UserError("the traces share no step: profile all ranks over the same steps")
    step = max(common)
    moved = sorted(aligned(list(traces)), key=lambda trace: trace.rank)
    ranks = [StepTracks(trace, step, last_starts(moved)) for trace in moved]
    start, end = min(rank.start for rank in ranks), max(rank.end for rank in ranks)
    wrapper = str(traces[0].ours.get("wrapper", ""))
    what = f"{wrapper}, step {step}" if wrapper else f"Step {step}"
    count = "1 rank" if len(traces) == 1 else f"{len(traces)} ranks"
    tracks = [len(rank.compute) + len(rank.bars) + bool(rank.blocks) + rank.waits_apart for rank in ranks]
    height = sum(20 + PHASE + GAP + number * (TRACK + GAP) + STRIP + 18 for number in tracks)
    picture = Picture(TOP + height + 30, f"{what} on {count}: computation and communication")
    if len(traces) > 1:
        bounds = [each.bound for each in offsets(list(traces)).values()]
        sure = [bound for bound in bounds if bound is not None]
        words = f"clocks aligned to ±{_ms(max(sure))} ms" if len(sure) == len(bounds) else "clocks taken to agree"
        picture.text(WIDTH - 12, 26, words, 11, ha="right")
    _draw_legend(picture, ranks)
    plot = _Plot(picture, start, max(end, start + 1), height)
    for rank in ranks:
        plot.draw(rank)
    plot.axes.set_yticks(list(plot.names), labels=map(plot_text, plot.names.values()), size=11)
    return picture


def _draw_legend(picture: Picture, ranks: Sequence[StepTracks]) -> None:
    """Two lines: computation, and pauses of it; the collectives that occur."""
    phases = [phase for phase in PAINTS if any(box.kind == phase for rank in ranks for box in rank.phases)]
    above = {phase: swatch(PAINTS[phase][0]) for phase in phases}
    if any(rank.waits for rank in ranks):
        above["CPU thread stands still in a wait"] = swatch("white", **BLOCKED)
    bars = [bar for rank in ranks for track in rank.bars for bar in track]
    below = {verb: swatch(VERBS.get(verb, OTHER)) for verb in sorted({bar.kind for bar in bars})}
    if bars:
        below |= {"another rank has not joined yet": swatch(VERBS["all-reduce"], **JOINING)}
        below |= {"hidden": swatch(HIDDEN), "exposed": swatch(EXPOSED)}
    picture.legend(40, above, size=11)
    picture.legend(60, below, size=11)
    notes = ["Ticks below a phase: a collective was launched."] if any(rank.launches for rank in ranks) else []
    if any(bar.posted for bar in bars):
        notes.append("Outlined bars last from launch to the end of the wait; the transfer may be over sooner.")
    picture.text(12, 90, " ".join(notes), 11)


class _Plot:
    """One axis of time, in ms from the start of the step, and below each other in pixels the tracks of all ranks."""

    def __init__(self, picture: Picture, start: int, end: int, height: float) -> None:
        self.picture, self.start, self.end = picture, start, end
        self.y = 0.0  # the top of what is drawn next
        self.names: dict[float, str] = {}  # of tracks, by where they stand
        self.axes = picture.axes(LEFT, TOP, PLOT, height)
        self.axes.set(xlim=(0, (end - start) / 1e6), ylim=(height, 0))
        self.axes.locator_params(axis="x", nbins=10, steps=[1, 2, 5, 10])
        self.axes.xaxis.set_major_formatter("{x:g}")
        self.axes.tick_params(axis="x", top=True, labeltop=True, length=0, labelsize=11)
        self.axes.tick_params(axis="y", length=0)
        self.axes.spines[:].set_visible(False)
        self.axes.grid(axis="x")
        self.axes.set_axisbelow(True)
        picture.text(LEFT - 30, TOP - 7, "time in ms", 11, ha="right")

    def x(self, time: int) -> float:
        return (min(max(time, self.start), self.end) - self.start) / 1e6

    def pixels(self, start: int, end: int) -> float:
        return (self.x(end) - self.x(start)) * 1e6 / (self.end - self.start) * PLOT

    def box(self, start: int, end: int, fill: str, tip: str = "", height: float = TRACK, **style: Any) -> None:
        """A rectangle at the current y, as wide as the interval, or just wide enough to be seen."""
        least = 0.5 / PLOT * (self.end - self.start) / 1e6
        left = min(self.x(start), self.x(self.end) - least)
        width = max(self.x(end) - left, least)
        self.picture.box(self.axes, left, self.y, width, height, fill, tip, **style)

    def boxes(self, boxes: Iterable[Box], fill: str = "", **style: Any) -> None:
        """Some rectangles on the current track, in the colours of their phases if no `fill` is given."""
        for each in boxes:
            tip = f"{each.name}: {_ms(each.end - each.start)} ms"
            self.box(each.start, each.end, fill or PAINTS.get(each.kind, PAINTS["other"])[0], tip, **style)

    def text(self, start: int, end: int, words: str, **style: Any) -> None:
        middle = (self.x(start) + self.x(end)) / 2
        self.axes.text(middle, self.y + 11, plot_text(words), size=SMALL, ha="center", **style)

    def next_track(self, name: str, height: float = TRACK) -> None:
        """Go below the track that was drawn, and name it."""
        self.names[self.y + height / 2] = name
        self.y += height + GAP

    def draw(self, rank: StepTracks) -> None:
        """All tracks of one rank, from the current y."""
        self.axes.plot([-118 / PLOT, 1 + (RIGHT - 12) / PLOT], [self.y + 2] * 2, color=INK, linewidth=1,
                       clip_on=False, transform=self.axes.get_yaxis_transform())  # fmt: skip
        self.picture.text(12, TOP + self.y + 16, f"rank {rank.rank}", 13)
        self.y += 20
        self._figures(rank, TOP + self.y)
        self._phases(rank)
        if rank.blocks:
            self.boxes(rank.blocks, "white", edgecolor=EDGE, linewidth=0.7)
            for block in rank.blocks:
                if words := shortened(block.name, self.pixels(block.start, block.end) - 4):
                    self.text(block.start, block.end, words)
            self.next_track("block")
        for name, boxes in sorted(rank.compute.items()):
            self.boxes(boxes)
            self.boxes(rank.waits if name == OPERATORS else (), "white", **BLOCKED)
            self.next_track(name)
        if rank.waits_apart:
            self.boxes(rank.waits, "white", **BLOCKED)
            self.next_track("waits (CPU)")
        for number, bars in enumerate(rank.bars):
            for bar in bars:
                self._bar(bar)
            self.next_track("" if number else "collectives")
        for intervals, colour in ((rank.communicating, EXPOSED), (rank.hidden, HIDDEN)):
            for start, end in intervals:
                self.box(start, end, colour, height=STRIP)
        self.next_track("hidden, exposed" if rank.communicating else "", STRIP)
        self.y += 18 - GAP

    def _phases(self, rank: StepTracks) -> None:
        """Phases, and a tick wherever a collective was launched."""
        for phase in rank.phases:
            self.boxes([phase], PAINTS.get(phase.kind, PAINTS["other"])[1], height=PHASE)
            room = self.pixels(phase.start, phase.end) - 4
            names = (phase.name, BRIEF.get(phase.name, ""))
            if words := next((words for words in names if 11 * CHARACTER * len(words) < room), ""):
                left = self.x(phase.start) + 4 * (self.end - self.start) / 1e6 / PLOT
                self.axes.text(left, self.y + 14, words, size=11)
        times = [self.x(launch) for launch in rank.launches]
        self.axes.vlines(times, self.y + PHASE - 5, self.y + PHASE, color=INK, linewidth=1)
        self.next_track("phase", PHASE)

    def _bar(self, bar: Box) -> None:
        tip = f"{bar.detail}: {_ms(bar.end - bar.start)} ms"
        if bar.joined > bar.start:
            tip += f", of which {_ms(bar.joined - bar.start)} ms until the last rank had joined"
        colour = VERBS.get(bar.kind, OTHER)
        self.box(bar.start, bar.end, colour, tip, edgecolor=INK if bar.posted else "white", linewidth=1)
        if bar.joined > bar.start:
            self.box(bar.start, bar.joined, "none", **JOINING)
        whole, rest = self.pixels(bar.start, bar.end) - 4, self.pixels(bar.joined, bar.end) - 4
        if words := shortened(bar.name, rest):
            self.text(bar.joined, bar.end, words, color="white")
        elif words := shortened(bar.name, whole if rest < whole / 2 else 0):
            ground = {"facecolor": colour, "edgecolor": "none", "pad": 0.5}
            self.text(bar.start, bar.end, words, color="white", bbox=ground)

    def _figures(self, rank: StepTracks, y: float) -> None:
        """At the right: how much of this step's communication was hidden."""
        at, communication, hidden = WIDTH - RIGHT + 12, length(rank.communicating), length(rank.hidden)
        if not communication:
            self.picture.text(at, y + 14, "no communication")
            return
        relation = "≤" if any(bar.posted for track in rank.bars for bar in track) else "="
        self.picture.text(at, y + 14, f"{100 * hidden / communication:.1f} % overlapped", 13)
        times = {f"communication {relation}": communication, f"exposed {relation}": communication - hidden}
        if rank.waits:
            times["CPU in waits ="] = length(union((wait.start, wait.end) for wait in rank.waits))
        for number, (words, time) in enumerate(times.items()):
            self.picture.text(at, y + 31 + 14 * number, f"{words} {_ms(time)} ms", 11)


def shortened(label: str, room: float) -> str:
    """A collective's label in as many pixels: `bucket 3, from x` -> `bucket 3` -> `b3`; of a weight's name the end."""
    if label.startswith("bucket "):
        short = label.split(",")[0]
        choices = [label, short, short.replace("bucket ", "b")]
    else:
        parts = label.removeprefix("gradient of ").removesuffix(".weight").split(".")
        choices = [label, *(".".join(parts[i:]) for i in range(len(parts)))]
    cut = fitting(label, room, SMALL) if " " in label else ""
    return next((words for words in choices if len(words) * CHARACTER * SMALL <= room), cut if len(cut) > 5 else "")


def _ms(time: int) -> str:
    return f"{time / 1e6:.3g}" if time < 999_500_000 else f"{time / 1e6:,.0f}"
