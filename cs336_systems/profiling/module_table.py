"""Where the time goes by module: what its own operators took, forward and backward beside each other.

`attribution.py` says of every operator, also of backward's, which module it belongs to. On a GPU the time is the
device's, on a CPU that of the threads that compute.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cs336_systems.profiling.attribution import Placed
from cs336_systems.profiling.op_table import computing, in_collective, self_time, share
from cs336_systems.profiling.tags import kind_of, parse_tag

PARTS = ("attention", "norm", "feed-forward", "embedding")
REMAINDER = {"linear": "linear layers elsewhere", "block": "blocks, between their parts", "other": "rest of the model"}
COLLECTIVES = "collectives"
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


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


def on_device(placed: Iterable[Placed]) -> bool:
    """Whether any operator launched something on a GPU, so that the device's time is the one to look at."""
    return any(each.kernels for each in placed)


def costs(placed: Sequence[Placed]) -> list[tuple[Placed, int]]:
    """Nanoseconds of everything that computes: on the device where there is one, else CPU self time."""
    work = computing(placed)
    device = on_device(work)
    return [(each, each.device_self if device else self_time(each.node)) for each in work]


def column(placed: Placed) -> str:
    """forward, recomputed, backward or other: which time of its module an operator's is."""
    if placed.direction == "backward":
        return "backward"
    if placed.phase == "backward":
        return "recomputed" if placed.modules else "backward"
    return "forward" if placed.phase == "forward" else "other"


def part_of(placed: Placed) -> str:
    """The part of a model or of a step that an operator belongs to: the innermost of attention, norm, feed-forward and
    embedding, though all of a mixture of experts is one part; outside modules, the phase. Collectives are a part of
    their own, wherever they are launched and waited for."""
    if in_collective(placed.node):
        return COLLECTIVES
    kinds = [kind_of(name) for _, name in placed.modules]
    if "moe" in kinds:
        return "moe"
    for kind in reversed(kinds):
        if kind in PARTS:
            return kind
    if not kinds:
        return f"outside modules: {placed.phase}" if placed.phase != "other" else "outside modules and phases"
    return REMAINDER[next((kind for kind in reversed(kinds) if kind in REMAINDER), "other")]


def kind_rows(placed: Sequence[Placed]) -> list[PartRow]:
    """The whole step by part, the longest first."""
    sums: dict[str, dict[str, int]] = {}
    for each, time in costs(placed):
        _add(sums.setdefault(part_of(each), {}), column(each), time)
    whole = sum(sum(times.values()) for times in sums.values())
    rows = [PartRow(name, *_times(times), share(sum(times.values()), whole)) for name, times in sums.items()]
    return sorted((row for row in rows if row.total), key=lambda row: (-row.total, row.name))


@dataclass
class _Module:
    class_name: str
    names: set[str] = field(default_factory=set)
    calls: int = 0
    own: dict[str, int] = field(default_factory=dict)
    inclusive: dict[str, int] = field(default_factory=dict)


def module_rows(placed: Sequence[Placed], collapse: bool = True, limit: int | None = None) -> list[ModuleRow]:
    """One row a module by its qualified name, the longest with all inside it first. With `collapse` the modules of all
    blocks share a row, `blocks.*.attention`. Shares are of the whole step, so inclusive ones do not add up to one."""
    found: dict[str, _Module] = {}

    def row_of(module: tuple[str, str]) -> _Module:
        row = found.setdefault(INDEX.sub("*", module[0]) if collapse else module[0], _Module(module[1]))
        row.names.add(module[0])
        return row

    whole = 0
    for each, time in costs(placed):
        whole += time
        if each.span.category == "user_annotation" and parse_tag(each.span.name) and each.phase != "backward":
            row_of(each.modules[-1]).calls += 1
        if not each.modules:
            continue
        _add(row_of(each.modules[-1]).own, column(each), time)
        for row in {id(row): row for row in map(row_of, each.modules)}.values():
            _add(row.inclusive, column(each), time)
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
