"""The memory timeline as a picture: stacked areas by category over time, with phases and the peak."""

import math
from itertools import accumulate
from pathlib import Path

from cs336_systems.console import format_bytes
from cs336_systems.profiling.allocations import Period, Timeline, timeline
from cs336_systems.profiling.held import CATEGORIES
from cs336_systems.profiling.memory_table import memory_markdown
from cs336_systems.profiling.svg import FAINT, INK, PAINTS, PAPER, Drawing, fitting, round_ticks
from cs336_systems.profiling.trace import Trace

LEFT, TOP, WIDTH, HEIGHT = 90, 96, 1000, 420  # the plot, in pixels
SIDE, FOOT = 300, 56
FILLS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "other": "#999999",
}
BANDS = {phase: pale for phase, (_, pale) in PAINTS.items()}
STRIP = 20  # height of the strips of steps and phases


def write_memory(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write a rank's memory as `<stem>.svg` and its tables as `<stem>.md`; a trace without allocations has no picture.

    The device is a GPU if anything was allocated there, else the CPU.
    """
    found = timeline(trace)
    tables, picture = folder / f"{stem}.md", folder / f"{stem}.svg"
    tables.write_text(memory_markdown(trace, found), encoding="utf-8")
    if not found.blocks:
        return [tables]
    draw_memory(trace, found).save(picture)
    return [picture, tables]


def thin(timeline: Timeline, columns: int, start: int, end: int) -> list[tuple[int, int]]:
    """(column, level) for as many columns of equal time in [start, end]: the highest level that held in each.

    Only columns in which that changes are listed, so a peak is never lost and a plateau costs one entry.
    """
    result: list[tuple[int, int]] = []
    span = max(1, end - start)
    for column in range(columns):
        first, last = start + span * column // columns, start + span * (column + 1) // columns
        # A column's end belongs to the next one, except the last column's.
        highest = timeline.highest_in(first, last - 1 if column < columns - 1 and last > first else last)
        if not result or timeline.amounts[highest] != timeline.amounts[result[-1][1]]:
            result.append((column, highest))
    return result


def draw_memory(trace: Trace, timeline: Timeline) -> Drawing:
    """The picture of one rank's memory on one device."""
    where = f"rank {trace.rank} of {trace.world_size}, {timeline.device.upper()}"
    picture = Drawing(LEFT + WIDTH + SIDE, TOP + HEIGHT + FOOT, f"Memory of {where}")
    start = timeline.times[0]
    end = max([timeline.times[-1], *(each.end for each in (*timeline.phases, *timeline.steps))])
    picture.text(LEFT, 28, f"Memory alive over time: {where}", 16)
    plot = _Plot(picture, timeline, start, end)
    plot.axes()
    plot.areas()
    plot.strips()
    plot.peak()
    plot.legend()
    return picture


class _Plot:
    """Where moments and bytes lie in the picture."""

    def __init__(self, picture: Drawing, timeline: Timeline, start: int, end: int) -> None:
        self.picture, self.timeline, self.start, self.end = picture, timeline, start, max(end, start + 1)
        self.top = max(1.0, timeline.peak * 1.08)

    def x(self, time: int) -> float:
        return LEFT + WIDTH * (time - self.start) / (self.end - self.start)

    def y(self, nbytes: float) -> float:
        return TOP + HEIGHT * (1 - nbytes / self.top)

    def axes(self) -> None:
        unit = next(each for each in (2**30, 2**20, 2**10, 1) if self.timeline.peak >= each or each == 1)
        name = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}[unit]
        for tick in round_ticks(self.top / unit):
            y = self.y(tick * unit)
            self.picture.line(LEFT, y, LEFT + WIDTH, y, FAINT)
            self.picture.text(LEFT - 8, y + 4, f"{tick:g} {name}", anchor="end")
        seconds = self.end - self.start >= 10**10
        for tick in round_ticks((self.end - self.start) / (1e9 if seconds else 1e6)):
            x = self.x(self.start + round(tick * (1e9 if seconds else 1e6)))
            self.picture.line(x, TOP + HEIGHT, x, TOP + HEIGHT + 5)
            self.picture.text(x, TOP + HEIGHT + 19, f"{tick:g}", anchor="middle")
        self.picture.text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "time, s" if seconds else "time, ms", anchor="middle")

    def areas(self) -> None:
        """Each category's area reaches down to the axis, and those below it cover the rest: half the points."""
        levels = thin(self.timeline, WIDTH, self.start, self.end)
        heights = {index: list(accumulate(self.timeline.amounts[index])) for _, index in levels}
        bottom = TOP + HEIGHT
        for place in reversed(range(len(CATEGORIES))):
            points = [(float(LEFT), float(bottom))]
            for column, index in levels:
                y = self.y(heights[index][place])
                if y != points[-1][1]:
                    points += [(LEFT + column, points[-1][1]), (LEFT + column, y)]
            points += [(LEFT + WIDTH, points[-1][1]), (LEFT + WIDTH, bottom)]
            self.picture.area(points, FILLS[CATEGORIES[place]], CATEGORIES[place])
        self.picture.line(LEFT, bottom, LEFT + WIDTH, bottom)
        self.picture.line(LEFT, TOP, LEFT, bottom)

    def strips(self) -> None:
        for step in self.timeline.steps:
            self._strip(step, TOP - 2 * STRIP - 6, "#eeeeee")
        drawn = -math.inf
        for phase in self.timeline.phases:
            self._strip(phase, TOP - STRIP - 4, BANDS.get(phase.name, FAINT))
            for x in (self.x(phase.start), self.x(phase.end)):
                if x > drawn + 4:  # else the last phase's end marks it well enough
                    self.picture.line(x, TOP - STRIP - 4, x, TOP + HEIGHT, "#888888", "2 4")
                    drawn = x

    def _strip(self, period: Period, y: float, fill: str) -> None:
        x, width = self.x(period.start), self.x(period.end) - self.x(period.start)
        most = format_bytes(self.timeline.peak_in(period.start, period.end))
        hover = f"{period.name}: {(period.end - period.start) / 1e6:.2f} ms, peak {most}"
        self.picture.rect(x, y, width, STRIP, fill, hover, "#888888")
        # A word cut to a few letters helps nobody; the strip's colour is in the legend.
        if (words := fitting(period.name, width, 11)) == period.name:
            self.picture.text(x + width / 2, y + 14, words, 11, "middle")

    def peak(self) -> None:
        time, nbytes = self.timeline.peak_time, self.timeline.peak
        x, y = self.x(time), self.y(nbytes)
        words = f"peak {format_bytes(nbytes)} at {(time - self.start) / 1e6:.2f} ms"
        self.picture.line(LEFT, y, LEFT + WIDTH, y, INK, "6 4")
        self.picture.line(x, y - 6, x, y + 6, INK)
        anchor, shift = ("start", 6) if x < LEFT + WIDTH / 2 else ("end", -6)
        width = len(words) * 7.2 + 8
        left = x + shift - 4 if anchor == "start" else x + shift - width + 4
        self.picture.rect(left, y - 22, width, 17, PAPER)
        self.picture.text(x + shift, y - 9, words, 12, anchor)

    def legend(self) -> None:
        level = self.timeline.amounts[self.timeline.peak_index]
        self._heading(10, f"at the peak: {self.timeline.peak:,} bytes")
        y = 10
        for category, nbytes in reversed(list(zip(CATEGORIES, level, strict=True))):
            y += 24
            self._entry(y, category, nbytes, FILLS[category], "none", f"{nbytes / max(1, self.timeline.peak):.0%}")
        peaks: dict[str, int] = {}
        for phase in self.timeline.phases:
            peaks[phase.name] = max(peaks.get(phase.name, 0), self.timeline.peak_in(phase.start, phase.end))
        if peaks:
            y += 44
            self._heading(y, "the peak in each phase")
        for name, nbytes in peaks.items():
            y += 24
            self._entry(y, name, nbytes, BANDS.get(name, FAINT), "#888888")
        y += 44
        self._heading(y, "alive")
        self._entry(y + 24, "at the start", self.timeline.before)
        self._entry(y + 48, "at the end", self.timeline.totals[-1])

    def _heading(self, y: float, words: str) -> None:
        self.picture.text(LEFT + WIDTH + 20, TOP + y, words)

    def _entry(
        self, y: float, name: str, nbytes: int, fill: str = PAPER, stroke: str = "none", share: str = ""
    ) -> None:
        x, y = LEFT + WIDTH + 20, TOP + y
        self.picture.rect(x, y - 11, 14, 14, fill, f"{name}: {nbytes:,} bytes", stroke)
        self.picture.text(x + 22, y, name)
        self.picture.text(x + 220, y, format_bytes(nbytes), anchor="end")
        self.picture.text(x + 265, y, share, anchor="end")
