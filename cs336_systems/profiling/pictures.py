"""SVG pictures by matplotlib: boxes with tooltips and with labels where they fit; the flame graph, and the memory.

Text is not converted to paths, and the same numbers give the same bytes.
"""

import re
import warnings
from collections.abc import Iterable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import plot_text, printable
from cs336_systems.profiling.flame import Frame, flames
from cs336_systems.profiling.memory import MemoryTimeline, memory_timeline
from cs336_systems.profiling.timeline import Sort, timeline
from cs336_systems.profiling.trace import DEVICE, Trace

# Phases in colours that are distinct in all common forms of colour vision (after Okabe and Ito 2008).
PAINTS = {"forward": "#56B4E9", "backward": "#E69F00", "synchronise": "#DD92BD", "optimizer": "#3DB892"}
OTHER = "#C4C4C4"
INK, GREY = "#222222", "#888888"
WIDTH, ROW, SIZE = 1400, 19, 12  # pixels of a picture, of a row of boxes, and of letters
MARGIN = 160  # pixels at the sides of the axes, at most
CHARACTER = 0.6  # width of a character of DejaVu Sans Mono, over its size
STYLE: dict[str, Any] = {  # of `@rc_context(STYLE)`, around all that draws
    "svg.fonttype": "none",
    "svg.hashsalt": "cs336_systems",
    "font.family": "monospace",
    "font.size": SIZE,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "figure.constrained_layout.h_pad": 0.1,
    "hatch.linewidth": 2,
    "legend.frameon": False,
    "legend.title_fontsize": 17,
}
FLAME_FILLS = {**PAINTS, "communication": PAINTS["synchronise"], "other": OTHER}
PALE = {"forward": "#C4E4F7", "backward": "#F7DEA8", "optimizer": "#B5E4D4", "communication": "#F2D3E4"}  # of operators
CLOCK = {"cpu": "time on the CPU", "device": "time of the kernels launched"}
# A class behind a module, the namespace before an operator: left out where room is short.
EXTRAS = re.compile(r" \([A-Z]\w*\)$|^(?:\w+::)+")
COLUMNS = 1000  # of equal time
MEMORY_FILLS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999")  # of CATEGORIES
LEGEND: dict[str, Any] = {"alignment": "left", "title_fontsize": 12}
UNITS = ("B", "KiB", "MiB", "GiB")


class Box(NamedTuple):
    """A rectangle in a row, in the units of the axes."""

    left: float
    width: float
    row: float
    fill: str
    tip: str = ""  # tooltip
    labels: tuple[str, ...] = ()  # the first that fits into the box is written in it
    edge: str = ""
    hatch: str = ""


def page(height: float) -> Figure:
    """An empty picture of WIDTH x height pixels."""
    return Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")


def draw_boxes(axes: Axes, boxes: Iterable[Box]) -> None:
    """Draw boxes in axes whose limits are set."""
    start, end = axes.get_xlim()
    character = SIZE * CHARACTER / (WIDTH - MARGIN) * (end - start)
    for box in boxes:
        shape = Rectangle((box.left, box.row - 0.44), box.width, 0.88, clip_on=False, in_layout=False)
        shape.set(facecolor=box.fill, edgecolor=box.edge or box.fill, hatch=box.hatch, linewidth=0.6)
        shape.set_gid("tip " + printable(box.tip, keep="\n"))
        axes.add_artist(shape)
        if words := next((each for each in box.labels if (len(each) + 1) * character <= box.width), ""):
            ink = "white" if sum(to_rgb(box.fill)) < 1.5 else INK
            ground = {"facecolor": box.fill, "edgecolor": "none", "pad": 0.5}
            left = box.left + character / 2
            axes.text(left, box.row, plot_text(words), va="center_baseline", color=ink, bbox=ground, in_layout=False)


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a picture as SVG. Artists' ids that begin with "tip " become tooltips."""
    file, metadata = StringIO(), {"Date": None, "Creator": None, "Title": printable(title)}
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may have any character; the viewer's fonts draw them
        figure.savefig(file, format="svg", metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = re.sub(r"""<g id=(["'])tip (.*?)\1>""", r"<g><title>\2</title>", file.getvalue(), flags=re.DOTALL)
    path.write_text(svg, encoding="utf-8")


def write_flame_pictures(trace: Trace, folder: Path) -> list[Path]:
    """Write `flame.svg`, with kernels also `flame_device.svg` of the device's time."""
    paths, clocks = list[Path](), list[Sort](["cpu"])
    if any(span.category in DEVICE for span in trace.spans):
        clocks.append("device")
    for clock in clocks:
        title = f"Where rank {trace.rank} of {trace.world_size} spends its time: {CLOCK[clock]}"
        paths.append(folder / ("flame.svg" if clock == "cpu" else "flame_device.svg"))
        threads, steps = flames(trace, clock), timeline(trace).step_count or 1
        save(draw_flames(threads, title, steps, clock), paths[-1], title)
    return paths


@rc_context(STYLE)
def draw_flames(threads: list[Frame], title: str, steps: int = 1, clock: Sort = "cpu") -> Figure:
    """Picture of some threads of one rank, one below the other, all to the same scale: width is time in a step, and a
    frame is below the one that it ran in. Frames too narrow to see are only counted in the tooltips of those around."""
    totals = [root.total for root in threads] or [1]
    whole, what = (sum(totals), "all kernels") if clock == "device" else (totals[0], "the main thread")
    boxes, tops, paints, end = list[Box](), list[int](), set[str](), 0
    for root in threads:
        tops.append(end)
        for frame in (stack[-1] for stack in root.stacks()):
            if frame.total / max(totals) * WIDTH < 0.5:
                continue
            paints.add(frame.paint)
            fill = PALE.get(frame.paint, "#DEDEDE") if frame.is_operator else FLAME_FILLS[frame.paint]
            name, share = frame.name, frame.total / whole
            begin, width, own = (time / steps / 1e6 for time in (frame.left, frame.total, frame.self_time))
            tip = f"{name}\n{width:.4g} ms, {share:.2%} of {what}; {own:.4g} ms itself"
            labels = (f"{name} {width:.4g} ms ({share:.1%})", name, EXTRAS.sub("", name))
            boxes.append(Box(begin, width, tops[-1] + frame.depth, fill, tip, labels, "white"))
            end = max(end, tops[-1] + frame.depth + 1)
        end += 1
    figure = page(130 + ROW * end)
    axes = figure.subplots()
    axes.set(xlim=(0, max(totals) / steps / 1e6), ylim=(max(1, end) - 0.5, -0.5))
    mean = f", mean of {steps} steps" if steps > 1 else ""
    axes.set_xlabel(f"time in ms{mean}; backward lies below the modules whose forward made it")
    axes.set_yticks(tops, labels=[plot_text(root.name) for root in threads])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    draw_boxes(axes, boxes)
    legend = [Patch(color=FLAME_FILLS[paint], label=paint) for paint in FLAME_FILLS if paint in paints]
    legend.append(Patch(color="#DEDEDE", label="pale: operators"))
    figure.legend(handles=legend, title=title, loc="outside upper left", alignment="left", ncols=len(legend))
    return figure


def write_memory_picture(trace: Trace, path: Path) -> list[Path]:
    """Draw a rank's memory over time; returns the path. A trace without allocations has no picture."""
    memory = memory_timeline(trace)
    if len(memory.times) == 1:
        return []
    title = f"Memory alive over time: rank {trace.rank} of {trace.world_size}, {memory.device.upper()}"
    save(draw_memory(memory, title), path, title)
    return [path]


def thin(memory: MemoryTimeline, columns: int, end: int) -> list[tuple[int, int]]:
    """(time, index) of the highest level in each column of the picture, if it changes: no peak is lost."""
    result: list[tuple[int, int]] = []
    for first, last in pairwise(np.linspace(memory.times[0], end, columns + 1, dtype=np.int64).tolist()):
        highest = memory.highest_in(first, last)
        if not result or memory.amounts[highest] != memory.amounts[result[-1][1]]:
            result.append((first, highest))
    return [*result, (end, result[-1][1])]


@rc_context(STYLE)
def draw_memory(memory: MemoryTimeline, title: str) -> Figure:
    """Picture of one rank's memory on one device: stacked areas by category, below the steps and phases."""
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
        (np.array(times) - start) / 1e6, stacks, labels=shares, colors=MEMORY_FILLS, step="post", linewidth=0
    )
    for area, (name, nbytes) in zip(areas, memory.at_peak.items(), strict=True):
        area.set_gid(f"tip {name}: {nbytes:,} bytes at the peak")
    for phase in memory.phases:
        axes.axvline((phase.start - start) / 1e6, color=GREY, linewidth=0.6, linestyle=":")
    axes.axhline(peak / 1024**power, color=INK, linewidth=1, linestyle="--")
    parts = f"peak {peak:,} bytes\nat {(memory.times[memory.peak_index] - start) / 1e6:.2f} ms"
    figure.legend(handles=areas[::-1], title=parts, **LEGEND, loc="outside right upper")
    peaks = memory.phase_peaks().items()
    phases = [Patch(color=PAINTS[name], label=f"{name} {format_bytes(memory.totals[index])}") for name, index in peaks]
    figure.legend(handles=phases, title="peak of each phase", **LEGEND, loc="outside right lower")
    return figure
