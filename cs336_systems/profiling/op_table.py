"""Where the time goes: one row for each operator, kernel and collective, and for each module with its backward.

Self times partition a thread: every nanosecond belongs to the innermost operator at that moment, so they add up to 100%
of the threads that compute. Collectives run beside them on threads of their own and are listed apart. Python frames,
recorded with stacks, count for what is around them, so that a table is the same with stacks and without.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cs336_systems.profiling.attribution import PHASES, Placed
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.op_flops import operator_flops
from cs336_systems.profiling.tags import parse_tag
from cs336_systems.profiling.trace import COMMUNICATION, DEVICE, Lane, Trace

Sort = Literal["cpu", "device"]
By = Literal["total", "self"]

OUTSIDE = "(Python between operators)"
OWN_COLLECTIVE = re.compile(r"^((?:launch|wait) [\w-]+) \S*#\d+")
COLLECTIVE = re.compile(rf"{OWN_COLLECTIVE.pattern}|^c10d::|{COMMUNICATION.pattern}")
STEP = re.compile(r"^(step \d+|ProfilerStep#\d+)$")


@dataclass(frozen=True)
class OpRow:
    """All calls of one operator; times in nanoseconds, shares of the sum of all self times.

    Totals include what the operator called or launched; a call inside one of the same name is not added again. Where an
    operator does nothing but call itself with other arguments, that is one call, as for torch.profiler.
    `flops` is what its own matrix products need, None if it makes none or no shapes were recorded.
    """

    name: str
    calls: int
    cpu_self: int
    cpu_total: int
    device_self: int
    device_total: int
    cpu_self_share: float
    cpu_total_share: float
    device_self_share: float
    device_total_share: float
    flops: int | None

    @property
    def cpu_mean(self) -> int:
        """Nanoseconds of CPU a call."""
        return round(self.cpu_total / self.calls)

    @property
    def device_mean(self) -> int:
        """Nanoseconds on the device a call."""
        return round(self.device_total / self.calls)

    @property
    def flops_per_second(self) -> float | None:
        """FLOPs over the time of the calls, on the device if they launched anything there."""
        time = self.device_total or self.cpu_total
        return self.flops / time * 1e9 if self.flops and time else None


@dataclass(frozen=True)
class TimeRow:
    """What ran beside the threads that compute: kernels by name, or collectives; nanoseconds."""

    name: str
    where: str
    calls: int
    total: int
    share: float | None  # of all kernels; None for collectives, which add up to nothing

    @property
    def mean(self) -> int:
        """Nanoseconds a call."""
        return round(self.total / self.calls)


def is_frame(placed: Placed) -> bool:
    """Whether this is a frame of Python rather than an operator or an annotation."""
    return placed.span.category == "python_function"


def children_of(node: Node) -> list[Node]:
    """What is directly inside a span, Python frames aside."""
    found, todo = [], list(node.children)
    while todo:
        child = todo.pop()
        if child.span.category == "python_function":
            todo += child.children
        else:
            found.append(child)
    return found


def self_time(node: Node) -> int:
    """Nanoseconds in this span and in none inside it, Python frames aside."""
    return node.duration - sum(child.duration for child in children_of(node))


def communication_lanes(placed: Iterable[Placed]) -> set[Lane]:
    """The threads that run collectives rather than compute. NCCL has none: it annotates the thread that launches."""
    return {
        each.lane for each in placed if COMMUNICATION.match(each.span.name) and not each.span.name.startswith("nccl")
    }


def in_collective(node: Node) -> bool:
    """Whether a span is a collective's or inside one: launched, or waited for."""
    return any(COLLECTIVE.match(each.span.name) for each in (node, *_above(node)))


def computing(placed: Sequence[Placed]) -> list[Placed]:
    """What ran on the threads that compute, without Python frames."""
    apart = communication_lanes(placed)
    return [each for each in placed if each.lane not in apart and not is_frame(each)]


def row_name(placed: Placed, annotations: bool = False) -> str:
    """The row that a span counts for: collectives without their numbers; steps, phases and modules in one row of
    Python, unless `annotations` asks for each."""
    name = placed.span.name
    if placed.span.category != "user_annotation" or annotations:
        return name
    if match := OWN_COLLECTIVE.match(name):
        return match[1]
    return OUTSIDE if name in PHASES or STEP.match(name) or parse_tag(name) else name


def op_rows(
    placed: Sequence[Placed],
    sort: Sort = "cpu",
    by: By = "total",
    limit: int | None = None,
    phase: str | None = None,
    annotations: bool = False,
) -> list[OpRow]:
    """The operators of the threads that compute, the largest first.

    `sort` and `by` choose the time that orders them, `limit` keeps the first so many, `phase` the operators of one
    phase ("forward"); the shares are of that phase then. `annotations` gives steps, phases and modules rows too.
    """
    work = [each for each in computing(placed) if phase is None or each.phase == phase]
    below = _device_totals(work)
    sums: dict[str, _Sums] = {}
    names = {id(each.node): row_name(each, annotations) for each in work}
    products: set[int] = set()
    for each in work:
        name = names[id(each.node)]
        row = sums.setdefault(name, _Sums())
        own = self_time(each.node)
        row.calls += not _repeats(each.node)
        row.cpu_self += own
        row.device_self += each.device_self
        if name == OUTSIDE:  # what modules and phases hold is other rows' time
            row.cpu_total += own
            row.device_total += each.device_self
        elif not any(names.get(id(up)) == name for up in _above(each.node)):
            row.cpu_total += each.node.duration
            row.device_total += below[id(each.node)]
        flops = operator_flops(each.span.name, each.span.args)
        if flops is not None and not any(id(up) in products for up in _above(each.node)):
            products.add(id(each.node))
            row.flops = (row.flops or 0) + flops
    cpu, device = sum(row.cpu_self for row in sums.values()), sum(row.device_self for row in sums.values())
    rows = [row.finish(name, cpu, device) for name, row in sums.items()]
    rows.sort(key=lambda row: (-getattr(row, f"{sort}_{by}"), -row.cpu_total, row.name))
    return rows[:limit]


@dataclass
class _Sums:
    calls: int = 0
    cpu_self: int = 0
    cpu_total: int = 0
    device_self: int = 0
    device_total: int = 0
    flops: int | None = None

    def finish(self, name: str, cpu: int, device: int) -> OpRow:
        return OpRow(
            name,
            self.calls,
            self.cpu_self,
            self.cpu_total,
            self.device_self,
            self.device_total,
            share(self.cpu_self, cpu),
            share(self.cpu_total, cpu),
            share(self.device_self, device),
            share(self.device_total, device),
            self.flops,
        )


def share(part: int, whole: int) -> float:
    """part / whole; nothing of nothing is nothing."""
    return part / whole if whole else 0.0


def _above(node: Node) -> Iterable[Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _repeats(node: Node) -> bool:
    """Whether this is all that an operator of the same name calls."""
    up = next((each for each in _above(node) if each.span.category != "python_function"), None)
    return up is not None and up.span.name == node.span.name and len(children_of(up)) == 1


def _device_totals(work: Sequence[Placed]) -> dict[int, int]:
    """Nanoseconds on the device of what each span or one below it launched, by the node's identity."""
    totals = {id(each.node): each.device_self for each in work}
    for each in work:
        if each.device_self:
            for up in _above(each.node):
                if id(up) in totals:
                    totals[id(up)] += each.device_self
    return totals


def kernel_rows(trace: Trace, limit: int | None = None) -> list[TimeRow]:
    """Everything that ran on a GPU by its own name, also what no operator launched, the longest first."""
    sums: dict[str, tuple[int, int]] = {}
    for span in trace.spans:
        if span.category in DEVICE:
            calls, total = sums.get(span.name, (0, 0))
            sums[span.name] = calls + 1, total + span.duration
    whole = sum(total for _, total in sums.values())
    rows = [TimeRow(name, "device", calls, total, share(total, whole)) for name, (calls, total) in sums.items()]
    return sorted(rows, key=lambda row: (-row.total, row.name))[:limit]


def collective_rows(placed: Sequence[Placed]) -> list[TimeRow]:
    """What ran on the threads of the communication library, by thread, the longest first.

    They work while others compute, so their time is part of no hundred percent; what is in flight was posted and not
    yet waited for.
    """
    lanes = sorted(communication_lanes(placed), key=str)
    threads = [lane for lane in lanes if not str(lane[1]).startswith("in flight")]
    where = {lane: f"thread {threads.index(lane) + 1}" if lane in threads else "in flight" for lane in lanes}
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for each in placed:
        if each.lane in where and not is_frame(each):
            key = each.span.name, where[each.lane]
            calls, total = sums.get(key, (0, 0))
            nested = any(up.span.name == each.span.name for up in _above(each.node))
            sums[key] = calls + 1, total + (0 if nested else each.node.duration)
    rows = [TimeRow(name, thread, calls, total, None) for (name, thread), (calls, total) in sums.items()]
    return sorted(rows, key=lambda row: (-row.total, row.name, row.where))
