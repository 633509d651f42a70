"""The memory timeline as a picture: stacked areas by category over time, with phases and the peak."""

from pathlib import Path

from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import plot_text
from cs336_systems.profiling.labels import CATEGORIES
from cs336_systems.profiling.memory import MemoryTimeline, memory_timeline
from cs336_systems.profiling.pictures import FAINT, GREY, INK, PAINTS, Picture, fitting, styled
from cs336_systems.profiling.trace import Trace

LEFT, TOP, COLUMNS, HEIGHT = 90, 96, 1000, 420  # the plot, in pixels
STRIP = 20  # height of the strips of steps and phases
FILLS = dict(zip(CATEGORIES, ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999"), strict=True))
UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}


def write_memory_picture(trace: Trace, path: Path) -> list[Path]:
    """Write a rank's memory over time, of a GPU if anything was allocated there, else of the CPU; returns the path. A
    trace without allocations has no picture."""
    memory = memory_timeline(trace)
    if len(memory.times) == 1:
        return []
    draw_memory(trace, memory).save(path)
    return [path]


def thin(memory: MemoryTimeline, columns: int, start: int, end: int) -> list[tuple[int, int]]:
    """(column, level) for as many columns of equal time in [start, end]: the highest level that held in each.

    Only columns in which that changes are listed, so a peak is never lost and a plateau costs one entry.
    """
    result: list[tuple[int, int]] = []
    span = max(1, end - start)
    for column in range(columns):
        first, last = start + span * column // columns, start + span * (column + 1) // columns
        # A column's end belongs to the next one, except the last column's.
        highest = memory.highest_in(first, last - 1 if column < columns - 1 and last > first else last)
        if not result or memory.amounts[highest] != memory.amounts[result[-1][1]]:
            result.append((column, highest))
    return result


@styled()
def draw_memory(trace: Trace, memory: MemoryTimeline) -> Picture:
    """The picture of one rank's memory on one device."""
    where = f"rank {trace.rank} of {trace.world_size}, {memory.device.upper()}"
    picture = Picture(TOP + HEIGHT + 56, f"Memory alive over time: {where}")
    start, peak = memory.times[0], memory.peak
    end = max([memory.times[-1], start + 1, *(each.end for each in (*memory.phases, *memory.steps))])
    scale, unit = (1e9, "s") if end - start >= 10**10 else (1e6, "ms")
    size = next((each for each in UNITS if peak >= each), 1)
    axes = picture.axes(LEFT, TOP, COLUMNS, HEIGHT)
    axes.set(xlim=(0, (end - start) / scale), ylim=(0, max(1.0, peak * 1.08) / size), xlabel=f"time, {unit}")
    axes.yaxis.set_major_formatter(f"{{x:g}} {UNITS[size]}")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    levels = thin(memory, COLUMNS, start, end)
    levels.append((COLUMNS, levels[-1][1]))
    times = [(end - start) / scale * column / COLUMNS for column, _ in levels]
    stacks = [[memory.amounts[level][i] / size for _, level in levels] for i in range(len(CATEGORIES))]
    areas = axes.stackplot(times, stacks, colors=list(FILLS.values()), step="post", linewidth=0)
    for area, category in zip(areas, CATEGORIES, strict=True):
        area.set_gid(picture.tooltip(category))
    _draw_strips(picture, memory, start, end)
    for time in (time for phase in memory.phases for time in (phase.start, phase.end)):
        axes.axvline((time - start) / scale, color=GREY, linewidth=0.6, linestyle=(0, (2, 4)))
    axes.axhline(peak / size, color=INK, linewidth=1, linestyle=(0, (6, 4)))
    time = memory.peak_time - start
    late = time > (end - start) / 2
    words, place, frame = f"peak {format_bytes(peak)} at {time / 1e6:.2f} ms", (-6 if late else 6, 7), "offset points"
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    at = (time / scale, peak / size)
    axes.annotate(words, at, xytext=place, textcoords=frame, ha="right" if late else "left", bbox=ground)
    _draw_legend(picture, memory)
    return picture


def _draw_strips(picture: Picture, memory: MemoryTimeline, start: int, end: int) -> None:
    """Steps above phases, each with its duration and peak as a tooltip."""
    strip = picture.axes(LEFT, TOP - 2 * STRIP - 6, COLUMNS, 2 * STRIP + 2)
    strip.set(xlim=(0, end - start), ylim=(2 * STRIP + 2, 0))
    strip.axis("off")
    for row, spans in enumerate((memory.steps, memory.phases)):
        for each in spans:
            fill = PAINTS.get(each.name, ("", FAINT))[1]
            tip = f"{each.name}: {each.duration / 1e6:.2f} ms, peak {format_bytes(memory.peak_in(each))}"
            at, top, width = each.start - start, row * (STRIP + 2), each.duration
            picture.box(strip, at, top, width, STRIP, fill, tip, edgecolor=GREY, linewidth=0.5)
            # A word cut to a few letters helps nobody; the strip's colour is in the legend.
            if fitting(each.name, width / (end - start) * COLUMNS, 11) == each.name:
                strip.text(at + width / 2, top + 14, plot_text(each.name), size=11, ha="center")


def _draw_legend(picture: Picture, memory: MemoryTimeline) -> None:
    """At the right: what the peak consists of, the peak of each phase, and the bytes at both ends."""
    side = picture.axes(LEFT + COLUMNS + 20, TOP, 270, HEIGHT)
    side.set(xlim=(0, 270), ylim=(HEIGHT, 0))
    side.axis("off")
    side.text(0, 10, f"at the peak: {memory.peak:,} bytes")
    parts = reversed(memory.at_peak.items())
    lines = [(name, nbytes, FILLS[name], f"{nbytes / max(1, memory.peak):.0%}") for name, nbytes in parts]
    peaks = {name: memory.totals[index] for name, index in memory.phase_peaks().items()}
    lines += [("the peak in each phase", -1, "", "")] if peaks else []
    lines += [(name, nbytes, PAINTS.get(name, ("", FAINT))[1], "") for name, nbytes in peaks.items()]
    ends = (memory.totals[0], memory.totals[-1])
    lines += [("alive", -1, "", ""), ("at the start", ends[0], "", ""), ("at the end", ends[1], "", "")]
    y = 10
    for name, nbytes, fill, share in lines:
        is_head = nbytes < 0
        y += 44 if is_head else 24
        side.text(0 if is_head else 22, y, plot_text(name))
        if not is_head:
            side.text(220, y, format_bytes(nbytes), ha="right")
            side.text(265, y, share, ha="right")
        if fill:
            picture.box(side, 0, y - 11, 14, 14, fill, f"{name}: {nbytes:,} bytes", edgecolor=GREY, linewidth=0.5)
