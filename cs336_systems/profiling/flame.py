"""Flame graphs: a whole trace as a tree of frames whose own times sum, to the nanosecond, to the time of its roots.

Every operator of backward is below the modules whose forward created it: `backward;model;blocks.0;attention;query` is
the time of that layer's backward. A recomputed forward is below the backward of its module. Uninformative frames are
dropped, and their own time goes to the frame around them: time is moved between frames, never lost. Sends and receives
"in flight" are no work of any thread, and are left out.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
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
    """A frame: everything that ran under one stack of names."""

    name: str
    alias: str = ""  # the name that all blocks share, if it has one
    paint: str = "other"  # its part: also forward, backward, optimizer, communication, python
    is_operator: bool = False
    depth: int = 0
    self_time: int = 0  # nanoseconds, summed over all steps of the trace
    total: int = 0  # the same of this frame and all inside it
    launched: Counter[str] = field(default_factory=Counter)  # nanoseconds of kernels, by name
    children: dict[str, "Frame"] = field(default_factory=dict)  # in order of first appearance

    def child(self, name: str, paint: str, is_operator: bool = False, alias: str = "") -> "Frame":
        """The frame of that name directly inside this one, made if it is new; or this one, if it is DEEPEST."""
        if self.depth == DEEPEST:
            return self
        if (found := self.children.get(name)) is None:
            found = self.children[name] = Frame(name, alias or name, paint, is_operator, self.depth + 1)
        return found

    def add_blocks(self, shown: "Frame") -> "Frame":
        """Add the time of this frame and of all inside it to another tree, which sums over blocks."""
        shown.self_time += self.self_time
        shown.launched.update(self.launched)
        for child in self.children.values():
            child.add_blocks(shown.child(child.alias, child.paint, child.is_operator))
        return shown

    def on_device(self) -> "Frame":
        """Copy with the kernels' time instead: kernels are leaves, and frames that launched none are left out."""
        shown = Frame(self.name, self.alias, self.paint, self.is_operator, self.depth)
        for child in self.children.values():
            if (inside := child.on_device()).children or inside.self_time:
                shown.children[child.name] = inside
        for name, duration in self.launched.items():
            paint = "communication" if KERNEL.search(name) else self.paint
            shown.child(" ".join(name.split()), paint, is_operator=True).self_time += duration
        return shown

    def stacks(self) -> Iterator[list["Frame"]]:
        """Every frame, as the stack from this one down to it; parents before children."""
        todo = [[self]]
        while todo:
            yield (stack := todo.pop())
            todo += [[*stack, child] for child in reversed(stack[-1].children.values())]


Place = tuple[Frame, Frame | None]  # of a span: its frame, and inside autograd's engine the frame around that


def flames(trace: Trace, clock: Sort = "cpu", collapse_blocks: bool = False) -> list[Frame]:
    """One tree per thread, whose root has its name: the main thread first, then autograd's (on a GPU), gloo's, others.

    `clock` says what is summed: "cpu", the time that the thread was in a frame, or "device", the time of the kernels
    that it launched, which are leaves below their operator; those of two streams may overlap. Equal stacks of all steps
    are added up, with `collapse_blocks` also those of blocks.0, blocks.1, ... as blocks.*.
    """
    found = _trees(trace)
    found = [root.add_blocks(Frame(root.name)) for root in found] if collapse_blocks else found
    found = [root.on_device() for root in found] if clock == "device" else found[:-1]
    for frame in (stack[-1] for root in found for stack in reversed([*root.stacks()])):  # children before parents
        frame.total = frame.self_time + sum(child.total for child in frame.children.values())
    return [root for root in found if root.total]


@once
def _trees(trace: Trace) -> list[Frame]:
    """The roots of all threads; the last is for kernels that no frame launched."""
    roots = {lane: Frame(name) for lane, name in roles(trace).items() if not name.startswith(IN_FLIGHT)}
    steps = timeline(trace).steps
    tagged = any(parse_tag(span.name) for span in trace.annotated if span.lane in roots)
    places: dict[Node, Place] = {}
    for lane, root in roots.items():
        for node in nested(trace)[lane]:
            parent = places[node.parent] if node.parent else (root, None)
            outside = steps and root.name == MAIN and phase_at(steps, node.span.start) == "other"
            left_out = node.span.category == FRAME and (outside or _is_foreign(node.span.name, tagged))
            places[node] = place = parent if left_out else _place(node, parent)
            place[0].self_time += node.duration
            if node.parent:
                parent[0].self_time -= node.duration
            for kernel in node.kernels:
                place[0].launched[kernel.name] += kernel.duration
    unknown = Frame("kernels of no known operator")
    for kernel in (kernel for node in timeline(trace).busy if node.span.category in DEVICE for kernel in node.kernels):
        unknown.launched[kernel.name] += kernel.duration
    return [*roots.values(), unknown]


def _is_foreign(name: str, tagged: bool) -> bool:
    """True for a Python frame of torch, the standard library, builtins or ours, and of a module that has a tag."""
    if name.startswith("nn.Module: "):
        return tagged
    package = found[1] if (found := FRAME_FILE.match(name)) else ""
    foreign = package == "torch" or package in sys.stdlib_module_names
    return foreign or name.startswith("<") or "cs336_systems/profiling/" in name


def _place(node: Node, parent: Place) -> Place:
    """Place of a span, given that of the span around it, or of a root: usually below that."""
    span, up, (frame, base) = node.span, node.parent, parent
    if up and up.span.name == ENGINE + span.name:
        return parent
    paint = _paint(node, parent)
    if span.name.startswith(ENGINE):  # below the modules that made it, in the tree around the engine
        engine, name = base or frame, span.name.removeprefix(ENGINE).removeprefix("torch::autograd::")
        return _descend(engine, node.modules).child(name, "backward", is_operator=True), engine
    if tag := node.tag:
        if base and up and up.direction == "backward":  # a forward inside the engine is a recompute
            return _descend(base, node.modules).child("recompute", "forward"), base
        outer = up.modules[-1][0] if up and up.modules else ""
        return _descend(frame, (tag,), paint, outer), base
    found = parse_collective(name := _short(span.name))
    name = found.title if found else "step" if step_number(name) is not None else name
    alias = without_layer_numbers(name) if found else ""
    return frame.child(name, paint, span.category == "cpu_op", alias), base


def _descend(frame: Frame, modules: Modules, paint: str = "backward", outer: str = "") -> Frame:
    """The frame of the last of some modules, below that of the `outer` one. A module's name is relative to the one
    around it, with its class if that helps."""
    for path, kind in modules:
        alias = _module_name(without_layer_numbers(path), without_layer_numbers(outer), kind)
        frame, outer = frame.child(_module_name(path, outer, kind), paint, alias=alias), path
    return frame


@lru_cache(maxsize=100_000)
def _module_name(path: str, outer: str, kind: str) -> str:
    short = path.removeprefix(f"{outer}.")
    return f"{short} ({kind})" if short in UNNAMED or re.search(r"(^|\.)(\d+|\*)$", short) else short


@lru_cache(maxsize=100_000)
def _short(name: str) -> str:
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


def clocks(trace: Trace, stem: str) -> dict[str, Sort]:
    """The flame graphs of a trace by the stem of their files: of the CPU's time and, with kernels, of the device's."""
    device = any(span.category in DEVICE for span in trace.spans)
    return {stem: "cpu", f"{stem}_device": "device"} if device else {stem: "cpu"}


def write_flame(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.collapsed.txt`, with kernels also that of `<stem>_device`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {folder / f"{name}.collapsed.txt": clock for name, clock in clocks(trace, stem).items()}
    for path, clock in found.items():
        path.write_text(collapsed(trace.rank, flames(trace, clock)), encoding="utf-8")
    return list(found)
