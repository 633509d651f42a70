"""Which span lies within which: trees of the spans of each lane, with exact self times.

torch.profiler with stacks lets Python frames cross the annotations that they open and close (`record_function`'s
`__enter__` and `__exit__`, pytorch issue 174555); such frames are left out, so that self times add up to the roots.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cs336_systems.profiling.names import FRAME
from cs336_systems.profiling.trace import HOST, Lane, Span, Trace

JITTER = 1000  # nanoseconds by which a child may outlast its parent: rounding of clocks, cut off


@dataclass(slots=True, eq=False)
class Node:
    """A span and those directly inside it. `end` is the span's, or where the parent ends if that is a little before."""

    span: Span
    end: int
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)

    @property
    def duration(self) -> int:
        return self.end - self.span.start

    @property
    def self_time(self) -> int:
        """Nanoseconds in this span and in none inside it."""
        return self.duration - sum(child.duration for child in self.children)

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
    """The roots of one lane's spans. What crosses another is left out, a Python frame rather than an annotation."""
    roots: list[Node] = []
    stack: list[Node] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        start, end = span.start, span.end
        while stack and stack[-1].end <= start:
            stack.pop()
        if stack and end > stack[-1].end:
            while stack and end > stack[-1].end + JITTER and _yields(stack[-1].span, span):
                _remove(stack.pop(), roots)
            if stack and end > stack[-1].end + JITTER:
                continue
            end = min(end, stack[-1].end) if stack else end
        node = Node(span, end, stack[-1] if stack else None)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


def _yields(outer: Span, inner: Span) -> bool:
    return outer.category == FRAME and inner.category != FRAME


def _remove(node: Node, roots: list[Node]) -> None:
    """Take a node out; its children move up to its parent."""
    siblings = node.parent.children if node.parent else roots
    where = next(i for i, each in enumerate(siblings) if each is node)
    siblings[where : where + 1] = node.children
    for child in node.children:
        child.parent = node.parent


def nest_host(trace: Trace) -> dict[Lane, list[Node]]:
    """The roots of every lane on which a CPU thread worked."""
    return {lane: nest(spans) for lane, spans in trace.lanes(HOST).items()}
