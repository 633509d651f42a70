"""One rank's timeline: every span of its CPU threads with its phase, its modules and its busy time; made once.

A trace names threads by numbers only, so their roles follow from what ran on them.

torch.profiler shows the backward pass as a flat list of autograd nodes without modules. But it links each to the
operator of the forward pass that made it (by a sequence number that both carry), and that lies inside a module's span.

Busy time counts every nanosecond of the threads that compute once. Python frames, recorded with stacks, count for what
is around them, so that a table is the same with stacks and without. On a GPU backward runs on a thread of autograd
while the main thread is blocked inside `backward`: then only autograd's counts.
"""

import re
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

from cs336_systems.profiling.intervals import union
from cs336_systems.profiling.module_spans import ROOT, parse_tag
from cs336_systems.profiling.names import ENGINE, PHASES, parse_collective, step_number
from cs336_systems.profiling.nesting import Modules, Node, nest_host
from cs336_systems.profiling.trace import COMMUNICATION, DEVICE, FRAME, HOST, Lane, Span, Trace, once

MAIN = "main thread"
AUTOGRAD = "autograd thread"
COMMUNICATING = "communication thread"
IN_FLIGHT = "in flight"
OTHER = "other thread"
ROLES = (MAIN, AUTOGRAD, COMMUNICATING, IN_FLIGHT, OTHER)


@once
def roles(trace: Trace) -> dict[Lane, str]:
    """The role of each lane of the CPU, in the order in which they are shown.

    "main thread" takes the steps. "autograd thread" runs backward where that is not the main thread, as on a GPU; a
    second one, of another GPU, is "autograd thread 1". "communication thread 0", 1 ... run gloo's collectives. "in
    flight 0", 1 ... are no threads: they hold sends and receives from posting to the end of the wait. All others are
    "other thread 0", 1 ...
    """
    lanes = trace.lanes(HOST)
    threads = [lane for lane in lanes if not str(lane[1]).startswith(IN_FLIGHT)]
    main = max(threads, key=lambda lane: _main_score(lane, lanes[lane]), default=None)
    found: dict[str, list[Lane]] = {role: [] for role in ROLES}
    for lane in sorted(lanes, key=lambda lane: (lane_number(lane), str(lane))):
        found[MAIN if lane == main else _role(lane, lanes[lane])].append(lane)
    return {
        lane: role if role in (MAIN, AUTOGRAD) and not number else f"{role} {number}"
        for role, members in found.items()
        for number, lane in enumerate(members)
    }


def role_of(name: str) -> str:
    """One of ROLES: `communication thread 1` -> `communication thread`."""
    return next(role for role in ROLES if name.startswith(role))


def lane_number(lane: Lane) -> int:
    """The first number in a lane's thread id, to sort by."""
    found = re.search(r"\d+", str(lane[1]))
    return int(found[0]) if found else 0


def _main_score(lane: Lane, spans: list[Span]) -> tuple[int, bool, int, int]:
    """The main thread has the most steps, phases and modules; else it is Linux's first thread, else the busiest."""
    annotated = [span.name for span in spans if span.category == "user_annotation"]
    ours = sum(name in PHASES or step_number(name) is not None or parse_tag(name) is not None for name in annotated)
    return ours, lane[0] == lane[1], len(spans), -lane_number(lane)


def _role(lane: Lane, spans: list[Span]) -> str:
    if str(lane[1]).startswith(IN_FLIGHT):
        return IN_FLIGHT
    if any(span.name.startswith(ENGINE) for span in spans):
        return AUTOGRAD
    # NCCL has no thread of its own: it annotates the one that launches.
    own = any(COMMUNICATION.match(span.name) and not span.name.startswith("nccl") for span in spans)
    return COMMUNICATING if own else OTHER


@dataclass(frozen=True)
class Timeline:
    """`nodes` are all spans of CPU threads, thread by thread, parents before children; `busy` those of the threads that
    compute, without Python frames; `apart` the lanes that move data between ranks, by role. `on_device` says that an
    operator that computes launched something on a GPU, so that `Node.time` is the device's."""

    nodes: list[Node]
    busy: list[Node]
    apart: dict[Lane, str]
    on_device: bool


@once
def timeline(trace: Trace) -> Timeline:
    """Nest a trace's spans, attribute them to phases and modules, and share out the time."""
    nodes = attribute(trace, nest_host(trace))
    apart = {lane: role for lane, role in roles(trace).items() if role_of(role) in (COMMUNICATING, IN_FLIGHT)}
    computing = [node for node in nodes if node.span.lane not in apart]
    on_device = any(node.kernels for node in computing)
    busy = _share_out(computing)
    _subtract_engine(computing, roles(trace))
    for node in busy:
        node.time = node.device_self if on_device else node.busy
    return Timeline(nodes, busy, apart, on_device)


def attribute(trace: Trace, lanes: dict[Lane, list[Node]]) -> list[Node]:
    """Fill in phase, direction, modules and kernels of all nodes below some roots by lane; parents come first."""
    kernels: dict[int, list[Span]] = {}  # by the id of the operator that launched them
    for span in trace.spans:
        if span.category in DEVICE and (number := span.args.get("External id")) is not None:
            kernels.setdefault(number, []).append(span)
    makers, engines = _makers(trace, lanes)
    phases = [span for span in trace.spans if span.category == "user_annotation" and span.name in PHASES]
    starts, phase_lanes = [span.start for span in phases], {span.lane for span in phases}
    result: list[Node] = []
    for lane, roots in lanes.items():
        # Autograd's thread on a GPU works during the phases of the thread that waits for it.
        follows = lane in engines and lane not in phase_lanes
        for root in roots:
            last = bisect(starts, root.span.start) - 1 if follows else -1
            if last >= 0 and root.span.start < phases[last].end:
                root.phase = phases[last].name
            for node in root.walk():
                up = node.parent
                if up is not None:
                    node.phase, node.direction, node.modules = up.phase, up.direction, up.modules
                if node.span.category == "user_annotation" or id(node) in makers:
                    _enter(node, makers)
                # The runtime call that launched a kernel bears the same id as the operator around it.
                if kernels and not node.span.category.startswith("cuda_"):
                    node.kernels = tuple(kernels.get(node.span.args.get("External id", -1), ()))
                result.append(node)
    return result


def _enter(node: Node, makers: dict[int, Modules]) -> None:
    """Change phase, direction and modules where an annotation or a node of autograd's engine begins."""
    name = node.span.name
    if node.span.category == "user_annotation":
        if name in PHASES:
            node.phase, node.direction, node.modules = name, "forward", ()
        elif name.startswith("Optimizer.step#") and node.phase == "other":
            node.phase, node.direction, node.modules = "optimizer", "forward", ()
        elif found := parse_tag(name):
            around = node.modules
            if node.direction == "backward":  # recomputation enters modules anew, inside another module's backward
                around = tuple(m for m in around if m[0] in (ROOT, "wrapper") or found[0].startswith(f"{m[0]}."))
            node.phase = "forward" if node.phase == "other" else node.phase
            node.direction, node.modules = "forward", (*around, found)
    if id(node) in makers:
        node.phase = "backward" if node.phase == "other" else node.phase
        node.direction, node.modules = "backward", makers[id(node)]


def _makers(trace: Trace, lanes: dict[Lane, list[Node]]) -> tuple[dict[int, Modules], set[Lane]]:
    """For every node of the autograd engine, by identity, the modules inside which its forward operator ran; and the
    engine's lanes. torch draws a link from the operator to what is directly inside the engine's node."""
    starts: dict[tuple[Lane, int], Node] = {}
    wanted = set(trace.links.values())
    engine: list[Node] = []
    for lane, roots in lanes.items():
        for node in (each for root in roots for each in root.walk()):
            if (lane, node.span.start) in wanted:
                starts[lane, node.span.start] = node  # of two that start together the inner one, which comes later
            if node.span.name.startswith(ENGINE):
                engine.append(node)
    found: dict[int, Modules] = {}
    for node in engine:
        linked = [(child.span.lane, child.span.start) for child in node.children]
        source = next((trace.links[place] for place in linked if place in trace.links), None)
        path = starts[source].path() if source in starts else []
        tags = [parse_tag(each.span.name) for each in path if each.span.category == "user_annotation"]
        found[id(node)] = tuple(each for each in tags if each)
    return found, {node.span.lane for node in engine}


def _share_out(nodes: list[Node]) -> list[Node]:
    """Give every node that is no Python frame its own nanoseconds; returns those."""
    result = []
    for node in nodes:
        up = node.parent
        node.outer = None if up is None else up.outer if up.span.category == FRAME else up
        if node.span.category == FRAME:
            continue
        node.busy = node.duration
        node.collective = (node.outer is not None and node.outer.collective) or _is_collective(node.span.name)
        if node.outer is not None:
            node.outer.busy -= node.duration
            node.outer.inner += 1
        result.append(node)
    return result


def _is_collective(name: str) -> bool:
    known = name.startswith(("launch ", "wait ")) and parse_collective(name) is not None
    return known or name.startswith("c10d::") or COMMUNICATION.match(name) is not None


def _subtract_engine(nodes: list[Node], names: dict[Lane, str]) -> None:
    """Take out of annotations on the main thread what autograd's threads did meanwhile, between the spans inside."""
    kinds = {lane: role_of(role) for lane, role in names.items()}
    worked = [(n.span.start, n.end) for n in nodes if n.parent is None and kinds[n.span.lane] == AUTOGRAD]
    engine = union(worked)
    if not engine:
        return
    starts = [start for start, _ in engine]
    before = [0, *accumulate(end - start for start, end in engine)]

    def until(time: int) -> int:
        last = bisect(starts, time) - 1
        return before[last] + min(time, engine[last][1]) - starts[last] if last >= 0 else 0

    for node in nodes:
        if node.span.category == FRAME or kinds[node.span.lane] != MAIN:
            continue
        meanwhile = until(node.end) - until(node.span.start)
        for each, sign in ((node, 1), (node.outer, -1)):
            if each is not None and each.span.category == "user_annotation":
                each.busy -= sign * meanwhile
