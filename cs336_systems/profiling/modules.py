"""Rows of modules and of parts of the step: the time of their own operators, forward and backward beside each other.

On a GPU the time is the device's, on a CPU that of the threads that compute.
"""

from dataclasses import dataclass

from cs336_systems.profiling.module_spans import kind_of, parse_tag
from cs336_systems.profiling.names import without_layer_numbers
from cs336_systems.profiling.nesting import Modules, Node, kinds_of
from cs336_systems.profiling.operators import share
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace

PARTS = ("attention", "norm", "feed-forward", "embedding")
REMAINDER = {"linear": "linear layers elsewhere", "block": "blocks, between their parts", "other": "rest of the model"}
COLLECTIVES = "collectives"


@dataclass
class PartRow:
    """A part of the step; nanoseconds. The four times add up to the part's, the shares of all parts to one.

    `recomputed` is forward work that backward repeats (activation checkpointing); `other` is neither: the optimizer,
    synchronisation, and what lies between the phases.
    """

    name: str
    forward: int = 0
    recomputed: int = 0
    backward: int = 0
    other: int = 0
    share: float = 0.0

    @property
    def total(self) -> int:
        """Nanoseconds in all."""
        return self.forward + self.recomputed + self.backward + self.other

    def add(self, column: str, time: int) -> None:
        """Add nanoseconds to one of the times."""
        setattr(self, column, getattr(self, column) + time)


@dataclass
class ModuleRow(PartRow):
    """A module, or `modules` of them whose names differ in numbers only. The times are its own operators', without
    those of the modules inside; `inclusive_*` have these too."""

    kind: str = ""
    modules: int = 0
    calls: int = 0
    inclusive_forward: int = 0
    inclusive_recomputed: int = 0
    inclusive_backward: int = 0
    inclusive_other: int = 0
    inclusive_share: float = 0.0

    @property
    def inclusive(self) -> int:
        """Nanoseconds with the modules inside."""
        return self.inclusive_forward + self.inclusive_recomputed + self.inclusive_backward + self.inclusive_other


def column(node: Node) -> str:
    """forward, recomputed, backward or other: the time of its module that an operator counts for."""
    if node.direction == "backward":
        return "backward"
    if node.phase == "backward":
        return "recomputed" if node.modules else "backward"
    return "forward" if node.phase == "forward" else "other"


def part_of(node: Node) -> str:
    """The part of a model or of a step that an operator belongs to: the innermost of attention, norm, feed-forward and
    embedding, though all of a mixture of experts is one part; outside modules, the phase. Collectives are a part of
    their own, wherever they are launched and waited for."""
    if node.collective:
        return COLLECTIVES
    kinds = kinds_of(node.modules)
    if "moe" in kinds:
        return "moe"
    for kind in reversed(kinds):
        if kind in PARTS:
            return kind
    if not kinds:
        return f"outside modules: {node.phase}" if node.phase != "other" else "outside modules and phases"
    return REMAINDER[next((kind for kind in reversed(kinds) if kind in REMAINDER), "other")]


def part_rows(trace: Trace) -> list[PartRow]:
    """The whole step by part, the longest first."""
    rows: dict[str, PartRow] = {}
    for node in timeline(trace).busy:
        name = part_of(node)
        rows.setdefault(name, PartRow(name)).add(column(node), node.time)
    whole = sum(row.total for row in rows.values())
    for row in rows.values():
        row.share = share(row.total, whole)
    return sorted((row for row in rows.values() if row.total), key=lambda row: (-row.total, row.name))


def module_rows(trace: Trace, collapse: bool = True, limit: int | None = None) -> list[ModuleRow]:
    """One row for each module by its qualified name, the longest with all inside it first. With `collapse` the modules
    of all blocks share a row, `blocks.*.attention`. Shares are of the whole step, so inclusive ones do not add up."""
    rows: dict[str, ModuleRow] = {}
    known: dict[Modules, list[ModuleRow]] = {}  # the rows of a node's modules, each once, the innermost's first
    names: dict[str, set[str]] = {}
    whole = 0
    for node in timeline(trace).busy:
        whole += node.time
        if not node.modules:
            continue
        if node.modules not in known:
            inside: dict[str, ModuleRow] = {}
            for name, class_name in reversed(node.modules):
                short = without_layer_numbers(name) if collapse else name
                inside[short] = rows.setdefault(short, ModuleRow(short, kind=kind_of(class_name)))
                names.setdefault(short, set()).add(name)
            known[node.modules] = list(inside.values())
        own, where = known[node.modules][0], column(node)
        own.calls += bool(
            node.span.category == "user_annotation" and parse_tag(node.span.name) and node.phase != "backward"
        )
        own.add(where, node.time)
        for row in known[node.modules]:
            row.add(f"inclusive_{where}", node.time)
    for name, row in rows.items():
        row.modules = len(names[name])
        row.share, row.inclusive_share = share(row.total, whole), share(row.inclusive, whole)
    return sorted(rows.values(), key=lambda row: (-row.inclusive, row.name))[:limit]
