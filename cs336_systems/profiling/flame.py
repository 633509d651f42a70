"""Flame graphs: a whole trace as a tree of frames whose self times sum, to the nanosecond, to the time of its roots.

Every operator of backward is below the modules whose forward created it: `backward;model;blocks.0;attention;query` is
the time of that layer's backward. A recomputed forward is below the backward of its module. Uninformative frames are
dropped, and their self time goes to the frame around them: time is moved between frames, never lost. Sends and receives
"in flight" are no work of any thread, and are left out.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cs336_systems.host.text import printable
from cs336_systems.profiling.names import (
    ENGINE,
    PHASES,
    UNNAMED,
    Modules,
    is_collective,
    parse_collective,
    parse_tag,
    step_number,
    without_layer_numbers,
)
from cs336_systems.profiling.nesting import Node, nested
from cs336_systems.profiling.timeline import IN_FLIGHT, MAIN, Sort, phase_at, roles, timeline
from cs336_systems.profiling.trace import DEVICE, FRAME, KERNEL, Trace, once

DEEPEST = 250  # frames in a stack; the last one has the time of deeper ones
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ABSOLUTE = re.compile(r"^/(?:[^/]+/)*([^/]+/[^/]+\.py\(\d+\))")
FRAME_FILE = re.compile(r"^(\w+)(?:/|\.py\()")


@dataclass
class Frame:
    """A frame: everything that ran under one stack of names. Times are nanoseconds, summed over all steps."""

    name: str
    paint: str = "other"  # its part: also forward, backward, optimizer, communication, python
    is_operator: bool = False
    depth: int = 0  # frames above it
    left: int = 0  # in a picture, the time of all that is drawn left of it
    self_time: int = 0
    total: int = 0  # of this frame and all inside it
    children: dict[str, "Frame"] = field(default_factory=dict)  # in order of first appearance

    def child(self, name: str, paint: str, is_operator: bool = False) -> "Frame":
        """The frame of that name directly inside this one, made if it is new; or this one, if it is DEEPEST."""
        if self.depth == DEEPEST:
            return self
        if (found := self.children.get(name)) is None:
            found = self.children[name] = Frame(name, paint, is_operator, self.depth + 1)
        return found

    def stacks(self) -> Iterator[list["Frame"]]:
        """Every frame, as the stack from this one down to it; parents before children."""
        todo = [[self]]
        while todo:
            yield (stack := todo.pop())
            todo += [[*stack, child] for child in reversed(stack[-1].children.values())]


Place = tuple[Frame, Frame | None]  # of a span: its frame, and inside autograd's engine the frame around that


@once
def flames(trace: Trace, clock: Sort = "cpu", collapse_blocks: bool = False) -> list[Frame]:
    """One tree per thread, whose root has its name: the main thread first, then autograd's (on a GPU), gloo's, others.

    `clock` says what is summed: "cpu", the time that the thread was in a frame, or "device", the time of the kernels
    that it launched, which are leaves below their operator; those of two streams may overlap. Equal stacks of all steps
    are added up, with `collapse_blocks` also those of blocks.0, blocks.1, ... as blocks.*.
    """
    roots = {lane: Frame(name) for lane, name in roles(trace).items() if not name.startswith(IN_FLIGHT)}
    steps, short = timeline(trace).steps, without_layer_numbers if collapse_blocks else str
    step_at = phase_at(steps)
    tagged = any(parse_tag(span.name) for span in trace.annotated if span.lane in roots)
    places: dict[Node, Place] = {}
    for lane, root in roots.items():
        for node in nested(trace)[lane]:
            parent = places[node.parent] if node.parent else (root, None)
            outside = steps and root.name == MAIN and step_at(node.span.start) == "other"
            left_out = node.span.category == FRAME and (outside or _is_foreign(node.span.name, tagged))
            places[node] = place = parent if left_out else _place(node, parent, short)
            if clock == "cpu":
                place[0].self_time += node.duration
                parent[0].self_time -= node.duration if node.parent else 0
    found = [*roots.values(), Frame("kernels of no known operator")]
    if clock == "device":
        unknown = {node: (found[-1], None) for node in timeline(trace).busy if node.span.category in DEVICE}
        for node, (frame, _) in (places | unknown).items():
            for kernel in node.kernels:
                paint = "communication" if KERNEL.search(kernel.name) else frame.paint
                frame.child(" ".join(kernel.name.split()), paint, is_operator=True).self_time += kernel.duration
    frames = [stack[-1] for root in found for stack in root.stacks()]
    for frame in reversed(frames):  # children before parents
        frame.total = frame.self_time + sum(child.total for child in frame.children.values())
    for frame in frames:
        left = frame.left
        for child in frame.children.values():
            child.left, left = left, left + child.total
    return [root for root in found if root.total]


def _is_foreign(name: str, tagged: bool) -> bool:
    """True for a Python frame of torch, the standard library, builtins or ours, and of a module that has a tag."""
    if name.startswith("nn.Module: "):
        return tagged
    package = found[1] if (found := FRAME_FILE.match(name)) else ""
    foreign = package == "torch" or package in sys.stdlib_module_names
    return foreign or name.startswith("<") or "cs336_systems/profiling/" in name


def _place(node: Node, parent: Place, short: Callable[[str], str]) -> Place:
    """Place of a span, given that of the span around it, or of a root: usually below that. `short` shortens names."""
    span, up, (frame, base) = node.span, node.parent, parent
    if up and up.span.name == ENGINE + span.name:
        return parent
    paint = _paint(node, parent)
    if span.name.startswith(ENGINE):  # below the modules that made it, in the tree around the engine
        engine, name = base or frame, span.name.removeprefix(ENGINE).removeprefix("torch::autograd::")
        return _descend(engine, node.modules, short).child(name, "backward", is_operator=True), engine
    if tag := node.tag:
        if base and up and up.direction == "backward":  # a forward inside the engine is a recompute
            return _descend(base, node.modules, short).child("recompute", "forward"), base
        outer = up.modules[-1][0] if up and up.modules else ""
        return _descend(frame, (tag,), short, paint, outer), base
    found = parse_collective(name := _plain(span.name))
    name = short(found.title) if found else "step" if step_number(name) is not None else name
    return frame.child(name, paint, span.category == "cpu_op"), base


def _descend(
    frame: Frame, modules: Modules, short: Callable[[str], str], paint: str = "backward", outer: str = ""
) -> Frame:
    """The frame of the last of some modules, below that of the `outer` one. A module's name is relative to the one
    around it, with its class if that helps."""
    for path, kind in modules:
        frame, outer = frame.child(_module_name(short(path), short(outer), kind), paint), path
    return frame


@lru_cache(maxsize=100_000)
def _module_name(path: str, outer: str, kind: str) -> str:
    name = path.removeprefix(f"{outer}.")
    return f"{name} ({kind})" if name in UNNAMED or re.search(r"(^|\.)(\d+|\*)$", name) else name


@lru_cache(maxsize=100_000)
def _plain(name: str) -> str:
    """Shorten a name: without addresses and its file's folders."""
    return ABSOLUTE.sub(r"\1", ADDRESS.sub("", " ".join(name.split())))


def _paint(node: Node, parent: Place) -> str:
    frame, base = parent
    if node.span.category == FRAME:
        return "python"
    if is_collective(node.span.name) or frame.paint == "communication" or node.phase == "synchronise":
        return "communication"
    phase = node.direction if base or node.direction == "backward" else node.phase
    return phase if phase in PHASES else "other"


def collapsed(rank: int, threads: list[Frame]) -> str:
    """Brendan Gregg's collapsed stacks, a line each: `rank 0 main thread;step;forward;... <nanoseconds>`."""
    lines = []
    for stack in (stack for root in threads for stack in root.stacks() if stack[-1].self_time):
        names = ";".join(printable(frame.name).replace(";", ",") for frame in stack)
        lines.append(f"rank {rank} {names} {stack[-1].self_time}\n")
    return "".join(lines)


def clocks(trace: Trace) -> dict[str, Sort]:
    """The flame graphs of a trace by the stem of their files: of the CPU's time and, with kernels, of the device's."""
    device = any(span.category in DEVICE for span in trace.spans)
    return {"flame": "cpu", "flame_device": "device"} if device else {"flame": "cpu"}


def write_flame(trace: Trace, folder: Path) -> list[Path]:
    """Write `flame.collapsed.txt`, with kernels also `flame_device.collapsed.txt`."""
    found = {folder / f"{name}.collapsed.txt": clock for name, clock in clocks(trace).items()}
    for path, clock in found.items():
        path.write_text(collapsed(trace.rank, flames(trace, clock)), encoding="utf-8")
    return list(found)
