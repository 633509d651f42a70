"""One rank's timeline: the nested spans of every CPU thread, each with phase, modules and self time; made once.

torch.profiler shows the backward pass as a flat list of autograd nodes without modules. But it links each to the
operator of forward that created it, and that is inside a module's span. On a GPU backward runs on a thread of autograd
while the main thread is blocked inside `backward`: then only autograd's thread counts.
"""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal

import numpy as np

from cs336_systems.profiling.intervals import union
from cs336_systems.profiling.names import ENGINE, ON_HOST, PHASES, around, is_collective, is_division, step_number
from cs336_systems.profiling.nesting import Node, allocations, innermost, nested
from cs336_systems.profiling.trace import DEVICE, HOST, KERNEL, RUNTIME, Lane, Span, Trace, once

Sort = Literal["cpu", "device"]
MAIN, AUTOGRAD, COMMUNICATING = "main thread", "autograd thread", "communication thread"
IN_FLIGHT, OTHER = "in flight", "other thread"
MOST_MODULES = 32  # most modules nested in each other; what is deeper counts for those around it
GRAPH, UNLAUNCHED = "CUDA graph", "no operator"  # prefixes of the rows of kernels that no operator launched
GRAPH_LAUNCH = re.compile("(cuda|cu|hip)GraphLaunch")


@once
def roles(trace: Trace) -> dict[Lane, str]:
    """The role of each lane of the CPU, in the order in which they are shown; a trace names threads by numbers only.

    "main thread" takes the steps. "autograd thread" (of a second GPU "autograd thread 1") runs backward where that is
    not the main thread. "communication thread 0", 1 ... run gloo's collectives. "in flight 0", 1 ... are no threads:
    they show sends and receives from posting to the end of the wait. All others are "other thread 0", 1 ...
    """
    lanes = trace.lanes(*HOST)

    def score(lane: Lane) -> tuple[int, bool, int, int]:
        """The main thread has the most steps, phases and modules; else it is Linux's first thread, else the busiest."""
        names = [span.name for span in lanes[lane] if span.category == "user_annotation"]
        return sum(map(is_division, names)), lane[0] == lane[1], len(lanes[lane]), -lane_number(lane)

    main = max((lane for lane in lanes if not str(lane[1]).startswith(IN_FLIGHT)), key=score, default=None)
    found: dict[str, list[Lane]] = {role: [] for role in (MAIN, AUTOGRAD, COMMUNICATING, IN_FLIGHT, OTHER)}
    for lane in sorted(lanes, key=lambda lane: (lane_number(lane), str(lane))):
        names = [span.name for span in lanes[lane]]
        gloo = any(map(ON_HOST.match, names))
        role = AUTOGRAD if any(name.startswith(ENGINE) for name in names) else COMMUNICATING if gloo else OTHER
        found[MAIN if lane == main else IN_FLIGHT if str(lane[1]).startswith(IN_FLIGHT) else role].append(lane)
    return {
        lane: role if role in (MAIN, AUTOGRAD) and not number else f"{role} {number}"
        for role, members in found.items()
        for number, lane in enumerate(members)
    }


def lane_number(lane: Lane) -> int:
    """The first number in a lane's thread id, to sort by."""
    return int(found[0]) if (found := re.search(r"\d{1,18}", str(lane[1]))) else 0


@dataclass(frozen=True)
class Timeline:
    """One rank's spans, nested and attributed."""

    nodes: list[Node]  # all spans of CPU threads, thread by thread, parents before children
    busy: list[Node]  # those of the threads that compute
    apart: dict[Lane, str]  # the lanes that move data between ranks, by role
    clock: Sort  # of `Node.time` and the tables: the device's if an operator launched anything there
    steps: list[Span]
    phases: list[Span]  # without annotations, those of the operators

    @property
    def step_count(self) -> int:
        """Number of steps, without torch.profiler's own annotations of the same steps."""
        return sum(step.name.startswith("step ") for step in self.steps) or len(self.steps)


@once
def timeline(trace: Trace) -> Timeline:
    """Nest a trace's spans, attribute them to phases and modules, and give each its time."""
    steps = [span for span in trace.annotated if step_number(span.name) is not None]
    phases = [span for span in trace.annotated if span.name in PHASES]
    nodes = _attribute(trace, phases)
    unowned = _assign_kernels(trace, nodes)
    apart = {lane: role for lane, role in roles(trace).items() if role.startswith((COMMUNICATING, IN_FLIGHT))}
    computing = [node for node in nodes if node.span.lane not in apart]
    busy = computing + unowned
    clock: Sort = "device" if any(node.kernels for node in busy) else "cpu"
    _subtract_engine(computing, roles(trace))
    for event, owner in allocations(trace, trace.memory_device):
        if owner is not None:
            owner.nbytes += event.nbytes
    for node in reversed(busy):
        node.time = node.device_self if clock == "device" else node.busy
        node.launched, node.allocated = node.launched + node.device_self, node.allocated + node.nbytes
        if node.parent is not None:
            node.parent.launched += node.launched
            node.parent.allocated += node.allocated
    return Timeline(nodes, busy, apart, clock, steps, phases or _implied_phases(nodes))


def _attribute(trace: Trace, phases: list[Span]) -> list[Node]:
    """All spans of CPU threads with phase, direction, modules and self time; parents first."""
    nodes = [node for each in nested(trace).values() for node in each]
    places = {(node.span.lane, node.span.start): node for node in nodes}  # the inner one of two that start together
    engines = {node.span.lane for node in nodes if node.span.name.startswith(ENGINE)} - {span.lane for span in phases}
    phase_of = phase_at(phases)
    for node in nodes:
        if (up := node.parent) is not None:
            node.phase, node.direction, node.modules = up.phase, up.direction, up.modules
        elif node.span.lane in engines:
            # Autograd's thread on a GPU works during the phases of the thread that waits for it.
            node.phase = phase_of(node.span.start)
        if node.span.category == "user_annotation":
            _enter(node)
        if node.span.name.startswith(ENGINE):
            # torch links the operator of forward to the span directly inside the engine's node.
            inside = [(child.span.lane, child.span.start) for child in node.children]
            linked = [trace.links[place] for place in inside if place in trace.links]
            source = next((places[place] for place in linked if place in places), None)
            modules = tuple(reversed([tag for each in source.outwards() if (tag := each.tag)] if source else []))
            if modules and up is not None and up.direction == "backward":  # of a part that was computed again
                modules = (*around(up.modules, modules[0][0]), *modules)
            node.phase = "backward" if node.phase == "other" else node.phase
            node.direction, node.modules = "backward", modules
        node.busy, node.collective = node.duration, is_collective(node.span.name)
        if up is not None:
            node.collective |= up.collective
            up.busy -= node.duration
    return nodes


def _assign_kernels(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Give kernels to the operators that launched them: those around the runtime call of the same correlation, or, if
    that was not recorded, the one of the same "External id". Returns nodes for kernels that no operator launched."""
    apart = list[Node]()
    by_id = dict[Any, Node]()
    callers = innermost(nested(trace), [(call.lane, call.start) for call in trace.calls.values()])
    for node in nodes:
        if node.span.category not in RUNTIME and (number := node.span.args.get("External id")) is not None:
            by_id.setdefault(number, node)
    for kernel in (span for span in trace.spans if span.category in DEVICE):
        number, call = kernel.args.get("External id"), trace.calls.get(kernel.args.get("correlation"))
        # Until 2023 a kernel's "External id" was its correlation, another numbering than the operators'.
        named = by_id.get(number) if number != kernel.args.get("correlation") else None
        owner = callers[call.lane, call.start] if call else named
        outwards = owner.outwards() if owner else iter(())
        owner = next((node for node in outwards if node.span.category not in RUNTIME), None)
        graph = kernel.args.get("graph node id") or (call and GRAPH_LAUNCH.match(call.name))
        if owner is None or graph:
            span, around = kernel._replace(name=f"{GRAPH if graph else UNLAUNCHED}: {kernel.name}"), owner
            apart.append(owner := Node(span, span.start, collective=bool(KERNEL.search(kernel.name))))
            if around is not None:
                owner.phase, owner.direction, owner.modules = around.phase, around.direction, around.modules
        owner.kernels += (kernel,)
        owner.device_self += kernel.duration
    return apart


def phase_at(phases: list[Span]) -> Callable[[int], str]:
    """A function of a time: the name of the phase that began last of those under way then, or "other"."""
    starts, latest = [phase.start for phase in phases], list(accumulate((phase.end for phase in phases), max))

    def find(time: int) -> str:
        place = bisect_right(starts, time)
        while place and time < latest[place - 1]:  # no earlier one ends later
            place -= 1
            if time < phases[place].end:
                return phases[place].name
        return "other"

    return find


def _enter(node: Node) -> None:
    """Change phase, direction and modules at the start of an annotation."""
    name = node.span.name
    if name in PHASES or (name.startswith("Optimizer.step#") and node.phase == "other"):
        node.phase = name if name in PHASES else "optimizer"
        node.direction, node.modules = "forward", ()
    elif found := node.tag:
        # Recomputation enters modules again, inside another module's backward.
        outer = around(node.modules, found[0]) if node.direction == "backward" else node.modules
        node.phase = "forward" if node.phase == "other" else node.phase
        node.direction, node.modules = "forward", (*outer, found)[:MOST_MODULES]


def _implied_phases(nodes: list[Node]) -> list[Span]:
    """The phases of a trace without annotations of them: those of its operators, neighbours taken together."""
    outermost = [node for node in nodes if node.phase != "other" and (not node.parent or node.parent.phase == "other")]
    found: list[Span] = []
    for phase, group in groupby(sorted(outermost, key=lambda node: node.span.start), key=lambda node: node.phase):
        spans = [node.span for node in group]
        found.append(spans[0]._replace(name=phase, end=max(span.end for span in spans)))
    return found


def _subtract_engine(nodes: list[Node], role: dict[Lane, str]) -> None:
    """Subtract from annotations on the main thread the work of autograd's threads meanwhile, outside of inner spans."""
    engine = union((n.span.start, n.end) for n in nodes if n.parent is None and role[n.span.lane].startswith(AUTOGRAD))
    if not engine:
        return
    edges = np.array(engine).ravel() - engine[0][0]  # counted from the first, floats are exact
    worked = np.cumsum(np.diff(edges, prepend=0) * (np.arange(len(edges)) % 2))
    main = [node for node in nodes if role[node.span.lane] == MAIN]
    times = [(node.span.start - engine[0][0], node.end - engine[0][0]) for node in main]
    done = np.interp(np.array(times, dtype=float).reshape(-1, 2), edges, worked)
    for node, time in zip(main, (done[:, 1] - done[:, 0]).astype(int).tolist(), strict=True):
        for each, sign in ((node, 1), (node.parent, -1)):
            if time and each is not None and each.span.category == "user_annotation":
                each.busy -= sign * time
