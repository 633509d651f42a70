"""Operators, kernels and collectives by name: the rows that show where the time goes.

Every nanosecond of a thread that computes belongs to the innermost operator at that moment, so self times add up to
100%. Collectives run at the same time on their own threads and are listed apart. FLOPs follow from the shapes recorded:
a multiplication with its addition is two. As in `torch.utils.flop_counter` a causal mask saves nothing, and the
backward of fused attention has five products, as it computes the scores again (arXiv:2205.14135, algorithm 4).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cs336_systems.profiling.fields import shapes_of
from cs336_systems.profiling.names import is_division, parse_collective
from cs336_systems.profiling.nesting import Node, outermost
from cs336_systems.profiling.timeline import IN_FLIGHT, Sort, timeline
from cs336_systems.profiling.trace import DEVICE, Trace, once

OUTSIDE = "(Python between operators)"  # the row of steps, phases and modules: their self time, without operators
# The place of an operator's two factors among its inputs, (... rows inner) and (... inner columns).
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
FUSED = re.compile(r"^(aten::_scaled_dot_product_(flash|efficient|cudnn|fused)\w*|cs336_kernels::flash_attention\w*)$")
# FLOPs per element: compare with the largest, subtract it, exponentiate, add up, divide. Backward, y (g - sum g y):
# multiply, add up, subtract, multiply.
SOFTMAX_FLOPS = {"aten::_softmax": 5, "aten::_softmax_backward_data": 4}


def operator_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """FLOPs of one call of a matrix product or of fused attention; None for any other operator, for those that only
    call one of these (aten::linear, aten::matmul), and where no shapes were recorded."""
    fused = "attention" in name and FUSED.match(name)
    shapes = shapes_of(args) if fused or name in FACTORS else None
    try:
        if name in FACTORS and shapes:
            left, right = shapes[FACTORS[name] :][:2]
            return 2 * math.prod(left) * int(right[-1]) if len(left) == len(right) >= 2 else None
        if fused and shapes:
            backward = "backward" in name
            # (... queries dim), (... keys dim) and (... keys width); backward has the output's gradient first.
            queries, keys, values = shapes[1:4] if backward else shapes[:3]
            scores, dim, width = math.prod(queries[:-1]) * keys[-2], queries[-1], values[-1]
            # Backward: scores and gradients of queries and keys over dim; gradients of weights and values over width.
            return int(2 * scores * (3 * dim + 2 * width if backward else dim + width))
    except (IndexError, TypeError, ValueError):  # shapes of lists of tensors, or of another version's inputs
        return None
    return None


def softmax_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """FLOPs of one call of a softmax or its backward; None for any other operator and without shapes."""
    shapes = shapes_of(args) if name in SOFTMAX_FLOPS else None
    return SOFTMAX_FLOPS[name] * math.prod(shapes[0]) if shapes else None


@dataclass
class OpRow:
    """All calls of one operator; times in nanoseconds, shares of the sum of all self times. Totals include what it
    called or launched; a call inside one of the same name is not added again."""

    name: str
    calls: int = 0
    cpu_self: int = 0
    cpu_total: int = 0
    device_self: int = 0
    device_total: int = 0
    cpu_self_share: float = 0.0
    cpu_total_share: float = 0.0
    device_self_share: float = 0.0
    device_total_share: float = 0.0
    memory_self: int = 0  # bytes allocated less bytes freed
    memory_total: int = 0
    flops: int | None = None  # of its own matrix products; None if it has none, or no shapes were recorded

    @property
    def flops_per_second(self) -> float | None:
        """FLOPs over the time of the calls, on the device if they launched anything there."""
        time = self.device_total or self.cpu_total
        return self.flops / time * 1e9 if self.flops and time else None


@dataclass
class TimeRow:
    """Kernels or collectives of one name, which run at the same time as the threads that compute; nanoseconds."""

    name: str
    where: str
    calls: int = 0
    total: int = 0
    share: float | None = None  # of all kernels; None for collectives, whose times have no meaningful sum


def op_rows(
    trace: Trace, sort: Sort = "cpu", by: str = "total", limit: int | None = None, phase: str | None = None
) -> list[OpRow]:
    """Operators of the threads that compute, the largest by `sort` and `by` ("total", "self") first: the first `limit`,
    with `phase` ("forward") those of one phase, and shares of it. Collectives' names are without their numbers."""
    rows = sorted(_op_rows(trace, phase), key=lambda row: (-getattr(row, f"{sort}_{by}"), -row.cpu_total, row.name))
    return rows[:limit]


@once
def _op_rows(trace: Trace, phase: str | None) -> list[OpRow]:
    rows, products = dict[str, OpRow](), set[Node | None]()  # products of matrices and what is inside them

    def name_of(node: Node) -> str | None:
        name = node.span.name
        if phase not in (None, node.phase):
            return None
        if node.span.category != "user_annotation":
            return name
        collective = parse_collective(name)
        return f"{collective.action} {collective.verb}" if collective else OUTSIDE if is_division(name) else name

    for node, name, first in outermost(timeline(trace).busy, name_of):
        up, flops = node.parent, None if node.parent in products else operator_flops(node.span.name, node.span.args)
        if up in products or (flops is not None and name is not None):
            products.add(node)
        if name is None:
            continue
        if (row := rows.get(name)) is None:
            row = rows[name] = OpRow(name)
        # An operator whose only call is one of the same name is counted once, as in torch.profiler.
        row.calls += not (up and up.span.name == node.span.name and len(up.children) == 1)
        row.cpu_self += node.busy
        row.device_self += node.device_self
        row.memory_self += node.nbytes
        if name == OUTSIDE:
            row.cpu_total, row.device_total, row.memory_total = row.cpu_self, row.device_self, row.memory_self
        elif first:
            row.cpu_total += node.duration
            row.device_total += node.launched
            row.memory_total += node.allocated
        if flops is not None:
            row.flops = (row.flops or 0) + flops
    for clock in ("cpu", "device"):
        whole = sum(getattr(row, f"{clock}_self") for row in rows.values())
        for row, column in product(rows.values(), (f"{clock}_self", f"{clock}_total")):
            setattr(row, f"{column}_share", share(getattr(row, column), whole))
    return list(rows.values())


def share(part: int, whole: int) -> float:
    """part / whole; 0 / 0 is 0."""
    return part / whole if whole else 0.0


def kernel_rows(trace: Trace, limit: int | None = None) -> list[TimeRow]:
    """Everything that ran on a GPU, by its own name, even if no operator launched it; the longest first."""
    rows = _time_rows((span.name, "device", span.duration) for span in trace.spans if span.category in DEVICE)
    whole = sum(row.total for row in rows)
    return [replace(row, share=share(row.total, whole)) for row in rows[:limit]]


def collective_rows(trace: Trace) -> list[TimeRow]:
    """Collectives on the threads of the communication library, by thread, and those in flight, posted and not yet
    waited for; the longest first. They run while others compute, so their time is not part of the 100%."""
    found, calls = timeline(trace), []
    apart = [node for node in found.nodes if node.span.lane in found.apart]
    for node, name, first in outermost(apart, lambda node: node.span.name):
        role = found.apart[node.span.lane]
        where = IN_FLIGHT if role.startswith(IN_FLIGHT) else role
        calls.append((name, where, node.duration if first else 0))
    return _time_rows(calls)


def _time_rows(calls: Iterable[tuple[str, str, int]]) -> list[TimeRow]:
    rows: dict[tuple[str, str], TimeRow] = {}
    for name, where, duration in calls:
        row = rows.setdefault((name, where), TimeRow(name, where))
        row.calls, row.total = row.calls + 1, row.total + duration
    return sorted(rows.values(), key=lambda row: (-row.total, row.name, row.where))
