"""Trees of the spans of each thread, with exact self times.

torch.profiler with stacks lets Python frames cross the annotations that they open and close (`record_function`'s
`__enter__` and `__exit__`, pytorch issue 174555); such frames are left out, so that self times add up to the roots.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from cs336_systems.profiling.module_spans import kind_of
from cs336_systems.profiling.trace import FRAME, HOST, Lane, Span, Trace

JITTER = 1000  # nanoseconds by which a child may outlast its parent: rounding of clocks, cut off
Modules = tuple[tuple[str, str], ...]  # (qualified name, class) from the outermost inwards


@lru_cache(maxsize=10_000)
def kinds_of(modules: Modules) -> tuple[str, ...]:
    """The part of a model that each module is, from the outermost inwards."""
    return tuple(kind_of(class_name) for _, class_name in modules)


@dataclass(slots=True, eq=False)
class Node:
    """A span and those directly inside it. `end` is the span's, or where the parent ends if that is a little before.

    `timeline.py` fills in the rest. `phase` is one of PHASES or "other"; `modules` are those whose time it is, in their
    forward or, by `direction`, their backward; `kernels` are what the span itself launched on a device. On threads that
    compute, `outer` is the nearest span around it that is no Python frame, `inner` counts those directly inside,
    `busy` is nanoseconds in it and in none inside; `time` is what it costs: nanoseconds of its kernels, or `busy` if
    nothing ran on a device; `collective` says that it launches or awaits one, or lies inside one that does.
    """

    span: Span
    end: int
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    phase: str = "other"
    direction: str = "forward"
    modules: Modules = ()
    kernels: tuple[Span, ...] = ()
    outer: "Node | None" = None
    inner: int = 0
    busy: int = 0
    time: int = 0
    collective: bool = False

    @property
    def duration(self) -> int:
        return self.end - self.span.start

    @property
    def self_time(self) -> int:
        """Nanoseconds in this span and in none inside it."""
        return self.duration - sum(child.duration for child in self.children)

    @property
    def module(self) -> str:
        """Qualified name of the innermost module; empty if there is none."""
        return self.modules[-1][0] if self.modules else ""

    @property
    def kind(self) -> str:
        """The innermost module's part of a model; empty if there is none."""
        return kinds_of(self.modules)[-1] if self.modules else ""

    @property
    def device_self(self) -> int:
        """Nanoseconds on the device of the kernels that this span itself launched."""
        return sum(kernel.duration for kernel in self.kernels)

    def inside(self, kind: str) -> bool:
        """True if one of its modules is of a kind, `attention` for example."""
        return kind in kinds_of(self.modules)

    def above(self) -> Iterator["Node"]:
        """The spans around it that are no Python frames, the nearest first."""
        up = self.outer
        while up is not None:
            yield up
            up = up.outer

    def path(self) -> list["Node"]:
        """From the root to this node."""
        return [*(self.parent.path() if self.parent else ()), self]

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
        end = span.end
        while stack and stack[-1].end <= span.start:
            stack.pop()
        crosses = span.category != FRAME
        while crosses and stack and end > stack[-1].end + JITTER and stack[-1].span.category == FRAME:
            frame = stack.pop()  # its children move up to its parent
            siblings = frame.parent.children if frame.parent else roots
            place = next(i for i, each in enumerate(siblings) if each is frame)
            siblings[place : place + 1] = frame.children
            for child in frame.children:
                child.parent = frame.parent
        if stack and end > stack[-1].end + JITTER:
            continue
        node = Node(span, min(end, stack[-1].end) if stack else end, stack[-1] if stack else None)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


def nest_host(trace: Trace) -> dict[Lane, list[Node]]:
    """The roots of every CPU thread's spans."""
    return {lane: nest(spans) for lane, spans in trace.lanes(HOST).items()}
