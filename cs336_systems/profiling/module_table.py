"""Where the time goes by module: what its own operators took, forward and backward beside each other.

`attribution.py` says of every operator, also of backward's, which module it belongs to. On a GPU the time is the
device's, on a CPU that of the threads that compute.
"""

from dataclasses import dataclass, field

from cs336_systems.profiling.attribution import Modules, Placed, kinds_of
from cs336_systems.profiling.names import without_layer_numbers
from cs336_systems.profiling.op_table import share
from cs336_systems.profiling.tags import kind_of, parse_tag
from cs336_systems.profiling.trace import Trace
from cs336_systems.profiling.work import Work, working

PARTS = ("attention", "norm", "feed-forward", "embedding")
REMAINDER = {"linear": "linear layers elsewhere", "block": "blocks, between their parts", "other": "rest of the model"}
COLLECTIVES = "collectives"


@dataclass(frozen=True)
class PartRow:
    """A part of the step; nanoseconds. The four times add up to the part's, the shares of all parts to one.

    `recomputed` is forward work that backward repeats (activation checkpointing); `other` is neither: the optimizer,
    synchronisation, and what lies between the phases.
    """

    name: str
    forward: int
    recomputed: int
    backward: int
    other: int
    share: float

    @property
    def total(self) -> int:
        """Nanoseconds in all."""
        return self.forward + self.recomputed + self.backward + self.other


@dataclass(frozen=True)
class ModuleRow(PartRow):
    """A module, or `modules` of them whose names differ in numbers only. The times are its own operators', without
    those of the modules inside; `inclusive_*` have these too."""

    kind: str
    modules: int
    calls: int
    inclusive_forward: int
    inclusive_recomputed: int
    inclusive_backward: int
    inclusive_other: int
    inclusive_share: float

    @property
    def inclusive(self) -> int:
        """Nanoseconds with the modules inside."""
        return self.inclusive_forward + self.inclusive_recomputed + self.inclusive_backward + self.inclusive_other


def column(placed: Placed) -> str:
    """forward, recomputed, backward or other: which time of its module an operator's is."""
    if placed.direction == "backward":
        return "backward"
    if placed.phase == "backward":
        return "recomputed" if placed.modules else "backward"
    return "forward" if placed.phase == "forward" else "other"


def part_of(work: Work) -> str:
    """The part of a model or of a step that an operator belongs to: the innermost of attention, norm, feed-forward and
    embedding, though all of a mixture of experts is one part; outside modules, the phase. Collectives are a part of
    their own, wherever they are launched and waited for."""
    if work.collective:
        return COLLECTIVES
    kinds, phase = kinds_of(work.placed.modules), work.placed.phase
    if "moe" in kinds:
        return "moe"
    for kind in reversed(kinds):
        if kind in PARTS:
            return kind
    if not kinds:
        return f"outside modules: {phase}" if phase != "other" else "outside modules and phases"
    return REMAINDER[next((kind for kind in reversed(kinds) if kind in REMAINDER), "other")]


def kind_rows(trace: Trace) -> list[PartRow]:
    """The whole step by part, the longest first."""
    sums: dict[str, dict[str, int]] = {}
    for each in working(trace):
        _add(sums.setdefault(part_of(each), {}), column(each.placed), each.time)
    whole = sum(sum(times.values()) for times in sums.values())
    rows = [PartRow(name, *_times(times), share(sum(times.values()), whole)) for name, times in sums.items()]
    return sorted((row for row in rows if row.total), key=lambda row: (-row.total, row.name))


@dataclass(eq=False)
class _Module:
    class_name: str
    names: set[str] = field(default_factory=set)
    calls: int = 0
    own: dict[str, int] = field(default_factory=dict)
    inclusive: dict[str, int] = field(default_factory=dict)


def module_rows(trace: Trace, collapse: bool = True, limit: int | None = None) -> list[ModuleRow]:
    """One row a module by its qualified name, the longest with all inside it first. With `collapse` the modules of all
    blocks share a row, `blocks.*.attention`. Shares are of the whole step, so inclusive ones do not add up to one."""
    found: dict[str, _Module] = {}
    known: dict[Modules, list[_Module]] = {}

    def rows_of(modules: Modules) -> list[_Module]:
        """The rows of some modules, each once, the innermost module's first."""
        for name, class_name in reversed(modules):
            row = found.setdefault(without_layer_numbers(name) if collapse else name, _Module(class_name))
            row.names.add(name)
            known.setdefault(modules, [])
            if row not in known[modules]:
                known[modules].append(row)
        return known[modules]

    whole = 0
    for each in working(trace):
        placed, span = each.placed, each.placed.span
        whole += each.time
        if not placed.modules:
            continue
        rows_inside = known.get(placed.modules) or rows_of(placed.modules)
        if span.category == "user_annotation" and parse_tag(span.name) and placed.phase != "backward":
            rows_inside[0].calls += 1
        where = column(placed)
        _add(rows_inside[0].own, where, each.time)
        for row in rows_inside:
            _add(row.inclusive, where, each.time)
    rows = [
        ModuleRow(
            name,
            *_times(row.own),
            share(sum(row.own.values()), whole),
            kind_of(row.class_name),
            len(row.names),
            row.calls,
            *_times(row.inclusive),
            share(sum(row.inclusive.values()), whole),
        )
        for name, row in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.inclusive, row.name))[:limit]


def _add(times: dict[str, int], name: str, time: int) -> None:
    times[name] = times.get(name, 0) + time


def _times(times: dict[str, int]) -> tuple[int, int, int, int]:
    forward, recomputed = times.get("forward", 0), times.get("recomputed", 0)
    return forward, recomputed, times.get("backward", 0), times.get("other", 0)
