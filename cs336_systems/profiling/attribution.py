"""Whose time is it? For every operator its phase, and the module whose forward ran it or made the backward that did.

torch.profiler shows the backward pass as a flat list of autograd nodes without modules. But it links each to the
operator of the forward pass that made it (by a sequence number that both carry), and that lies inside a module's tag.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cs336_systems.profiling.nesting import Node, nest_host
from cs336_systems.profiling.tags import ROOT, kind_of, parse_tag
from cs336_systems.profiling.trace import DEVICE, Lane, Span, Trace

Modules = tuple[tuple[str, str], ...]  # (qualified name, class) from the outermost inwards

PHASES = ("forward", "backward", "synchronise", "optimizer")  # the names of annotations that part a step
ENGINE = "autograd::engine::evaluate_function: "
NO_MODULE: Modules = ()


@dataclass(frozen=True)
class Placed:
    """A span on a CPU thread and what it belongs to.

    `modules` are (qualified name, class) from the outermost inwards; `direction` says whether this is their forward or
    the backward of it. `node` knows self time, children and parents; `kernels` are what it launched itself.
    """

    node: Node
    lane: Lane
    phase: str
    direction: str
    modules: Modules
    kernels: tuple[Span, ...] = ()

    @property
    def span(self) -> Span:
        return self.node.span

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
        return kind_of(self.modules[-1][1]) if self.modules else ""

    @property
    def device_self(self) -> int:
        """Nanoseconds on the device of the kernels that this span itself launched."""
        return sum(kernel.duration for kernel in self.kernels)

    def inside(self, kind: str) -> bool:
        """Whether one of its modules is of a kind, `attention` for example."""
        return any(kind_of(name) == kind for _, name in self.modules)


def attribute(trace: Trace) -> list[Placed]:
    """Every span of the CPU threads with its phase and modules, parents before children, lane by lane."""
    return list(walk(nest_host(trace), trace))


def walk(lanes: dict[Lane, list[Node]], trace: Trace) -> Iterator[Placed]:
    """As `attribute`, for trees that are there already."""
    kernels = _kernels(trace)
    makers = _makers(lanes, trace)
    for lane, roots in lanes.items():
        todo: list[tuple[Node, str, str, Modules]] = []
        todo += [(root, "other", "forward", NO_MODULE) for root in reversed(roots)]
        while todo:
            node, phase, direction, modules = todo.pop()
            phase, direction, modules = _place(node, phase, direction, modules, makers)
            mine = () if node.span.category in DEVICE else kernels.get(node.span.args.get("External id", -1), ())
            # The runtime call that launched a kernel bears the same id as the operator around it.
            mine = () if node.span.category.startswith("cuda_") else mine
            yield Placed(node, lane, phase, direction, modules, tuple(mine))
            todo += [(child, phase, direction, modules) for child in reversed(node.children)]


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
    if span.name.startswith(ENGINE):
        return ("backward" if phase == "other" else phase), "backward", makers.get(id(node), NO_MODULE)
    return phase, direction, modules


def _encloses(outer: tuple[str, str], inner: tuple[str, str]) -> bool:
    """Whether a module's qualified name says that it holds another."""
    return outer[0] in (ROOT, "wrapper") or inner[0].startswith(f"{outer[0]}.")


def _modules_of(node: Node) -> Modules:
    found = [parse_tag(each.span.name) for each in node.path() if each.span.category == "user_annotation"]
    return tuple(each for each in found if each)


def _makers(lanes: dict[Lane, list[Node]], trace: Trace) -> dict[int, Modules]:
    """For every node of the autograd engine, by identity, the modules inside which its forward operator ran.

    torch draws a link from the operator to what is directly inside the engine's node.
    """
    sources = {link.target: link.source for link in trace.links}
    starts: dict[tuple[Lane, int], Node] = {}
    engine: list[tuple[Lane, Node]] = []
    for lane, roots in lanes.items():
        for node in (each for root in roots for each in root.walk()):
            starts[lane, node.span.start] = node  # of two that start together the inner one, which is later
            if node.span.name.startswith(ENGINE):
                engine.append((lane, node))
    found = {}
    for lane, node in engine:
        source = next((sources[lane, c.span.start] for c in node.children if (lane, c.span.start) in sources), None)
        if source in starts:
            found[id(node)] = _modules_of(starts[source])
    return found


def _kernels(trace: Trace) -> dict[int, list[Span]]:
    """What ran on a GPU, by the id of the operator that launched it."""
    found: dict[int, list[Span]] = {}
    for span in trace.spans:
        if span.category in DEVICE and (number := span.args.get("External id")) is not None:
            found.setdefault(number, []).append(span)
    return found
