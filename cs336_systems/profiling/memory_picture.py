"""The memory timeline as a picture: stacked areas by category over time, with phases and the peak."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.host.console import format_bytes
from cs336_systems.profiling.memory import MemoryTimeline, memory_timeline
from cs336_systems.profiling.pictures import GREY, INK, OTHER, PAINTS, STYLE, Box, draw_boxes, page, save
from cs336_systems.profiling.trace import Trace

COLUMNS = 1000  # of equal time
FILLS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999")  # of CATEGORIES
LEGEND: dict[str, Any] = {"alignment": "left", "title_fontsize": 12}
UNITS = ("B", "KiB", "MiB", "GiB")


def write_memory_picture(trace: Trace, path: Path) -> list[Path]:
    """Write a rank's memory over time, of a GPU if anything was allocated there, else of the CPU; returns the path. A
    trace without allocations has no picture."""
    memory = memory_timeline(trace)
    if len(memory.times) == 1:
        return []
    title = f"Memory alive over time: rank {trace.rank} of {trace.world_size}, {memory.device.upper()}"
    save(draw_memory(memory, title), path, title)
    return [path]


def thin(memory: MemoryTimeline, columns: int, end: int) -> list[tuple[int, int]]:
    """(time, index) of the highest level in each of as many columns, where it changes: a peak is never lost."""
    result: list[tuple[int, int]] = []
    for first, last in pairwise(np.linspace(memory.times[0], end, columns + 1, dtype=np.int64).tolist()):
        highest = memory.highest_in(first, last)
        if not result or memory.amounts[highest] != memory.amounts[result[-1][1]]:
            result.append((first, highest))
    return [*result, (end, result[-1][1])]


@rc_context(STYLE)
def draw_memory(memory: MemoryTimeline, title: str) -> Figure:
    """The picture of one rank's memory on one device."""
    start, peak = memory.times[0], memory.peak
    end = max([memory.times[-1], start + 1, *(each.end for each in (*memory.phases, *memory.steps))])
    power = min(max(peak.bit_length() - 1, 0) // 10, 3)
    figure = page(600)
    strips, axes = figure.subplots(2, sharex=True, height_ratios=(1, 10))
    strips.set_title(title, loc="left", size=17)
    strips.set(xlim=(0, (end - start) / 1e6), ylim=(1.5, -0.5))
    strips.axis("off")
    boxes = list[Box]()
    for row, spans in enumerate((memory.steps, memory.phases)):
        for each in spans:
            tip = f"{each.name}: {each.duration / 1e6:.2f} ms, peak {format_bytes(memory.peak_in(each))}"
            left, fill = (each.start - start) / 1e6, PAINTS.get(each.name, OTHER)
            boxes.append(Box(left, each.duration / 1e6, row, fill, tip, (each.name,), "white"))
    draw_boxes(strips, boxes)
    axes.set(xlabel="time in ms", ylim=(0, max(1.0, peak * 1.08) / 1024**power))
    axes.yaxis.set_major_formatter(f"{{x:g}} {UNITS[power]}")
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    times, indices = zip(*thin(memory, COLUMNS, end), strict=True)
    stacks = np.array([memory.amounts[index] for index in indices]).T / 1024**power
    shares = [f"{name} {format_bytes(nbytes)} ({nbytes / max(1, peak):.0%})" for name, nbytes in memory.at_peak.items()]
    areas = axes.stackplot(
        (np.array(times) - start) / 1e6, stacks, labels=shares, colors=FILLS, step="post", linewidth=0
    )
    for area, (name, nbytes) in zip(areas, memory.at_peak.items(), strict=True):
        area.set_gid(f"tip {name}: {nbytes:,} bytes at the peak")
    for phase in memory.phases:
        axes.axvline((phase.start - start) / 1e6, color=GREY, linewidth=0.6, linestyle=":")
    axes.axhline(peak / 1024**power, color=INK, linewidth=1, linestyle="--")
    parts = f"peak {peak:,} bytes\nat {(memory.peak_time - start) / 1e6:.2f} ms"
    figure.legend(handles=areas[::-1], title=parts, **LEGEND, loc="outside right upper")
    peaks = memory.phase_peaks().items()
    phases = [Patch(color=PAINTS[name], label=f"{name} {format_bytes(memory.totals[index])}") for name, index in peaks]
    figure.legend(handles=phases, title="peak of each phase", **LEGEND, loc="outside right lower")
    return figure
