"""Where the time goes: one row for each operator, kernel and collective.

Self times partition a thread: every nanosecond belongs to the innermost operator at that moment, so they add up to 100%
of the threads that compute (`work.py`). Collectives run beside them on threads of their own and are listed apart.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cs336_systems.profiling.attribution import PHASES, attribute
from cs336_systems.profiling.names import FRAME, parse_collective, step_number
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.op_flops import operator_flops
from cs336_systems.profiling.tags import parse_tag
from cs336_systems.profiling.threads import IN_FLIGHT, role_of
from cs336_systems.profiling.trace import DEVICE, Trace
from cs336_systems.profiling.work import Work, lanes_apart, working

Sort = Literal["cpu", "device"]
By = Literal["total", "self"]

OUTSIDE = "(Python between operators)"


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


def row_name(work: Work, annotations: bool = False) -> str:
    """The row that a span counts for: collectives without their numbers; steps, phases and modules in one row of
    Python, unless `annotations` asks for each."""
    span = work.placed.span
    return span.name if span.category != "user_annotation" or annotations else _annotation_row(span.name)


@lru_cache(maxsize=10_000)
def _annotation_row(name: str) -> str:
    if collective := parse_collective(name):
        return f"{collective.what} {collective.verb}"
    return OUTSIDE if name in PHASES or step_number(name) is not None or parse_tag(name) else name


def op_rows(
    trace: Trace,
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
    work = [each for each in working(trace) if phase is None or each.placed.phase == phase]
    below = _device_totals(work)
    sums: dict[str, _Sums] = {}
    names = {id(each): row_name(each, annotations) for each in work}
    products: set[int] = set()
    for each in work:
        name, span = names[id(each)], each.placed.span
        row = sums.get(name) or sums.setdefault(name, _Sums())
        device = each.placed.device_self if each.placed.kernels else 0
        row.calls += not _repeats(each)
        row.cpu_self += each.own
        row.device_self += device
        if name == OUTSIDE:  # what modules and phases hold is other rows' time
            row.cpu_total += each.own
            row.device_total += device
        elif not any(names.get(id(up)) == name for up in each.above()):
            row.cpu_total += each.placed.node.duration
            row.device_total += below.get(id(each), 0)
        flops = operator_flops(span.name, span.args)
        if flops is not None and not any(id(up) in products for up in each.above()):
            products.add(id(each))
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


def _repeats(work: Work) -> bool:
    """Whether this is all that an operator of the same name calls."""
    up = work.parent
    return up is not None and up.placed.span.name == work.placed.span.name and up.children == 1


def _device_totals(work: Iterable[Work]) -> dict[int, int]:
    """Nanoseconds on the device of what each span or one below it launched, by its identity."""
    totals: dict[int, int] = {}
    for each in work:
        if each.placed.kernels:
            device = each.placed.device_self
            for up in (each, *each.above()):
                totals[id(up)] = totals.get(id(up), 0) + device
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


def collective_rows(trace: Trace) -> list[TimeRow]:
    """What ran on the threads of the communication library, by thread, the longest first.

    They work while others compute, so their time is part of no hundred percent; what is in flight was posted and not
    yet waited for.
    """
    where = {lane: IN_FLIGHT if role_of(role) == IN_FLIGHT else role for lane, role in lanes_apart(trace).items()}
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for each in attribute(trace):
        if each.lane in where and each.span.category != FRAME:
            key = each.span.name, where[each.lane]
            calls, total = sums.get(key, (0, 0))
            nested = any(up.span.name == each.span.name for up in _above(each.node))
            sums[key] = calls + 1, total + (0 if nested else each.node.duration)
    rows = [TimeRow(name, thread, calls, total, None) for (name, thread), (calls, total) in sums.items()]
    return sorted(rows, key=lambda row: (-row.total, row.name, row.where))


def _above(node: Node) -> Iterator[Node]:
    while node.parent is not None:
        node = node.parent
        yield node
