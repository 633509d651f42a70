"""Flame graphs: a whole trace as a tree of frames whose own times sum, to the nanosecond, to the time of its roots.

Tools that sample stacks show the backward pass as one flat list below `loss.backward()`. Here every operator of it
stands below the modules whose forward made it: `backward;model;blocks.0;attention;query` is what that layer costs on
the way back. A recomputed forward stands below the backward of its module, and frames that tell nothing are dropped,
their own time going to the frame around them: time is moved between frames, never lost.

Posted sends and receives, which lie "in flight" until they are waited for, are no work of any thread and left out.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cs336_systems.host.text import printable
from cs336_systems.profiling.names import (
    ENGINE,
    PHASES,
    ROOT,
    WRAPPER,
    Modules,
    is_collective,
    parse_collective,
    parse_tag,
    step_number,
    without_layer_numbers,
)
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.operators import Sort
from cs336_systems.profiling.timeline import IN_FLIGHT, MAIN, role_of, roles, timeline
from cs336_systems.profiling.trace import DEVICE, FRAME, KERNEL, Lane, Trace, uncollected

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ABSOLUTE = re.compile(r"^/(?:[^/]+/)*([^/]+/[^/]+\.py\(\d+\))")
FRAME_FILE = re.compile(r"^(\w+)(?:/|\.py\()")


@dataclass
class Frame:
    """Everything that ran under one stack of names."""

    name: str
    paint: str = "other"  # or forward, backward, optimizer, communication, python: what it is part of
    is_operator: bool = False
    self_time: int = 0  # nanoseconds, summed over all steps of the trace
    calls: int = 0  # 0 for a module's backward, which no one calls
    titles: set[str] = field(default_factory=set)  # full names, several where blocks are taken together
    children: dict[str, "Frame"] = field(default_factory=dict)  # in order of first appearance

    def child(self, name: str, paint: str, title: str = "", is_operator: bool = False) -> "Frame":
        """The frame of that name directly inside this one, made if it is new."""
        found = self.children.setdefault(name, Frame(name, paint, is_operator))
        found.titles.add(title or name)
        return found

    def add_kernel(self, name: str, duration: int) -> None:
        """Put a kernel below the frame that launched it, or below none that is known."""
        leaf = self.child(" ".join(name.split()), "communication" if KERNEL.search(name) else self.paint, "", True)
        leaf.self_time += duration
        leaf.calls += 1

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


@dataclass(frozen=True)
class Flame:
    """The frames of one thread of one rank, over `steps` steps. The root bears the thread's name."""

    rank: int
    root: Frame
    steps: int
    clock: Sort = "cpu"

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.root.name}"


@uncollected()
def flames(trace: Trace, clock: Sort = "cpu", collapse_blocks: bool = False) -> list[Flame]:
    """One tree a thread: the main thread first, then autograd's (on a GPU), those of gloo and others.

    `clock` says what is summed: "cpu", the time that the thread was in a frame, or "device", the time of the kernels
    that it launched, which stand as leaves below their operator; those of two streams may overlap. Equal stacks of all
    steps are added up, and with `collapse_blocks` blocks.0, blocks.1, ... as blocks.*.
    """
    names = {lane: name for lane, name in roles(trace).items() if role_of(name) != IN_FLIGHT}
    placer, claimed = _Placer(trace, names, collapse_blocks), set[int]()
    roots: dict[Lane, Frame] = {}
    states: dict[int, _State] = {}
    for node in timeline(trace).nodes:
        if (lane := node.span.lane) not in names:
            continue
        root = roots.setdefault(lane, Frame(names[lane], calls=1))
        parent = states[id(node.parent)] if node.parent else _State(root)
        states[id(node)] = state = placer.place(node, parent)
        state.frame.self_time += node.self_time if clock == "cpu" else 0
        state.frame.calls += state.frame is not parent.frame
        for kernel in node.kernels if clock == "device" else ():
            if id(kernel) not in claimed:
                claimed.add(id(kernel))
                state.frame.add_kernel(kernel.name, kernel.duration)
    found = [roots[lane] for lane in names if lane in roots]
    if clock == "device":
        found.append(Frame("kernels of no known operator"))
        for span in trace.spans:
            if span.category in DEVICE and id(span) not in claimed:
                found[-1].add_kernel(span.name, span.duration)
    return [Flame(trace.rank, root, placer.steps, clock) for root in found if root.total()]


@dataclass(frozen=True)
class _State:
    """The frame of a span, and what those inside it must know."""

    frame: Frame
    modules: Modules = ()
    base: Frame | None = None  # the frame around the autograd engine's nodes, None outside of them
    recomputing: bool = False
    in_step: bool = False
    engine: str = ""  # the autograd node that a span of the engine evaluates


class _Placer:
    """Finds the frame of every span, parents first: mostly below that of the span around it."""

    def __init__(self, trace: Trace, roles: dict[Lane, str], collapse: bool) -> None:
        names = [span.name for span in trace.annotated if span.lane in roles]
        kinds = [sum(name.startswith(kind) and step_number(name) is not None for name in names)
                 for kind in ("step ", "ProfilerStep#")]  # fmt: skip
        self.has_steps, self.steps = any(kinds), kinds[0] or kinds[1] or 1
        self.tagged = any(parse_tag(name) for name in names)
        self.collapse, self.main = collapse, next((lane for lane, role in roles.items() if role == MAIN), None)

    def place(self, node: Node, parent: _State) -> _State:
        """The state of a span inside that of another, or of a root."""
        span, in_step = node.span, parent.in_step or step_number(node.span.name) is not None
        inside = replace(parent, engine="", in_step=in_step)
        if (span.category == FRAME and self._is_dropped(node, in_step)) or span.name == parent.engine != "":
            return inside
        if span.name.startswith(ENGINE):
            return self._evaluate(node, inside)
        paint = _paint(node, parent)
        if span.category == "user_annotation" and (tag := parse_tag(span.name)):
            return self._enter(tag, paint, inside)
        name = ABSOLUTE.sub(r"\1", ADDRESS.sub("", " ".join(span.name.split())))
        if found := parse_collective(name):
            name = f"{found.action} {found.verb} {found.label}".rstrip()
            name = without_layer_numbers(name) if self.collapse else name
        name = "step" if step_number(name) is not None else name
        return replace(inside, frame=parent.frame.child(name, paint, is_operator=span.category == "cpu_op"))

    def _evaluate(self, node: Node, parent: _State) -> _State:
        """A node of the autograd engine goes below the modules that made it, in the tree around the engine."""
        base, modules, engine = parent.base or parent.frame, node.modules, node.span.name[len(ENGINE) :]
        if parent.base and modules:  # the engine runs inside the engine, for a part that was computed again
            modules = (*_around(parent.modules, modules[0][0]), *modules)
        frame = self._descend(base, modules)
        frame = frame.child(engine.removeprefix("torch::autograd::"), "backward", is_operator=True)
        return _State(frame, modules, base, False, parent.in_step, engine)

    def _enter(self, tag: tuple[str, str], paint: str, parent: _State) -> _State:
        """A module's forward; one inside the engine is a recompute, shown below that module's backward."""
        if parent.base and not parent.recomputing:
            modules = (*_around(parent.modules, tag[0]), tag)
            frame = self._descend(parent.base, modules).child("recompute", "forward")
            return replace(parent, frame=frame, modules=modules, recomputing=True)
        modules = (*parent.modules, tag)
        return replace(parent, frame=self._child(parent.frame, modules, paint), modules=modules)

    def _descend(self, frame: Frame, modules: Modules) -> Frame:
        for depth in range(len(modules)):
            frame = self._child(frame, modules[: depth + 1], "backward")
        return frame

    def _child(self, frame: Frame, modules: Modules, paint: str) -> Frame:
        """The frame of the last module: its name relative to the one around it, with its class where that helps."""
        path, kind = modules[-1]
        outer = modules[-2][0] if len(modules) > 1 else ""
        if self.collapse:
            path, outer = without_layer_numbers(path), without_layer_numbers(outer)
        short = path.removeprefix(f"{outer}.")
        if short in (ROOT, WRAPPER) or re.search(r"(^|\.)(\d+|\*)$", short):
            short = f"{short} ({kind})"
        return frame.child(short, paint, f"{path} ({kind})")

    def _is_dropped(self, node: Node, in_step: bool) -> bool:
        """True for a frame outside of steps, and for those of torch, the standard library, builtins and ours."""
        name = node.span.name
        if self.has_steps and node.span.lane == self.main and not in_step:
            return True
        if name.startswith("nn.Module: "):
            return self.tagged
        package = found[1] if (found := FRAME_FILE.match(name)) else ""
        foreign = package == "torch" or package in sys.stdlib_module_names
        return foreign or name.startswith("<") or "cs336_systems/profiling/" in name


def _around(modules: Modules, path: str) -> Modules:
    """Those of some modules that contain the module of a qualified name."""
    return tuple(each for each in modules if each[0] in (ROOT, WRAPPER) or path.startswith(f"{each[0]}."))


def _paint(node: Node, parent: _State) -> str:
    if node.span.category == FRAME:
        return "python"
    if is_collective(node.span.name) or parent.frame.paint == "communication" or node.phase == "synchronise":
        return "communication"
    phase = node.direction if node.direction == "backward" else node.phase
    return "forward" if parent.recomputing else phase if phase in PHASES else "other"


def collapsed(threads: list[Flame]) -> str:
    """Brendan Gregg's collapsed stacks, a line each: `rank 0 main thread;step;forward;... <nanoseconds>`."""
    lines = []
    for flame in threads:
        for stack, own in flame.root.stacks():
            if own:
                names = [flame.name, *(frame.name for frame in stack[1:])]
                lines.append(";".join(printable(name).replace(";", ",") for name in names) + f" {own}\n")
    return "".join(lines)


def speedscope(threads: list[Flame], name: str) -> dict[str, Any]:
    """The JSON that https://www.speedscope.app shows (its file-format-schema.json): one sampled profile a thread."""
    frames: dict[str, int] = {}
    profiles = []
    for flame in threads:
        stacks = [(stack, own) for stack, own in flame.root.stacks() if own]
        samples = [[frames.setdefault(frame.name, len(frames)) for frame in stack] for stack, _ in stacks]
        weights = [own for _, own in stacks]
        profile = {"type": "sampled", "name": flame.name, "unit": "nanoseconds", "startValue": 0}
        profiles.append(profile | {"endValue": sum(weights), "samples": samples, "weights": weights})
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": each} for each in frames]},
        "profiles": profiles,
    }


def clocks(trace: Trace, stem: str) -> dict[str, Sort]:
    """The flame graphs of a trace by the stem of their files: of the CPU's time and, with kernels, of the device's."""
    device = any(span.category in DEVICE for span in trace.spans)
    return {stem: "cpu", f"{stem}_device": "device"} if device else {stem: "cpu"}


def write_flame(trace: Trace, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.collapsed.txt` and `<stem>.speedscope.json`, with kernels also those of `<stem>_device`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, clock in clocks(trace, stem).items():
        threads = flames(trace, clock)
        text, scope = folder / f"{name}.collapsed.txt", folder / f"{name}.speedscope.json"
        text.write_text(collapsed(threads), encoding="utf-8")
        found = speedscope(threads, f"Flame graph of rank {trace.rank} of {trace.world_size}, {clock}")
        scope.write_text(json.dumps(found, separators=(",", ":"), allow_nan=False), encoding="utf-8")
        paths += [text, scope]
    return paths
