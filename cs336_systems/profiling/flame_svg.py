"""The flame graph as a picture that any browser shows: width is time, a frame lies below the one that it ran in.

It is drawn as an icicle, from the top down, not as a flame: a step then reads like an outline, step, phase, module,
operator, whose first lines are on the first screen however deep the operators nest. Frames too narrow to see are left
out of the drawing only; the numbers that the pointer shows are exact.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.profiling.flame import Flame, collapsed, flames, speedscope
from cs336_systems.profiling.frames import Frame, Weigh
from cs336_systems.profiling.names import step_number
from cs336_systems.profiling.svg import PAINTS, Drawing, fitting
from cs336_systems.profiling.trace import DEVICE, Trace

WIDTH, MARGIN, HEADER, ROW, GAP, SIZE = 1400, 12, 84, 19, 14, 12  # pixels
NARROWEST = 0.3  # pixels of a frame that is drawn
MILLISECOND = 1_000_000  # nanoseconds
FILLS = PAINTS | {
    "communication": PAINTS["synchronise"],
    "python": ("#F0E442", "#F7F2A8"),
}  # of what a frame is part of
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "synchronise, communication",
    "python": "Python",
    "other": "other",
}


@dataclass(frozen=True)
class _Box:
    """A frame's place, in nanoseconds from the left and rows from the top."""

    frame: Frame
    left: int
    row: int
    total: int


def draw(threads: list[Flame], title: str) -> Drawing:
    """The picture of some threads of one rank, one below the other, all to the same scale."""
    lanes = [_layout(flame.root) for flame in threads]
    widest = max((boxes[0].total for boxes in lanes), default=1)
    scale = (WIDTH - 2 * MARGIN) / widest
    lanes = [[box for box in boxes if box.total * scale >= NARROWEST] for boxes in lanes]
    heights = [(max(box.row for box in boxes) + 1) * ROW + GAP if boxes else 0 for boxes in lanes]
    drawing = Drawing(WIDTH, HEADER + sum(heights) + MARGIN, title)
    _header(drawing, title, _subtitle(threads), {box.frame.paint for boxes in lanes for box in boxes})
    whole, top = _whole(threads), float(HEADER)
    for flame, boxes, height in zip(threads, lanes, heights, strict=True):
        for box in boxes:
            _draw_box(drawing, box, flame, scale, top, whole)
        top += height
    return drawing


def write_flame(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.svg`, `<stem>.collapsed.txt` and `<stem>.speedscope.json`, and return their paths.

    The picture adds up the blocks; the two files, which tools make interactive, keep them apart. A trace with kernels
    gives three more, `<stem>_device.*`, of the device's time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for weigh in _weights(trace):
        name = stem if weigh == "cpu" else f"{stem}_{weigh}"
        svg, text, scope = (folder / f"{name}.{kind}" for kind in ("svg", "collapsed.txt", "speedscope.json"))
        picture = flames(trace, weigh, collapse_blocks=True)
        what = "a step" if _steps(picture) else "its time"
        title = f"Where rank {trace.rank} of {trace.world_size} spends {what}: {_WHAT[weigh]}"
        draw(picture, title).save(svg)
        whole = flames(trace, weigh)
        text.write_text(collapsed(whole), encoding="utf-8")
        scope.write_text(json.dumps(speedscope(whole, title), separators=(",", ":"), allow_nan=False), encoding="utf-8")
        paths += [svg, text, scope]
    return paths


_WHAT: dict[Weigh, str] = {"cpu": "time on the CPU", "device": "time of the kernels launched"}


def _weights(trace: Trace) -> list[Weigh]:
    return ["cpu", "device"] if any(span.category in DEVICE for span in trace.spans) else ["cpu"]


def _subtitle(threads: list[Flame]) -> str:
    steps = threads[0].steps if threads else 1
    words = [f"Mean of {steps} steps."] if steps > 1 else []
    if any("*" in stack[-1].name for flame in threads for stack, _ in flame.root.stacks()):
        words.append("Blocks are added up.")
    words.append("Width is time; what ran in a frame lies below it, blank is its own time.")
    words.append("Backward operators lie below the module whose forward made them.")
    return " ".join(words)


def _steps(threads: list[Flame]) -> list[Frame]:
    """The frames of steps; none in a trace that marks no steps."""
    found = threads[0].root.children.values() if threads else ()
    return [each for each in found if each.name == "step" or step_number(each.name) is not None]


def _whole(threads: list[Flame]) -> tuple[int, str]:
    """What shares are shares of, in nanoseconds and in words: the steps or all there is, on a device every kernel."""
    if threads and threads[0].weigh == "device":
        return sum(flame.root.total() for flame in threads), "all kernels"
    if steps := _steps(threads):
        return sum(each.total() for each in steps), "the step"
    return (threads[0].root.total() if threads else 1), "the main thread"


def _layout(root: Frame) -> list[_Box]:
    """Every frame's place, the root's first."""
    totals: dict[int, int] = {}
    for frame in reversed([stack[-1] for stack, _ in root.stacks()]):  # children before parents
        totals[id(frame)] = frame.self_time + sum(totals[id(child)] for child in frame.children.values())
    boxes, todo = [], [(root, 0, 0)]
    while todo:
        frame, left, row = todo.pop()
        boxes.append(_Box(frame, left, row, totals[id(frame)]))
        for child in frame.children.values():
            todo.append((child, left, row + 1))
            left += totals[id(child)]
    return boxes


def _header(drawing: Drawing, title: str, subtitle: str, paints: set[str]) -> None:
    drawing.text(MARGIN, 24, title, size=17)
    drawing.text(MARGIN, 44, subtitle)
    x = float(MARGIN)
    for paint, words in LEGEND.items():
        if paint in paints:
            dark, light = FILLS[paint]
            drawing.rect(x, 56, 14, 14, light if paint == "python" else dark)
            drawing.rect(x + 14, 56, 14, 14, light)
            drawing.text(x + 34, 67, words)
            x += 34 + 7.2 * len(words) + 24
    drawing.text(x + 6, 67, "dark: phases, modules, collectives; light: operators, functions", fill="#666666")


def _draw_box(drawing: Drawing, box: _Box, flame: Flame, scale: float, top: float, whole: tuple[int, str]) -> None:
    x, y, width = MARGIN + box.left * scale, top + box.row * ROW, box.total * scale
    dark, light = FILLS[box.frame.paint]
    fill = light if box.frame.is_operator or box.frame.paint == "python" else dark
    gap = 0.6 if width > 2 else 0.0
    drawing.rect(x, y, width - gap, ROW - 1, fill, _hover(box, flame, whole))
    names = _names(box.frame.name, _numbers(box, flame, whole[0]))
    if words := next((each for each in names if fitting(each, width - 8, SIZE) == each), ""):
        drawing.text(x + 4, y + 13, words, SIZE)
    elif box.row == 0:  # a thread is named even if it did little
        drawing.text(x + width + 6, y + 13, names[0], SIZE)
    elif words := fitting(names[-1], width - 8, SIZE):
        drawing.text(x + 4, y + 13, words, SIZE)


def _numbers(box: _Box, flame: Flame, whole: int) -> tuple[str, str]:
    """A frame's time a step, and its share of the whole."""
    return f"{box.total / flame.steps / MILLISECOND:.2f} ms", f"{box.total / whole:.1%}"


def _names(name: str, numbers: tuple[str, str]) -> list[str]:
    """What to call a frame, from the most to the least said."""
    brief = re.sub(r" \([A-Z]\w*\)$", "", name)  # a module without its class
    brief = re.sub(
        r"^[\w./]+/(?=\w+\.py\()|^(?:\w+::)+", "", brief
    )  # a file without its folder, an operator's namespace
    least = re.sub(r"^\w+\.py\(\d+\): ", "", brief)  # a function without its file
    time, share = numbers
    return [f"{name} {time} ({share})", f"{name} {time}", name, brief, least]


def _hover(box: _Box, flame: Flame, whole: tuple[int, str]) -> str:
    frame, per = box.frame, flame.steps
    titles = sorted(frame.titles) or [flame.name]
    lines = [", ".join(titles[:3]) + (f" and {len(titles) - 3} more" if len(titles) > 3 else "")]
    time, own = box.total / per / MILLISECOND, frame.self_time / per / MILLISECOND
    each = " a step" if per > 1 else ""
    lines.append(f"{time:.4f} ms{each}, {box.total / whole[0]:.2%} of {whole[1]}; {own:.4f} ms itself")
    if frame.calls and box.row:
        lines.append(f"{frame.calls / per:g} call{'s' * (frame.calls != per)}{each}")
    return "\n".join(lines)
