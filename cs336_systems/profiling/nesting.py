"""Trees of the spans of each thread, with exact self times.

torch.profiler with stacks lets Python frames cross the annotations that they open and close (`record_function`'s
`__enter__` and `__exit__`, pytorch issue 174555); such frames are left out, so that self times add up to the roots.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from cs336_systems.profiling.names import Modules, parse_tag
from cs336_systems.profiling.trace import FRAME, HOST, Lane, Span, Trace

JITTER = 1000  # nanoseconds by which a child may outlast its parent: rounding of clocks, cut off


@dataclass(slots=True, eq=False)
class Node:
    """A span and those directly inside it; `timeline.py` fills in all but the first four fields."""

    span: Span
    end: int  # the span's, or where the parent ends if that is a little before
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    phase: str = "other"  # or one of PHASES
    direction: str = "forward"  # or "backward": which pass of its modules it is part of
    modules: Modules = ()  # whose time it is
    kernels: tuple[Span, ...] = ()  # what the span itself launched on a device
    outer: "Node | None" = None  # the nearest span around it that is no Python frame
    inner: int = 0  # how many such spans are directly inside
    busy: int = 0  # nanoseconds in it and in none inside
    time: int = 0  # what it costs: nanoseconds of its kernels, or `busy` if nothing ran on a device
    collective: bool = False  # it launches or awaits one, or lies inside one that does

    @property
    def duration(self) -> int:
        return self.end - self.span.start

    @property
    def self_time(self) -> int:
        """Nanoseconds in this span and in none inside it, Python frames included."""
        return self.duration - sum(child.duration for child in self.children)

    @property
    def device_self(self) -> int:
        return sum(kernel.duration for kernel in self.kernels)

    @property
    def recomputed(self) -> bool:
        """True for forward work that backward repeats."""
        return self.phase == "backward" and self.direction == "forward" and bool(self.modules)

    @property
    def is_tag(self) -> bool:
        """True for a module's forward."""
        return self.span.category == "user_annotation" and parse_tag(self.span.name) is not None

    def outwards(self, by: Literal["parent", "outer"] = "parent") -> Iterator["Node"]:
        """This span and those around it, the nearest first; `by="outer"` leaves out Python frames."""
        node: Node | None = self
        while node is not None:
            yield node
            node = getattr(node, by)

    def walk(self) -> Iterator["Node"]:
        """This node and all below it, parents first, in order of start."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.children)


def nest(spans: Iterable[Span]) -> list[Node]:
    """The roots of one thread's spans. Of two that cross the later is left out, or the Python frame if one is."""
    roots: list[Node] = []
    stack: list[Node] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and stack[-1].end <= span.start:
            stack.pop()
        while stack and span.end > stack[-1].end + JITTER and FRAME == stack[-1].span.category != span.category:
            frame = stack.pop()  # its children move up to its parent, of which it is the last child
            (frame.parent.children if frame.parent else roots)[-1:] = frame.children
            for child in frame.children:
                child.parent = frame.parent
        if stack and span.end > stack[-1].end + JITTER:
            continue
        node = Node(span, min(span.end, stack[-1].end) if stack else span.end, stack[-1] if stack else None)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


def nest_host(trace: Trace) -> dict[Lane, list[Node]]:
    """The roots of every CPU thread's spans."""
    return {lane: nest(spans) for lane, spans in trace.lanes(*HOST).items()}
