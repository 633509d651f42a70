"""Breakdown of the step into matrix products, norms, softmax and loss; attention's softmax beside its products.

The time is the device's on a GPU, the CPU's self time elsewhere. An operator counts with all that it calls, so a
product's time includes the copies that it needs.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.profiling.module_spans import parse_tag
from cs336_systems.profiling.modules import COLLECTIVES
from cs336_systems.profiling.nesting import Node, kinds_of
from cs336_systems.profiling.operators import (
    FACTORS,
    FUSED,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    operator_flops,
    share,
    softmax_flops,
)
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace, once

MATMUL, FUSED_ATTENTION = "matrix products", "fused attention"
SOFTMAX_LINE, LOSS = "softmax of attention", "loss"
SCORES, VALUES, PRODUCTS, PROJECTIONS = "scores q k^T", "weights times v", "both products", "projections"
SOFTMAXES = ("aten::softmax", "aten::_safe_softmax", SOFTMAX, SOFTMAX_BACKWARD)
MORE_PRODUCTS = ("aten::mv", "aten::addmv", "aten::dot")  # a product with one row or column
FUSED_LOSS = "cs336_kernels::linear_cross_entropy"  # with the head
LOSSES = re.compile(rf"^(aten::(cross_entropy_loss|_?log_softmax\w*|nll_loss\w*)|{FUSED_LOSS})$")
FUSED_STAND_IN = re.compile(r"^FlashAttention2(Backward)?$")
BATCHED = ("aten::bmm", "aten::baddbmm")
NO_SOFTMAX = (
    "Attention is fused here: its softmax and its products are one operator, so the softmax has no time of its own; "
    "profile with --attention naive to see it."
)
FUSED_LOSS_NOTE = (
    "Head and loss are fused here: the head's three products are among the matrix products, and all three in the "
    "forward pass, which makes the gradients already."
)


@dataclass(frozen=True)
class ShareRow:
    """The time of some operators in the step and its phases; nanoseconds. Forward and backward need not add up to the
    total: the optimizer and what lies outside the phases are in the step too."""

    name: str
    forward: int
    backward: int
    total: int
    forward_whole: int
    step_whole: int

    @property
    def of_forward(self) -> float:
        """Share of the forward pass."""
        return share(self.forward, self.forward_whole)

    @property
    def of_step(self) -> float:
        """Share of the whole step."""
        return share(self.total, self.step_whole)


@dataclass(frozen=True)
class AttentionRow:
    """A part of attention; nanoseconds and FLOPs. What backward recomputes counts for backward."""

    name: str
    forward: int
    forward_flops: int
    backward: int
    backward_flops: int


@dataclass(frozen=True)
class _Labelled:
    node: Node
    label: str  # of the outermost operator around it that has one
    operator: str  # that operator's name


@lru_cache(maxsize=10_000)
def _label_of(name: str) -> str:
    if name in FACTORS or name in MORE_PRODUCTS:
        return MATMUL
    if FUSED.match(name) or FUSED_STAND_IN.match(name):
        return FUSED_ATTENTION
    return LOSS if LOSSES.match(name) else ""


@once
def _labelled(trace: Trace) -> list[_Labelled]:
    found: dict[int, tuple[str, str]] = {}
    result = []
    for node in timeline(trace).busy:
        name = node.span.name
        label, operator = found[id(node.outer)] if node.outer is not None else ("", "")
        if not label or (label == LOSS and _label_of(name) == MATMUL):  # a fused loss makes the head's products, too
            label, operator = COLLECTIVES if node.collective else _label_of(name), name
            if name in SOFTMAXES and node.inside("attention"):
                label = SOFTMAX_LINE
        found[id(node)] = label, operator
        result.append(_Labelled(node, label, operator))
    return result


def norm_name(trace: Trace) -> str:
    """The class of the model's norms, RMSNorm for example; "norms" if there are several or none."""
    names = {node.modules[-1][1] for node in timeline(trace).nodes if node.kind == "norm"}
    return names.pop() if len(names) == 1 else "norms"


def share_rows(trace: Trace) -> list[ShareRow]:
    """Matrix products, norms, attention's softmax and the loss; fused attention and collectives if there are any.

    Of collectives it is the time to launch them and to wait for them, not what they do meanwhile.
    """
    norms = norm_name(trace)
    sums = {name: [0, 0, 0] for name in (MATMUL, FUSED_ATTENTION, norms, SOFTMAX_LINE, LOSS, COLLECTIVES)}
    whole = [0, 0, 0]
    for each in _labelled(trace):
        rows = [whole]
        if each.label:
            rows.append(sums[each.label])
        if each.label != COLLECTIVES and each.node.inside("norm"):
            rows.append(sums[norms])
        for row in rows:
            row[2] += each.node.time
            if each.node.phase in ("forward", "backward"):
                row[each.node.phase == "backward"] += each.node.time
    found = [
        ShareRow(name, forward, backward, total, forward_whole=whole[0], step_whole=whole[2])
        for name, (forward, backward, total) in sums.items()
    ]
    return [each for each in found if each.total or each.name not in (FUSED_ATTENTION, COLLECTIVES)]


def attention_rows(trace: Trace) -> list[AttentionRow]:
    """Attention's softmax, its two products, its projections, and what is left of it: scaling, mask, copies.

    In the forward pass the product before a module's softmax is that of queries and keys, the one after it that of
    weights and values; backward's four are told together. Empty if the trace has no attention module.
    """
    sums: dict[str, list[int]] = {}
    seen_softmax: dict[str, bool] = {}
    for each in (each for each in _labelled(trace) if each.node.inside("attention")):
        pairs = zip(each.node.modules, kinds_of(each.node.modules), strict=True)
        module = [name for (name, _), kind in pairs if kind == "attention"][-1]
        if (tag := parse_tag(each.node.span.name)) and tag[0] == module:
            seen_softmax[module] = False
        forward = each.node.phase == "forward"
        name = _attention_part(each, seen_softmax.get(module, False), forward)
        seen_softmax[module] = seen_softmax.get(module, False) or each.label == SOFTMAX_LINE
        flops = _flops(each)
        row = sums.setdefault(name, [0, 0, 0, 0])
        row[0 if forward else 2] += each.node.time
        row[1 if forward else 3] += flops
        if name in (SCORES, VALUES):
            row = sums.setdefault(PRODUCTS, [0, 0, 0, 0])
            row[0] += each.node.time
            row[1] += flops
    order = (SOFTMAX_LINE, SCORES, VALUES, PRODUCTS, FUSED_ATTENTION, PROJECTIONS, COLLECTIVES, "the rest")
    return [AttentionRow(name, *sums[name]) for name in order if name in sums]


def _attention_part(each: _Labelled, after_softmax: bool, forward: bool) -> str:
    if each.label == MATMUL:
        if each.operator not in BATCHED:
            return PROJECTIONS
        return PRODUCTS if not forward else VALUES if after_softmax else SCORES
    return each.label if each.label in (SOFTMAX_LINE, FUSED_ATTENTION, COLLECTIVES) else "the rest"


def _flops(each: _Labelled) -> int:
    """FLOPs of one operator, counted where it is the product or the softmax itself."""
    span = each.node.span
    if each.label == SOFTMAX_LINE:
        return softmax_flops(span.name, span.args) or 0
    inner = each.label == FUSED_ATTENTION and each.operator != span.name and FUSED.match(each.operator)
    return 0 if inner else operator_flops(span.name, span.args) or 0


def share_lines(trace: Trace) -> list[str]:
    """The answers in one sentence each, for people."""
    rows = {row.name: row for row in share_rows(trace)}
    lines = []
    for name, row in rows.items():
        if not row.total and name != MATMUL:  # there is none, or the trace has no modules that would tell
            continue
        times = {"forward": row.forward, "backward": row.backward, "elsewhere": row.total - row.forward - row.backward}
        parts = ", ".join(f"{where} {format_seconds(time / 1e9)}" for where, time in times.items() if time)
        start = f"{name[0].upper()}{name[1:]}: {row.of_step:.2%} of the step"
        if name == MATMUL and row.forward_whole:
            start = f"{start}, {row.of_forward:.2%} of the forward pass"
        lines.append(f"{start} ({parts})." if parts else f"{start}.")
    if any(each.node.span.name == FUSED_LOSS for each in _labelled(trace)):
        lines.append(FUSED_LOSS_NOTE)
    attention = {row.name: row for row in attention_rows(trace)}
    if SOFTMAX_LINE not in attention:
        return [*lines, NO_SOFTMAX] if FUSED_ATTENTION in attention else lines
    softmax, products = attention[SOFTMAX_LINE], attention.get(PRODUCTS)
    if products is None or not products.forward:
        return lines
    line = (
        f"In the forward pass attention's softmax takes {softmax.forward / products.forward:.2f} of the time of its "
        f"two products ({format_seconds(softmax.forward / 1e9)} and {format_seconds(products.forward / 1e9)})"
    )
    if softmax.forward_flops and products.forward_flops:
        line += (
            f" with {softmax.forward_flops / products.forward_flops:.3f} of their FLOPs "
            f"({format_count(softmax.forward_flops)} and {format_count(products.forward_flops)})"
        )
    return [*lines, f"{line}."]
