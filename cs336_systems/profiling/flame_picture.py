"""The flame graph as a picture: width is time, a frame lies below the one that it ran in.

It is drawn as an icicle, from the top down: a step then reads like an outline, step, phase, module, operator, whose
first lines are on the first screen however deep the operators nest. Frames too narrow to see are left out of the
drawing only; the numbers of the tooltips are exact.
"""

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.host.text import plot_text
from cs336_systems.profiling.flame import Flame, Frame, clocks, flames
from cs336_systems.profiling.pictures import OTHER, PAINTS, ROW, STYLE, WIDTH, Box, draw_boxes, page, save
from cs336_systems.profiling.trace import Trace

FILLS = {**PAINTS, "communication": PAINTS["synchronise"], "python": "#F7F2A8", "other": OTHER}
PALE = {"forward": "#C4E4F7", "backward": "#F7DEA8", "optimizer": "#B5E4D4", "communication": "#F2D3E4"}  # of operators
CLOCK = {"cpu": "time on the CPU", "device": "time of the kernels launched"}
# A class behind a module, the file before a function, the namespace before an operator: left out where room is short.
EXTRAS = re.compile(r" \([A-Z]\w*\)$|^.*\.py\(\d+\): |^(?:\w+::)+")


def write_flame_pictures(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.svg`, with kernels also `<stem>_device.svg` of the device's time. Blocks are added up."""
    paths = []
    for name, clock in clocks(trace, stem).items():
        title = f"Where rank {trace.rank} of {trace.world_size} spends its time: {CLOCK[clock]}"
        paths.append(folder / f"{name}.svg")
        save(draw_flames(flames(trace, clock, collapse_blocks=True), title), paths[-1], title)
    return paths


@rc_context(STYLE)
def draw_flames(threads: list[Flame], title: str) -> Figure:
    """The picture of some threads of one rank, one below the other, all to the same scale."""
    device = any(flame.clock == "device" for flame in threads)
    totals = [flame.root.total() for flame in threads] or [1]
    whole, what = (sum(totals), "all kernels") if device else (totals[0], "the main thread")
    boxes, tops, paints, end = list[Box](), list[int](), set[str](), 0
    for flame in threads:
        tops.append(end)
        for frame, left, row, total in _layout(flame.root):
            if total / max(totals) * WIDTH < 0.5:
                continue
            paints.add(frame.paint)
            fill = PALE.get(frame.paint, "#DEDEDE") if frame.is_operator else FILLS[frame.paint]
            time, share = f"{total / flame.steps / 1e6:.4g} ms", total / whole
            own = frame.self_time / flame.steps / 1e6
            tip = f"{frame.name}\n{time}, {share:.2%} of {what}; {own:.4g} ms itself"
            labels = (f"{frame.name} {time} ({share:.1%})", frame.name, EXTRAS.sub("", frame.name))
            place = left / flame.steps / 1e6, total / flame.steps / 1e6, tops[-1] + row
            boxes.append(Box(*place, fill, tip, labels, "white"))
            end = max(end, tops[-1] + row + 1)
        end += 1
    figure = page(130 + ROW * end)
    axes = figure.subplots()
    steps = threads[0].steps if threads else 1
    axes.set(xlim=(0, max(totals) / steps / 1e6), ylim=(max(1, end) - 0.5, -0.5))
    mean = f", mean of {steps} steps" if steps > 1 else ""
    axes.set_xlabel(f"time in ms{mean}; backward lies below the modules whose forward made it")
    axes.set_yticks(tops, labels=[plot_text(flame.root.name) for flame in threads])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    draw_boxes(axes, boxes)
    legend = [Patch(color=FILLS[paint], label=paint) for paint in FILLS if paint in paints]
    legend.append(Patch(color="#DEDEDE", label="pale: operators"))
    figure.legend(handles=legend, title=title, loc="outside upper left", alignment="left", ncols=len(legend))
    return figure


def _layout(root: Frame) -> list[tuple[Frame, int, int, int]]:
    """Every frame with its place, in nanoseconds from the left and rows from the top, and its time; the root first."""
    totals: dict[int, int] = {}
    for frame in reversed([stack[-1] for stack, _ in root.stacks()]):  # children before parents
        totals[id(frame)] = frame.self_time + sum(totals[id(child)] for child in frame.children.values())
    places, todo = [], [(root, 0, 0)]
    while todo:
        frame, left, row = todo.pop()
        places.append((frame, left, row, totals[id(frame)]))
        for child in frame.children.values():
            todo.append((child, left, row + 1))
            left += totals[id(child)]
    return places
