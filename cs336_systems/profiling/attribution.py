"""Whose time is it? For every operator its phase, and the module whose forward ran it or made the backward that did.

torch.profiler shows the backward pass as a flat list of autograd nodes without modules. But it links each to the
operator of the forward pass that made it (by a sequence number that both carry), and that lies inside a module's tag.
"""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cs336_systems.profiling.nesting import Node, nest_host
from cs336_systems.profiling.tags import ROOT, kind_of, parse_tag
from cs336_systems.profiling.trace import DEVICE, Lane, Span, Trace, once

Modules = tuple[tuple[str, str], ...]  # (qualified name, class) from the outermost inwards

PHASES = ("forward", "backward", "synchronise", "optimizer")  # the names of annotations that part a step
ENGINE = "autograd::engine::evaluate_function: "
NO_MODULE: Modules = ()


@dataclass(slots=True, eq=False)
class Placed:
    """A span on a CPU thread and what it belongs to.

    `modules` are (qualified name, class) from the outermost inwards; `direction` says whether this is their forward or
    the backward of it. `node` knows self time, children and parents; `kernels` are what it launched itself.
    """

    node: Node
    span: Span
    lane: Lane
    phase: str
    direction: str
    modules: Modules
    kernels: tuple[Span, ...] = ()

    @property
    def is_operator(self) -> bool:
        return self.span.category == "cpu_op"

    @property
    def module(self) -> str:
        """Qualified name of the innermost module; empty if there is none."""
        return self.modules[-1][0] if self.modules else ""

    @property
    def kind(self) -> str:
        """The innermost module's part of a model."""
        return kinds_of(self.modules)[-1] if self.modules else ""

    @property
    def device_self(self) -> int:
        """Nanoseconds on the device of the kernels that this span itself launched."""
        return sum(kernel.duration for kernel in self.kernels)

    def inside(self, kind: str) -> bool:
        """Whether one of its modules is of a kind, `attention` for example."""
        return kind in kinds_of(self.modules)


@lru_cache(maxsize=10_000)
def kinds_of(modules: Modules) -> tuple[str, ...]:
    """Which part of a model each module is, from the outermost inwards."""
    return tuple(kind_of(class_name) for _, class_name in modules)


@once
def attribute(trace: Trace) -> list[Placed]:
    """Every span of the CPU threads with its phase and modules, parents before children, lane by lane."""
    return list(walk(nest_host(trace), trace))


def walk(lanes: dict[Lane, list[Node]], trace: Trace) -> Iterator[Placed]:
    """As `attribute`, for trees that are there already."""
    kernels = _kernels(trace)
    makers, engines = _makers(lanes, trace)
    phases = _Phases(trace)
    for lane, roots in lanes.items():
        around = phases if lane in engines and lane not in phases.lanes else _Phases()
        todo: list[tuple[Node, str, str, Modules]] = []
        todo += [(root, around.at(root.span.start), "forward", NO_MODULE) for root in reversed(roots)]
        while todo:
            node, phase, direction, modules = todo.pop()
            span = node.span
            if span.category == "user_annotation" or id(node) in makers:
                phase, direction, modules = _place(node, phase, direction, modules, makers)
            mine: list[Span] | tuple[Span, ...] = ()
            # The runtime call that launched a kernel bears the same id as the operator around it.
            if kernels and not span.category.startswith("cuda_"):
                mine = kernels.get(span.args.get("External id", -1), ())
            yield Placed(node, span, lane, phase, direction, modules, tuple(mine))
            if node.children:
                todo += [(child, phase, direction, modules) for child in reversed(node.children)]


class _Phases:
    """When each phase was. Autograd's thread on a GPU works during those of the thread that waits for it."""

    def __init__(self, trace: Trace | None = None) -> None:
        spans = trace.spans if trace else ()
        self.spans = [span for span in spans if span.category == "user_annotation" and span.name in PHASES]
        self.starts = [span.start for span in self.spans]
        self.lanes = {span.lane for span in self.spans}

    def at(self, time: int) -> str:
        """The phase at a moment, "other" between them."""
        last = bisect(self.starts, time) - 1
        return self.spans[last].name if last >= 0 and time < self.spans[last].end else "other"


def _place(
    node: Node,
    phase: str,
    direction: str,
    modules: Modules,
    makers: dict[int, Modules],
) -> tuple[str, str, Modules]:
    span = node.span
    if span.category == "user_annotation":
        if span.name in PHASES:
            return span.name, "forward", NO_MODULE
        if span.name.startswith("Optimizer.step#") and phase == "other":
            return "optimizer", "forward", NO_MODULE
        if found := parse_tag(span.name):
            # What backward recomputes enters its modules anew, inside the backward of another module that needs it.
            around = modules if direction == "forward" else tuple(each for each in modules if _encloses(each, found))
            return ("forward" if phase == "other" else phase), "forward", (*around, found)
    if id(node) in makers:
        return ("backward" if phase == "other" else phase), "backward", makers[id(node)]
    return phase, direction, modules


def _encloses(outer: tuple[str, str], inner: tuple[str, str]) -> bool:
    """Whether a module's qualified name says that it holds another."""
    return outer[0] in (ROOT, "wrapper") or inner[0].startswith(f"{outer[0]}.")


def _modules_of(node: Node) -> Modules:
    found = [parse_tag(each.span.name) for each in node.path() if each.span.category == "user_annotation"]
    return tuple(each for each in found if each)


def _makers(lanes: dict[Lane, list[Node]], trace: Trace) -> tuple[dict[int, Modules], set[Lane]]:
    """For every node of the autograd engine, by identity, the modules inside which its forward operator ran; and the
    lanes of the engine.

    torch draws a link from the operator to what is directly inside the engine's node.
    """
    sources = {link.target: link.source for link in trace.links}
    times: dict[Lane, set[int]] = {}
    for lane, time in sources.values():
        times.setdefault(lane, set()).add(time)
    starts: dict[tuple[Lane, int], Node] = {}
    engine: list[tuple[Lane, Node]] = []
    for lane, roots in lanes.items():
        linked = times.get(lane, set())
        for node in (each for root in roots for each in root.walk()):
            if node.span.start in linked:
                starts[lane, node.span.start] = node  # of two that start together the inner one, which is later
            if node.span.name.startswith(ENGINE):
                engine.append((lane, node))
    found = {}
    for lane, node in engine:
        source = next((sources[lane, c.span.start] for c in node.children if (lane, c.span.start) in sources), None)
        found[id(node)] = _modules_of(starts[source]) if source in starts else NO_MODULE
    return found, {lane for lane, _ in engine}


def _kernels(trace: Trace) -> dict[int, list[Span]]:
    """What ran on a GPU, by the id of the operator that launched it."""
    found: dict[int, list[Span]] = {}
    for span in trace.spans:
        if span.category in DEVICE and (number := span.args.get("External id")) is not None:
            found.setdefault(number, []).append(span)
    return found
