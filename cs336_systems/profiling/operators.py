"""Rows of operators, kernels and collectives: the table that shows where the time goes.

Self times partition a thread: every nanosecond belongs to the innermost operator at that moment, so they add up to 100%
of the threads that compute. Collectives run beside them on threads of their own and are listed apart.

FLOPs follow from the shapes that the profiler recorded: a multiplication with its addition is two. As in
`torch.utils.flop_counter` a causal mask saves nothing, and the backward of fused attention makes five products, the
scores once more among them (FlashAttention, arXiv:2205.14135, algorithm 4).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from cs336_systems.profiling.module_spans import parse_tag
from cs336_systems.profiling.names import PHASES, parse_collective, step_number
from cs336_systems.profiling.timeline import IN_FLIGHT, role_of, timeline
from cs336_systems.profiling.trace import DEVICE, FRAME, Trace

# The place of an operator's two factors among its inputs, (... rows inner) and (... inner columns).
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
FUSED = re.compile(r"^(aten::_scaled_dot_product_(flash|efficient|cudnn|fused)\w*|cs336_kernels::flash_attention\w*)$")
SOFTMAX, SOFTMAX_BACKWARD = "aten::_softmax", "aten::_softmax_backward_data"
# For each element: compare with the largest, subtract it, exponentiate, add up, divide. Backward, y (g - sum g y):
# multiply, add up, subtract, multiply.
SOFTMAX_FLOPS = {SOFTMAX: 5, SOFTMAX_BACKWARD: 4}


def operator_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """FLOPs of one call of a matrix product or of fused attention, by the "Input Dims" of its span.

    None for any other operator, for those that only call one of these (aten::linear, aten::matmul), and where no
    shapes were recorded.
    """
    shapes = args.get("Input Dims")
    try:
        if name in FACTORS and shapes:
            left, right = shapes[FACTORS[name] :][:2]
            return 2 * math.prod(left) * int(right[-1]) if len(left) == len(right) >= 2 else None
        if FUSED.match(name) and shapes:
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
    shapes = args.get("Input Dims")
    return SOFTMAX_FLOPS[name] * math.prod(shapes[0]) if name in SOFTMAX_FLOPS and shapes else None


Sort = Literal["cpu", "device"]
By = Literal["total", "self"]

OUTSIDE = "(Python between operators)"


@dataclass
class OpRow:
    """All calls of one operator; times in nanoseconds, shares of the sum of all self times.

    Totals include what the operator called or launched; a call inside one of the same name is not added again. Where an
    operator does nothing but call itself with other arguments, that is one call, as for torch.profiler.
    `flops` is what its own matrix products need, None if it makes none or no shapes were recorded.
    """

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
    flops: int | None = None

    @property
    def flops_per_second(self) -> float | None:
        """FLOPs over the time of the calls, on the device if they launched anything there."""
        time = self.device_total or self.cpu_total
        return self.flops / time * 1e9 if self.flops and time else None


@dataclass
class TimeRow:
    """Kernels or collectives of one name, which run beside the threads that compute; nanoseconds."""

    name: str
    where: str
    calls: int = 0
    total: int = 0
    share: float | None = None  # of all kernels; None for collectives, which add up to nothing


@lru_cache(maxsize=10_000)
def _annotation_row(name: str) -> str:
    if collective := parse_collective(name):
        return f"{collective.action} {collective.verb}"
    return OUTSIDE if name in PHASES or step_number(name) is not None or parse_tag(name) else name


def op_rows(
    trace: Trace,
    sort: Sort = "cpu",
    by: By = "total",
    limit: int | None = None,
    phase: str | None = None,
    annotations: bool = False,
) -> list[OpRow]:
    """Operators of the threads that compute, the largest by `sort` and `by` first: the first `limit`, or those of one
    `phase` ("forward"), of which the shares then are. Collectives go without their numbers; steps, phases and modules
    share one row of Python, unless `annotations` asks for a row for each."""
    nodes = [node for node in timeline(trace).busy if phase is None or node.phase == phase]
    names: dict[int, str] = {}
    below: dict[int, int] = {}  # nanoseconds on the device of what each node or one inside it launched
    for node in nodes:
        plain = annotations or node.span.category != "user_annotation"
        names[id(node)] = node.span.name if plain else _annotation_row(node.span.name)
        for up in (node, *node.above()) if node.kernels else ():
            below[id(up)] = below.get(id(up), 0) + node.device_self
    rows = {name: OpRow(name) for name in names.values()}
    products: set[int] = set()
    for node in nodes:
        name, outer = names[id(node)], node.outer
        row, device = rows[name], node.device_self if node.kernels else 0
        # An operator that is all that one of the same name calls is no call of its own.
        row.calls += not (outer is not None and outer.span.name == node.span.name and outer.inner == 1)
        row.cpu_self += node.busy
        row.device_self += device
        if name == OUTSIDE:  # modules and phases hold the time of other rows
            row.cpu_total += node.busy
            row.device_total += device
        elif not any(names.get(id(up)) == name for up in node.above()):
            row.cpu_total += node.duration
            row.device_total += below.get(id(node), 0)
        flops = operator_flops(node.span.name, node.span.args)
        if flops is not None and not any(id(up) in products for up in node.above()):
            row.flops = (row.flops or 0) + flops
            products.add(id(node))
    cpu, on_device = sum(row.cpu_self for row in rows.values()), sum(row.device_self for row in rows.values())
    for row in rows.values():
        row.cpu_self_share, row.cpu_total_share = share(row.cpu_self, cpu), share(row.cpu_total, cpu)
        row.device_self_share = share(row.device_self, on_device)
        row.device_total_share = share(row.device_total, on_device)
    return sorted(rows.values(), key=lambda row: (-getattr(row, f"{sort}_{by}"), -row.cpu_total, row.name))[:limit]


def share(part: int, whole: int) -> float:
    """part / whole; 0 / 0 is 0."""
    return part / whole if whole else 0.0


def kernel_rows(trace: Trace, limit: int | None = None) -> list[TimeRow]:
    """Everything that ran on a GPU by its own name, also what no operator launched; the longest first."""
    rows: dict[str, TimeRow] = {}
    for span in trace.spans:
        if span.category in DEVICE:
            row = rows.setdefault(span.name, TimeRow(span.name, "device"))
            row.calls, row.total = row.calls + 1, row.total + span.duration
    whole = sum(row.total for row in rows.values())
    for row in rows.values():
        row.share = share(row.total, whole)
    return sorted(rows.values(), key=lambda row: (-row.total, row.name))[:limit]


def collective_rows(trace: Trace) -> list[TimeRow]:
    """Collectives on the threads of the communication library, by thread; the longest first.

    They work while others compute, so their time is no part of 100%; what is in flight was posted and not yet waited
    for.
    """
    found = timeline(trace)
    rows: dict[tuple[str, str], TimeRow] = {}
    for node in found.nodes:
        if node.span.lane in found.apart and node.span.category != FRAME:
            role = found.apart[node.span.lane]
            where = IN_FLIGHT if role_of(role) == IN_FLIGHT else role
            row = rows.setdefault((node.span.name, where), TimeRow(node.span.name, where))
            nested = any(up.span.name == node.span.name for up in node.path()[:-1])
            row.calls, row.total = row.calls + 1, row.total + (0 if nested else node.duration)
    return sorted(rows.values(), key=lambda row: (-row.total, row.name, row.where))
