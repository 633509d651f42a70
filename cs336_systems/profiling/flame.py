"""Flame graphs: a whole trace as a tree of frames whose self times sum, to the nanosecond, to the time of its roots.

Every operator of backward is below the modules whose forward created it: `backward;model;blocks.*;attention;query`. A
recomputed forward is below the backward of its module. A frame that is left out leaves its time to the one around it.
Sends and receives "in flight" are no work of any thread, and are left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from cs336_systems.profiling.names import ENGINE, UNNAMED, Modules, parse_collective, step_number, without_layer_numbers
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.timeline import IN_FLIGHT, Sort, roles, timeline
from cs336_systems.profiling.trace import DEVICE, KERNEL, Trace, once

DEEPEST = 250  # frames in a stack; the last one has the time of deeper ones
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass
class Frame:
    """A frame: everything that ran under one stack of names. Times are nanoseconds, summed over all steps."""

    name: str
    paint: str = "other"  # its part: also forward, backward, optimizer, communication
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
def flames(trace: Trace, clock: Sort = "cpu") -> list[Frame]:
    """One tree per thread, whose root has its name: the main thread first, then autograd's (on a GPU), gloo's, others.
    `clock` says what is summed: "cpu", the time that the thread was in a frame, or "device", the time of the kernels
    that it launched, which are leaves below their operator; those of two streams may overlap. Equal stacks of all steps
    are added up, also those of blocks.0, blocks.1, ... as blocks.*."""
    roots = {lane: Frame(name) for lane, name in roles(trace).items() if not name.startswith(IN_FLIGHT)}
    places: dict[Node, Place] = {}
    for node in (node for node in timeline(trace).nodes if node.span.lane in roots):
        parent = places[node.parent] if node.parent else (roots[node.span.lane], None)
        places[node] = place = _place(node, parent)
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


def _place(node: Node, parent: Place) -> Place:
    """Place of a span, given that of the span around it, or of a root: usually below that."""
    span, up, (frame, base) = node.span, node.parent, parent
    if up and up.span.name == ENGINE + span.name:
        return parent
    paint = node.direction if base or node.direction == "backward" else node.phase
    paint = "communication" if node.collective or node.phase == "synchronise" else paint
    if span.name.startswith(ENGINE):  # below the modules that made it, in the tree around the engine
        engine, name = base or frame, span.name.removeprefix(ENGINE).removeprefix("torch::autograd::")
        return _descend(engine, node.modules).child(name, "backward", is_operator=True), engine
    if tag := node.tag:
        if base and up and up.direction == "backward":  # a forward inside the engine is a recompute
            return _descend(base, node.modules).child("recompute", "forward"), base
        outer = up.modules[-1][0] if up and up.modules else ""
        return _descend(frame, (tag,), paint, outer), base
    found = parse_collective(name := " ".join(ADDRESS.sub("", span.name).split()))
    name = without_layer_numbers(found.title) if found else "step" if step_number(name) is not None else name
    return frame.child(name, paint, span.category == "cpu_op"), base


def _descend(frame: Frame, modules: Modules, paint: str = "backward", outer: str = "") -> Frame:
    """The frame of the last of some modules, below that of the `outer` one."""
    for path, kind in modules:
        frame, outer = frame.child(_module_name(path, outer, kind), paint), path
    return frame


@lru_cache(maxsize=100_000)
def _module_name(path: str, outer: str, kind: str) -> str:
    """A module's name relative to the one around it, with its class if that helps."""
    name = without_layer_numbers(path).removeprefix(f"{without_layer_numbers(outer)}.")
    return f"{name} ({kind})" if name in UNNAMED or re.search(r"(^|\.)(\d+|\*)$", name) else name
