"""Frames of a flame graph: the name of each span of a trace, and the stack below which its time is shown.

A frame's stack is mostly where its span lies in the trace. The exceptions make the picture readable: nodes of the
autograd engine go below the modules whose forward made them, a recomputed forward below the backward of its module,
and frames that tell nothing are dropped, their own time going to the frame around them.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from cs336_systems.profiling.module_spans import ROOT, parse_tag
from cs336_systems.profiling.names import ENGINE, PHASES, parse_collective, step_number, without_layer_numbers
from cs336_systems.profiling.nesting import Modules, Node
from cs336_systems.profiling.trace import COMMUNICATION, FRAME, KERNEL, Lane

Weigh = Literal["cpu", "device"]
Python = Literal["own", "all", "none"]

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ABSOLUTE = re.compile(r"^/(?:[^/]+/)*([^/]+/[^/]+\.py\(\d+\))")
FRAME_FILE = re.compile(r"^(\w+)(?:/|\.py\()")
RECOMPUTE = "recompute"
NEEDS_CLASS = (ROOT, "wrapper")  # names that say nothing about a module


@dataclass
class Frame:
    """Everything that ran under one stack of names. Times are nanoseconds, summed over all steps of the trace.

    `paint` says what it is part of: forward, backward, optimizer, communication, python or other. `titles` are the full
    names behind the short one, several where blocks are taken together. `calls` is 0 for a module's backward, which no
    one calls.
    """

    name: str
    paint: str = "other"
    is_operator: bool = False
    self_time: int = 0
    calls: int = 0
    titles: set[str] = field(default_factory=set)
    children: dict[str, "Frame"] = field(default_factory=dict)  # in order of first appearance

    def child(self, name: str, paint: str, title: str = "", is_operator: bool = False) -> "Frame":
        """The frame of that name directly inside this one, made if it is new."""
        found = self.children.setdefault(name, Frame(name, paint, is_operator))
        found.titles.add(title or name)
        return found

    def stacks(self) -> Iterator[tuple[list["Frame"], int]]:
        """Every frame, as the stack from this one down to it, with its own time; parents before children."""
        todo = [[self]]
        while todo:
            stack = todo.pop()
            yield stack, stack[-1].self_time
            todo += [[*stack, child] for child in reversed(stack[-1].children.values())]

    def total(self) -> int:
        """Nanoseconds of this frame and all inside it."""
        return sum(own for _, own in self.stacks())


def add_kernel(frame: Frame, name: str, duration: int) -> None:
    """Put a kernel below the frame that launched it, or below none that is known."""
    paint = "communication" if KERNEL.search(name) else frame.paint
    leaf = frame.child(_one_line(name), paint, is_operator=True)
    leaf.self_time += duration
    leaf.calls += 1


def _one_line(name: str) -> str:
    return " ".join(name.split())


@dataclass(frozen=True)
class _State:
    """The frame of a span. `base` is the frame around the autograd engine's nodes, None outside of them."""

    frame: Frame
    modules: Modules = ()
    base: Frame | None = None
    recomputing: bool = False
    in_step: bool = False
    engine: str = ""  # the autograd node that a span of the engine evaluates


class FrameBuilder:
    """Puts spans, parents first, into trees of frames.

    `main` is the thread that took the steps; the other arguments are those of `flame.flames`.
    """

    def __init__(
        self, nodes: list[Node], main: Lane | None, weigh: Weigh, merge: bool, collapse: bool, python: Python
    ) -> None:
        self.main, self.weigh, self.merge, self.collapse, self.python = main, weigh, merge, collapse, python
        self.states: dict[int, _State] = {}
        self.claimed: set[int] = set()  # kernels, by identity
        names = [node.span.name for node in nodes if node.span.category == "user_annotation"]
        steps = [name for name in names if step_number(name) is not None]
        kinds = [sum(name.startswith(kind) for name in steps) for kind in ("step ", "ProfilerStep#")]
        self.has_steps, self.steps = any(kinds), kinds[0] or kinds[1] or 1
        self.tagged = any(parse_tag(name) for name in names)

    def add(self, node: Node, root: Frame) -> None:
        """Put one span into the tree below `root`."""
        parent = self.states[id(node.parent)] if node.parent else _State(root)
        state = self.states[id(node)] = self._place(node, parent)
        if self.weigh == "cpu":
            state.frame.self_time += node.self_time
        state.frame.calls += state.frame is not parent.frame
        for kernel in node.kernels if self.weigh == "device" else ():
            if id(kernel) not in self.claimed:
                self.claimed.add(id(kernel))
                add_kernel(state.frame, kernel.name, kernel.duration)

    def _place(self, node: Node, parent: _State) -> _State:
        span, is_step = node.span, step_number(node.span.name) is not None
        inside = replace(parent, engine="", in_step=parent.in_step or is_step)
        if self._is_dropped(node, inside.in_step) or (parent.engine and span.name == parent.engine):
            return inside
        if span.name.startswith(ENGINE):
            return self._evaluate(node, inside)
        paint = _paint(node, parent)
        if span.category == "user_annotation" and (tag := parse_tag(span.name)):
            return self._enter(tag, paint, inside)
        frame = parent.frame.child(self._clean(span.name), paint, is_operator=span.category == "cpu_op")
        return replace(inside, frame=frame)

    def _evaluate(self, node: Node, parent: _State) -> _State:
        """A node of the autograd engine goes below the modules that made it, in the tree around the engine."""
        base, modules, engine = parent.base or parent.frame, node.modules, node.span.name[len(ENGINE) :]
        if parent.base and modules:  # the engine runs inside the engine, for a part that was computed again
            modules = (*_around(parent.modules, modules[0][0]), *modules)
        frame = self._descend(base, modules, "backward")
        frame = frame.child(engine.removeprefix("torch::autograd::"), "backward", is_operator=True)
        return _State(frame, modules, base, False, parent.in_step, engine)

    def _enter(self, tag: tuple[str, str], paint: str, parent: _State) -> _State:
        """A module's forward; one inside the engine is a recompute, shown below that module's backward."""
        if parent.base and not parent.recomputing:
            modules = (*_around(parent.modules, tag[0]), tag)
            frame = self._descend(parent.base, modules, "backward").child(RECOMPUTE, "forward")
            return replace(parent, frame=frame, modules=modules, recomputing=True)
        modules = (*parent.modules, tag)
        return replace(parent, frame=parent.frame.child(*self._label(modules, paint)), modules=modules)

    def _descend(self, frame: Frame, modules: Modules, paint: str) -> Frame:
        for depth in range(len(modules)):
            frame = frame.child(*self._label(modules[: depth + 1], paint))
        return frame

    def _label(self, modules: Modules, paint: str) -> tuple[str, str, str]:
        """(name, paint, title) of the last module: relative to the one around it, with its class where that helps."""
        path, kind = modules[-1]
        outer = modules[-2][0] if len(modules) > 1 else ""
        if self.collapse:
            path, outer = without_layer_numbers(path), without_layer_numbers(outer)
        short = path.removeprefix(f"{outer}.")
        if short in NEEDS_CLASS or re.search(r"(^|\.)(\d+|\*)$", short):
            short = f"{short} ({kind})"
        return short, paint, f"{path} ({kind})"

    def _is_dropped(self, node: Node, in_step: bool) -> bool:
        name = node.span.name
        if node.span.category != FRAME or self.python == "all":
            return False
        if self.python == "none" or (self.has_steps and node.span.lane == self.main and not in_step):
            return True
        if name.startswith("nn.Module: "):
            return self.tagged
        package = found[1] if (found := FRAME_FILE.match(name)) else ""
        foreign = package == "torch" or package in sys.stdlib_module_names
        return foreign or name.startswith("<") or "cs336_systems/profiling/" in name

    def _clean(self, name: str) -> str:
        name = ABSOLUTE.sub(r"\1", ADDRESS.sub("", _one_line(name)))
        if self.merge and step_number(name) is not None:
            return "step"
        if found := parse_collective(name):
            name = f"{found.action} {found.verb} {found.label}".rstrip() if self.merge else name
            name = without_layer_numbers(name) if self.collapse else name
        return name


def _around(modules: Modules, path: str) -> Modules:
    """Those of some modules that contain the module of a qualified name."""
    return tuple(each for each in modules if each[0] in NEEDS_CLASS or path.startswith(f"{each[0]}."))


def _paint(node: Node, parent: _State) -> str:
    span = node.span
    if span.category == FRAME:
        return "python"
    if COMMUNICATION.match(span.name) or parse_collective(span.name) or span.name.startswith("c10d::"):
        return "communication"
    if parent.frame.paint == "communication" or node.phase == "synchronise":
        return "communication"
    if parent.recomputing:
        return "forward"
    phase = node.direction if node.direction == "backward" else node.phase
    return phase if phase in PHASES else "other"
