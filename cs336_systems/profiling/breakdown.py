"""Breakdown of the step by part of the model, by module, and into matrix products, norms, softmax and loss.

Times are the device's on a GPU, and otherwise those of the threads that compute. In shares an operator counts with all
that it calls.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cs336_systems.profiling.names import Modules, kind_of, kinds_of, without_layer_numbers
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.operators import FACTORS, FUSED, SOFTMAX_FLOPS, operator_flops, share, softmax_flops
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace, once

PARTS = ("attention", "norm", "feed-forward", "embedding")
REMAINDER = {"linear": "linear layers elsewhere", "block": "blocks, between their parts", "other": "rest of the model"}
COLLECTIVES, MATMUL, FUSED_ATTENTION, LOSS = "collectives", "matrix products", "fused attention", "loss"
SOFTMAX, SCORES, VALUES = "softmax of attention", "scores q k^T", "weights times v"
PRODUCTS, PROJECTIONS, REST = "both products", "projections", "the rest"
SOFTMAXES = ("aten::softmax", "aten::_safe_softmax", *SOFTMAX_FLOPS)
FUSED_LOSS = "cs336_kernels::linear_cross_entropy"  # with the head
LABELS = {  # of operators, by the beginning of their names
    MATMUL: re.compile(rf"({'|'.join(FACTORS)}|aten::mv|aten::addmv|aten::dot)$"),
    FUSED_ATTENTION: re.compile(rf"{FUSED.pattern}|FlashAttention2(Backward)?$"),  # the latter is the stand-in in torch
    LOSS: re.compile(rf"(aten::(cross_entropy_loss|_?log_softmax\w*|nll_loss\w*)|{FUSED_LOSS})$"),
}
NO_SOFTMAX = (
    "Attention is fused here: its softmax and its products are one operator, so the softmax has no time of its own; "
    "profile with --attention naive to see it."
)
FUSED_LOSS_NOTE = (
    "Head and loss are fused here: the head's three products are among the matrix products, and all three in the "
    "forward pass, which makes the gradients already."
)


@dataclass
class Row:
    """Time of all operators counted under one name, in nanoseconds, its share of the step, and FLOPs if known."""

    name: str
    forward: int = 0
    recomputed: int = 0  # forward work that backward repeats (activation checkpointing), if it can be told apart
    backward: int = 0
    other: int = 0  # the optimizer, synchronisation, and the time between phases
    share: float = 0.0
    of_forward: float = 0.0  # share of the forward pass, or of attention's
    forward_flops: int = 0
    backward_flops: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.recomputed + self.backward + self.other

    def add(self, column: str, amount: int) -> None:
        setattr(self, column, getattr(self, column) + amount)


@dataclass
class ModuleRow(Row):
    """Time of a module's own operators, or of `modules` alike but for numbers; `inclusive` adds inner modules'."""

    modules: int = 0
    calls: int = 0
    inclusive: Row = field(default_factory=lambda: Row(""))


def _group(trace: Trace, names: Callable[[Node], Iterable[str]], by_phase: bool = False) -> dict[str, Row]:
    """Time of all operators by the names that each counts for, with shares of the whole step. Columns are the
    passes of the modules or, `by_phase`, the phases of the step, where what backward recomputes is backward."""
    rows, whole = dict[str, Row](), Row("")
    for node in timeline(trace).busy:
        column = "backward" if node.direction == "backward" and not by_phase else node.phase
        column = column if column in ("forward", "backward") else "other"
        column = "recomputed" if node.recomputed and not by_phase else column
        for row in (whole, *(rows.setdefault(name, Row(name)) for name in names(node))):
            row.add(column, node.time)
    for row in rows.values():
        row.share, row.of_forward = share(row.total, whole.total), share(row.forward, whole.forward)
    return rows


def _part(node: Node) -> str:
    """The part of a model or of a step that an operator belongs to: the innermost of PARTS, though all of a mixture of
    experts is one part; outside modules, the phase. Collectives are a part of their own."""
    kinds = kinds_of(node.modules)
    if node.collective or "moe" in kinds:
        return COLLECTIVES if node.collective else "moe"
    if not kinds:
        return f"outside modules: {node.phase}" if node.phase != "other" else "outside modules and phases"
    remainder = REMAINDER[next((kind for kind in reversed(kinds) if kind in REMAINDER), "other")]
    return next((kind for kind in reversed(kinds) if kind in PARTS), remainder)


@once
def part_rows(trace: Trace) -> list[Row]:
    """The whole step by part, the longest first; each nanosecond is in one row only."""
    rows = _group(trace, lambda node: [_part(node)]).values()
    return sorted((row for row in rows if row.total), key=lambda row: (-row.total, row.name))


def module_rows(trace: Trace, limit: int | None = None) -> list[ModuleRow]:
    """One row for each module by its qualified name, the longest with all inside it first. All blocks share rows, as
    `blocks.*.attention`. Shares are of the whole step; inclusive ones overlap, so they add up to more than 100%."""

    @lru_cache(None)
    def short(modules: Modules) -> list[str]:
        return list(dict.fromkeys(without_layer_numbers(name) for name, _ in reversed(modules)))

    inclusive = _group(trace, lambda node: short(node.modules))
    own = _group(trace, lambda node: short(node.modules)[:1])
    names, calls = dict[str, set[str]](), Counter[str]()
    for node in (node for node in timeline(trace).busy if node.modules):
        name = short(node.modules)[0]
        names.setdefault(name, set()).add(node.modules[-1][0])
        calls[name] += node.tag is not None and node.phase != "backward"
    rows = [ModuleRow(**vars(own[n]), modules=len(names[n]), calls=calls[n], inclusive=inclusive[n]) for n in own]
    return sorted(rows, key=lambda row: (-row.inclusive.total, row.name))[:limit]


@lru_cache(maxsize=100_000)
def _label_of(name: str) -> str:
    return next((label for label, pattern in LABELS.items() if pattern.match(name)), "")


@once
def _labels(trace: Trace) -> dict[Node | None, tuple[str, str]]:
    """Label of every operator: that of the outermost labelled operator around it, with the latter's name."""
    found: dict[Node | None, tuple[str, str]] = {None: ("", "")}
    for node in timeline(trace).busy:
        name = node.span.name
        label, operator = found[node.parent]
        if not label or (label == LOSS and _label_of(name) == MATMUL):  # a fused loss makes the head's products, too
            label, operator = COLLECTIVES if node.collective else _label_of(name), name
            if name in SOFTMAXES and "attention" in kinds_of(node.modules):
                label = SOFTMAX
        found[node] = label, operator
    return found


@once
def share_rows(trace: Trace) -> list[Row]:
    """Matrix products, norms, attention's softmax and the loss; fused attention and collectives if there are any: for
    these the time to launch and to wait, not of the transfer. Columns are the phases."""
    labels = _labels(trace)
    classes = {node.modules[-1][1] for node in timeline(trace).nodes if kinds_of(node.modules)[-1:] == ("norm",)}
    norms = classes.pop() if len(classes) == 1 else "norms"

    def names(node: Node) -> list[str]:
        label = labels[node][0]
        return [label] * bool(label) + [norms] * (label != COLLECTIVES and "norm" in kinds_of(node.modules))

    rows = _group(trace, names, by_phase=True)
    order = (MATMUL, FUSED_ATTENTION, norms, SOFTMAX, LOSS, COLLECTIVES)
    found = [rows.get(name, Row(name)) for name in order]
    return [row for row in found if row.total or row.name not in (FUSED_ATTENTION, COLLECTIVES)]


@once
def attention_rows(trace: Trace) -> list[Row]:
    """Attention's softmax, its two products (before the softmax that of queries and keys, after it that of weights and
    values; backward's four share a row), projections, and the rest. Recomputation counts for backward."""
    rows, labels, past_softmax = dict[str, Row](), _labels(trace), set[str]()
    for node in timeline(trace).busy:
        label, operator = labels[node]
        if "attention" not in kinds_of(node.modules):
            continue
        module = next(name for name, kind in reversed(node.modules) if kind_of(kind) == "attention")
        span, direction = node.span, "forward" if node.phase == "forward" else "backward"
        if (tag := node.tag) and tag[0] == module:
            past_softmax.discard(module)
        name = label if label in (SOFTMAX, FUSED_ATTENTION, COLLECTIVES) else REST
        if label == MATMUL:
            both = PRODUCTS if direction == "backward" else VALUES if module in past_softmax else SCORES
            name = both if operator in ("aten::bmm", "aten::baddbmm") else PROJECTIONS
        past_softmax |= {module} if label == SOFTMAX else set()
        # Counted where an operator is the softmax, the product or the fused attention itself.
        inner = label == FUSED_ATTENTION and operator != span.name and FUSED.match(operator)
        count = softmax_flops if label == SOFTMAX else operator_flops
        flops = 0 if inner else count(span.name, span.args) or 0
        for each in (name, PRODUCTS) if name in (SCORES, VALUES) else (name,):
            row = rows.setdefault(each, Row(each))
            row.add(direction, node.time)
            row.add(f"{direction}_flops", flops)
    whole = sum(row.forward for row in rows.values() if row.name != PRODUCTS)
    for row in rows.values():
        row.of_forward = share(row.forward, whole)
    order = (SOFTMAX, SCORES, VALUES, PRODUCTS, FUSED_ATTENTION, PROJECTIONS, COLLECTIVES, REST)
    return [rows[name] for name in order if name in rows]


def share_note(trace: Trace) -> str:
    """Sentences on parts that have no row of their own: a fused loss, and the softmax of fused attention."""
    attention = {row.name for row in attention_rows(trace)}
    fused_loss = any(node.span.name == FUSED_LOSS for node in timeline(trace).busy)
    fused_attention = FUSED_ATTENTION in attention and SOFTMAX not in attention
    return " ".join([FUSED_LOSS_NOTE] * fused_loss + [NO_SOFTMAX] * fused_attention)
