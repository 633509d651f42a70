"""The flame graph as a picture: width is time, a frame lies below the one that it ran in.

It is drawn as an icicle, from the top down: a step then reads like an outline, step, phase, module, operator, whose
first lines are on the first screen however deep the operators nest. Frames too narrow to see are left out of the
drawing only; the numbers of the tooltips are exact.
"""

import re
from pathlib import Path
from typing import NamedTuple

from cs336_systems.host.text import plot_text
from cs336_systems.profiling.flame import Flame, Frame, clocks, flames
from cs336_systems.profiling.names import step_number
from cs336_systems.profiling.pictures import PAINTS, WIDTH, Picture, fitting, styled, swatch
from cs336_systems.profiling.trace import Trace

MARGIN, HEADER, ROW, GAP, SIZE = 12, 84, 19, 14, 12  # pixels
NARROWEST = 0.3  # pixels of a frame that is drawn
FILLS = PAINTS | {"communication": PAINTS["synchronise"], "python": ("#F0E442", "#F7F2A8")}
LEGEND = dict.fromkeys(("forward", "backward", "optimizer", "communication", "python", "other"), "") | {
    "communication": "synchronise, communication",
    "python": "Python",
}
CLOCK = {"cpu": "time on the CPU", "device": "time of the kernels launched"}


class Box(NamedTuple):
    """A frame's place, in nanoseconds from the left and rows from the top."""

    frame: Frame
    left: int
    row: int
    total: int


def write_flame_pictures(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.svg`, with kernels also `<stem>_device.svg` of the device's time. Blocks are added up."""
    paths = []
    for name, clock in clocks(trace, stem).items():
        threads = flames(trace, clock, collapse_blocks=True)
        what = "a step" if _steps(threads) else "its time"
        title = f"Where rank {trace.rank} of {trace.world_size} spends {what}: {CLOCK[clock]}"
        paths.append(folder / f"{name}.svg")
        draw(threads, title).save(paths[-1])
    return paths


@styled()
def draw(threads: list[Flame], title: str) -> Picture:
    """The picture of some threads of one rank, one below the other, all to the same scale."""
    layouts = [_layout(flame.root) for flame in threads]
    scale = (WIDTH - 2 * MARGIN) / max((boxes[0].total for boxes in layouts), default=1)
    layouts = [[box for box in boxes if box.total * scale >= NARROWEST] for boxes in layouts]
    heights = [(max(box.row for box in boxes) + 1) * ROW + GAP if boxes else 0 for boxes in layouts]
    picture = Picture(HEADER + sum(heights) + MARGIN, title)
    picture.text(MARGIN, 44, _subtitle(threads))
    paints = {box.frame.paint for boxes in layouts for box in boxes}
    legend = {
        words or paint: swatch(FILLS[paint][paint == "python"]) for paint, words in LEGEND.items() if paint in paints
    }
    picture.legend(56, legend | {"pale: operators and functions": swatch(FILLS["other"][1])})
    axes = picture.axes(MARGIN, HEADER, WIDTH - 2 * MARGIN, max(1, sum(heights)))
    axes.set(xlim=(0, WIDTH - 2 * MARGIN), ylim=(max(1, sum(heights)), 0))
    axes.axis("off")
    whole, top = _whole(threads), 0.0
    for flame, boxes, height in zip(threads, layouts, heights, strict=True):
        for box in boxes:
            x, y, width = box.left * scale, top + box.row * ROW, box.total * scale
            pale = box.frame.is_operator or box.frame.paint == "python"
            gap = 0.6 if width > 2 else 0.0
            picture.box(axes, x, y, width - gap, ROW - 1, FILLS[box.frame.paint][pale], _tooltip(box, flame, whole))
            names = _names(box, flame, whole[0])
            words = next((each for each in names if fitting(each, width - 8, SIZE) == each), "")
            words = words or fitting(names[-1], width - 8, SIZE)
            if not words and box.row == 0:  # a thread is named even if it did little
                x, words = x + width, names[0]
            if words:
                axes.text(x + 4, y + 13, plot_text(words), size=SIZE)
        top += height
    return picture


def _subtitle(threads: list[Flame]) -> str:
    steps = threads[0].steps if threads else 1
    words = [f"Mean of {steps} steps."] if steps > 1 else []
    if any("*" in stack[-1].name for flame in threads for stack, _ in flame.root.stacks()):
        words.append("Blocks are added up.")
    words.append("Width is time; what ran in a frame lies below it, blank is its own time.")
    return " ".join([*words, "Backward operators lie below the module whose forward made them."])


def _steps(threads: list[Flame]) -> list[Frame]:
    """The frames of steps; none in a trace that marks no steps."""
    found = threads[0].root.children.values() if threads else ()
    return [each for each in found if each.name == "step" or step_number(each.name) is not None]


def _whole(threads: list[Flame]) -> tuple[int, str]:
    """The nanoseconds of which shares are given, and their name: the steps or all there is, or every kernel."""
    if threads and threads[0].clock == "device":
        return sum(flame.root.total() for flame in threads), "all kernels"
    if steps := _steps(threads):
        return sum(each.total() for each in steps), "the step"
    return (threads[0].root.total() if threads else 1), "the main thread"


def _layout(root: Frame) -> list[Box]:
    """Every frame's place, the root's first."""
    totals: dict[int, int] = {}
    for frame in reversed([stack[-1] for stack, _ in root.stacks()]):  # children before parents
        totals[id(frame)] = frame.self_time + sum(totals[id(child)] for child in frame.children.values())
    boxes, todo = [], [(root, 0, 0)]
    while todo:
        frame, left, row = todo.pop()
        boxes.append(Box(frame, left, row, totals[id(frame)]))
        for child in frame.children.values():
            todo.append((child, left, row + 1))
            left += totals[id(child)]
    return boxes


def _names(box: Box, flame: Flame, whole: int) -> list[str]:
    """The names of a frame from the longest, with its time and share, to the shortest."""
    name = box.frame.name
    brief = re.sub(r" \([A-Z]\w*\)$", "", name)  # a module without its class
    # A file without its folder, an operator without its namespace, then a function without its file.
    brief = re.sub(r"^[\w./]+/(?=\w+\.py\()|^(?:\w+::)+", "", brief)
    least = re.sub(r"^\w+\.py\(\d+\): ", "", brief)
    time = f"{box.total / flame.steps / 1e6:.2f} ms"
    return [f"{name} {time} ({box.total / whole:.1%})", f"{name} {time}", name, brief, least]


def _tooltip(box: Box, flame: Flame, whole: tuple[int, str]) -> str:
    frame, steps = box.frame, flame.steps
    titles = sorted(frame.titles) or [flame.name]
    lines = [", ".join(titles[:3]) + (f" and {len(titles) - 3} more" if len(titles) > 3 else "")]
    each = " a step" if steps > 1 else ""
    time, own = box.total / steps / 1e6, frame.self_time / steps / 1e6
    lines.append(f"{time:.4f} ms{each}, {box.total / whole[0]:.2%} of {whole[1]}; {own:.4f} ms itself")
    if frame.calls and box.row:
        lines.append(f"{frame.calls / steps:g} call{'s' * (frame.calls != steps)}{each}")
    return "\n".join(lines)
