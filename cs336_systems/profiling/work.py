"""What the threads that compute did: operators and annotations with their own time, every nanosecond counted once.

Python frames, recorded with stacks, count for what is around them, so that a table is the same with stacks and without.
On a GPU backward runs on a thread of autograd while the main thread is blocked inside `backward`: then only autograd's
counts, or each moment would count twice.
"""

from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from cs336_systems.profiling.attribution import Placed, attribute
from cs336_systems.profiling.intervals import Interval, union
from cs336_systems.profiling.names import FRAME, parse_collective
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.threads import AUTOGRAD, COMMUNICATING, IN_FLIGHT, MAIN, role_of, roles
from cs336_systems.profiling.trace import COMMUNICATION, Lane, Trace, once


@dataclass(slots=True, eq=False)
class Work:
    """An operator or annotation on a thread that computes, and the nearest such around it.

    `own` is nanoseconds in it and in none inside; `time` is what it costs: nanoseconds on the device of what it
    launched, or `own` if nothing ran on a device. `collective` says whether it launches or awaits one, or lies inside.
    """

    placed: Placed
    parent: "Work | None"
    own: int
    time: int
    collective: bool
    children: int = 0

    def above(self) -> Iterable["Work"]:
        """Those around it, the nearest first."""
        up = self.parent
        while up is not None:
            yield up
            up = up.parent


def lanes_apart(trace: Trace) -> dict[Lane, str]:
    """The lanes that move data between ranks rather than compute, and what they are called."""
    return {lane: role for lane, role in roles(trace).items() if role_of(role) in (COMMUNICATING, IN_FLIGHT)}


@once
def on_device(trace: Trace) -> bool:
    """Whether any operator that computes launched something on a GPU, so that the device's time is the one to look
    at."""
    apart = lanes_apart(trace)
    return any(each.kernels for each in attribute(trace) if each.lane not in apart)


@once
def working(trace: Trace) -> list[Work]:
    """All that ran on the threads that compute, parents before children, without Python frames."""
    apart, names = lanes_apart(trace), roles(trace)
    found: list[Work] = []
    main: list[Work] = []
    works: dict[int, Work] = {}  # of a frame, by its node's identity, what is around it
    for each in attribute(trace):
        if each.lane in apart:
            continue
        node = each.node
        parent = works.get(id(node.parent)) if node.parent is not None else None
        if each.span.category == FRAME:
            if parent is not None:
                works[id(node)] = parent
            continue
        work = works[id(node)] = Work(each, parent, node.duration, 0, parent is not None and parent.collective)
        work.collective = work.collective or _is_collective(each.span.name)
        if parent is not None:
            parent.own -= node.duration
            parent.children += 1
        found.append(work)
        if names[each.lane] == MAIN:
            main.append(work)
    _stop_waiting(main, _engine_times(trace))
    device = on_device(trace)
    for work in found:
        work.time = work.placed.device_self if device else work.own
    return found


def _is_collective(name: str) -> bool:
    known = name.startswith(("launch ", "wait ")) and parse_collective(name) is not None
    return known or name.startswith("c10d::") or COMMUNICATION.match(name) is not None


def _engine_times(trace: Trace) -> list[Interval]:
    """When autograd's threads worked."""
    engines = {lane for lane, role in roles(trace).items() if role_of(role) == AUTOGRAD}
    if not engines:
        return []
    nodes: Iterable[Node] = (each.node for each in attribute(trace) if each.lane in engines)
    return union((node.span.start, node.end) for node in nodes if node.parent is None)


def _stop_waiting(main: Iterable[Work], engine: list[Interval]) -> None:
    """Take out of annotations on the main thread what autograd's threads did meanwhile, between the spans inside."""
    if not engine:
        return
    starts = [start for start, _ in engine]
    before = [0, *accumulate(end - start for start, end in engine)]

    def until(time: int) -> int:
        last = bisect(starts, time) - 1
        return before[last] + min(time, engine[last][1]) - starts[last] if last >= 0 else 0

    for work in main:
        node = work.placed.node
        meanwhile = until(node.end) - until(node.span.start)
        for each, sign in ((work, 1), (work.parent, -1)):
            if each is not None and each.placed.span.category == "user_annotation":
                each.own -= sign * meanwhile
