"""Trees of the spans of each thread, with exact self times."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from cs336_systems.profiling.names import Modules, parse_tag
from cs336_systems.profiling.trace import HOST, Allocation, K, Lane, Place, Span, Trace, grouped, once

CLIMBED = 400  # levels, more than modules and operators of any model have
JITTER = 1000  # nanoseconds by which a child may outlast its parent: rounding of clocks, cut off


@dataclass(slots=True, eq=False)
class Node:
    """A span and those directly inside it; `timeline.py` fills in all but the first four fields."""

    span: Span
    end: int  # the span's, or where the parent ends if that is a little before
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    phase: str = "other"  # or one of PHASES
    direction: str = "forward"  # or "backward": the pass of its modules that it is part of
    modules: Modules = ()  # its time counts for these
    kernels: tuple[Span, ...] = ()  # launched on a device by the span itself
    busy: int = 0  # nanoseconds inside it but in none of its children
    device_self: int = 0  # nanoseconds of those
    nbytes: int = 0  # allocated by itself less freed, on a GPU if anything was allocated there
    launched: int = 0  # nanoseconds of kernels that it and all inside it launched
    allocated: int = 0  # bytes of it and of all inside it
    time: int = 0  # nanoseconds of its kernels, or `busy` if nothing ran on a device
    duration: int = field(init=False)
    collective: bool = False  # it launches or awaits one, or lies inside one that does

    def __post_init__(self) -> None:
        self.duration = self.end - self.span.start

    @property
    def recomputed(self) -> bool:
        """True for forward work that backward repeats."""
        return self.phase == "backward" and self.direction == "forward" and bool(self.modules)

    @property
    def tag(self) -> tuple[str, str] | None:
        """The module, by name and class, if the span is its forward."""
        return parse_tag(self.span.name) if self.span.category == "user_annotation" else None

    def outwards(self) -> Iterator["Node"]:
        """This span and those around it, the nearest first, at most CLIMBED of them."""
        node: Node | None = self
        for _ in range(CLIMBED):
            if node is None:
                return
            yield node
            node = node.parent


def nest(spans: Iterable[Span]) -> list[Node]:
    """One thread's spans, in order of start and the longer first, as nodes in the same order: parents before children.
    Of two that cross, the later one is left out."""
    nodes, stack = list[Node](), list[Node]()
    for span in spans:
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack and span.end > stack[-1].end + JITTER:
            continue
        parent = stack[-1] if stack else None
        nodes.append(node := Node(span, min(span.end, parent.end) if parent else span.end, parent))
        if parent:
            parent.children.append(node)
        stack.append(node)
    return nodes


@once
def nested(trace: Trace) -> dict[Lane, list[Node]]:
    """The nodes of each of a CPU's lanes, parents before children."""
    return {lane: nest(spans) for lane, spans in trace.lanes(*HOST).items()}


def innermost(lanes: Mapping[Lane, Sequence[Node]], places: Iterable[Place]) -> dict[Place, Node | None]:
    """The innermost node of a lane (parents before children) around each of some moments."""
    found = dict[Place, Node | None]()
    for lane, moments in grouped(sorted(places, key=itemgetter(1)), itemgetter(0)).items():
        stack, nodes, next_one = list[Node](), lanes.get(lane, ()), 0
        for place in moments:
            time = place[1]
            while next_one < len(nodes) and nodes[next_one].span.start <= time:
                while stack and stack[-1].end <= nodes[next_one].span.start:
                    stack.pop()
                stack.append(nodes[next_one])
                next_one += 1
            while stack and stack[-1].end <= time:
                stack.pop()
            found[place] = stack[-1] if stack else None
    return found


@once
def allocations(trace: Trace, device: str) -> list[tuple[Allocation, Node | None]]:
    """All events of a device's allocator, in order, each with the innermost span around it."""
    events = [each for each in trace.allocations if each.device == device and each.nbytes]
    around = innermost(nested(trace), [(each.lane, each.time) for each in events])
    return [(each, around[each.lane, each.time]) for each in events]


def outermost(nodes: Iterable[Node], key: Callable[[Node], K]) -> Iterator[tuple[Node, K, bool]]:
    """(node, its key, True if no node around it has that key) for nodes, parents first."""
    path, keys = list[tuple[Node, K]](), defaultdict[K, int](int)
    for node in nodes:
        while path and path[-1][0] is not node.parent:
            keys[path.pop()[1]] -= 1
        path.append((node, key(node)))
        yield *path[-1], not keys[path[-1][1]]
        keys[path[-1][1]] += 1
