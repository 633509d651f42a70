"""Tables of memory: peaks by phase and by step, the contents of a peak, and the origin of the largest allocations."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cs336_systems.host.console import format_bytes
from cs336_systems.host.table import Table
from cs336_systems.profiling.memory import CATEGORIES, Allocated, MemoryTimeline
from cs336_systems.profiling.names import ENGINE, PHASES, parse_collective, parse_tag, without_layer_numbers
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.timeline import phase_at
from cs336_systems.profiling.trace import FRAME, Trace

BARE = re.compile(r"aten::(new_)?(empty|resize)")  # operators that only allocate, for another around them
FRAME_LINE = re.compile(r"\.py\(\d+\): ")
FOREIGN = re.compile(r"torch/|<|.*site-packages|.*/lib/python")
SOURCES = (
    "count x bytes: sizes text; in all: total bytes;{} category: category text; phase: phase text; module: module text;"
    "innermost operator: operator text; Python frame: frame text?"
)


@dataclass(frozen=True)
class Source:
    """Allocations that are alike: `count` times `nbytes`, made by the same operator in the same place."""

    category: str
    phase: str
    module: str  # with * for a layer's number, and a note if its backward or a second forward made them
    operator: str
    frame: str  # the innermost Python frame outside of torch, if the trace has stacks
    nbytes: int
    peak: int
    count: int

    @property
    def total(self) -> int:
        return self.nbytes * self.count

    @property
    def sizes(self) -> str:
        return f"{self.count} x {self.nbytes:,}"


def sources(memory: MemoryTimeline, blocks: Iterable[Allocated]) -> list[Source]:
    """Group blocks that are alike; the most bytes first."""
    counts: Counter[tuple[str, str, str, str, str, int]] = Counter()
    for block in blocks:
        origin = block.origin
        if block.lane is None:
            phase = "before profiling"
        elif origin is not None and origin.phase != "other":
            phase = origin.phase
        else:
            named = phase_at(memory.phases, block.start)
            phase = "between phases" if named == "other" else named
        about = (_module(origin), _operator(origin), _frame(origin)) if origin is not None else ("", "", "")
        counts[block.category, phase, *about, block.nbytes] += 1
    found = (Source(*key, memory.peak or 1, count) for key, count in counts.items())
    return sorted(found, key=lambda each: -each.total)


def largest(memory: MemoryTimeline, count: int = 10) -> list[Source]:
    """The largest single allocations of the whole profile; the largest first."""
    made = [block for block in memory.blocks if block.lane is not None]
    return sorted(sources(memory, made), key=lambda each: -each.nbytes)[:count]


def filling_peak(memory: MemoryTimeline, count: int = 10) -> list[Source]:
    """The allocations alive at the peak; the most bytes in all first."""
    return sources(memory, (block for block in memory.blocks if block.alive(memory.peak_time)))[:count]


def _module(origin: Node) -> str:
    name = without_layer_numbers(origin.modules[-1][0]) if origin.modules else ""
    if origin.direction == "backward":
        return f"backward of {name}" if name else ""
    return f"{name}, recomputed" if origin.recomputed else name


def _operator(origin: Node) -> str:
    """The innermost operator around an allocation that does more than allocate, or else the annotation."""
    fallback = ""
    for node in origin.outwards():
        name, category = node.span.name, node.span.category
        if category == "cpu_op":
            if not BARE.match(name):
                return name.removeprefix(ENGINE)
            fallback = fallback or name
        elif category == "user_annotation" and name not in PHASES and not parse_tag(name):
            found = parse_collective(name)
            return fallback or (f"{found.action} {found.verb} {found.label}".rstrip() if found else name)
    return fallback


def _frame(origin: Node) -> str:
    """`model.py(12): forward`, the innermost frame that is neither torch's nor Python's own."""
    names = (node.span.name for node in origin.outwards() if node.span.category == FRAME)
    mine = next((name for name in names if FRAME_LINE.search(name) and not FOREIGN.match(name)), "")
    return "/".join(mine.split("/")[-2:])


def memory_markdown(trace: Trace, memory: MemoryTimeline) -> str:
    """The tables of one rank as Markdown."""
    if len(memory.times) == 1:
        how = "profile with profile_memory=True, by torch 1.13 or newer"
        return f"# Memory of rank {trace.rank}\n\nThe trace has no allocations with addresses: {how}.\n"

    def exact(nbytes: int) -> str:
        return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"

    time, totals = memory.peak_time, memory.totals
    within = [[s.name for s in spans if s.start <= time < s.end][:1] for spans in (memory.phases, memory.steps)]
    during = " of ".join(name for names in within for name in names)
    parts = [
        f"# Memory of rank {trace.rank} on {memory.device}",
        f"Peak {exact(memory.peak)} at {(time - memory.times[0]) / 1e6:.2f} ms{during and f', in {during}'}. "
        f"{exact(totals[0])} were allocated when profiling began, {exact(totals[-1])} when it ended.",
    ]
    peaks = memory.phase_peaks()
    cells = [
        [name, f"{totals[i]:,}", format_bytes(totals[i]), *map(format_bytes, memory.amounts[i])]
        for name, i in (peaks | {"**whole profile**": memory.peak_index}).items()
    ]
    heads = ["phase", "peak, bytes", "peak", *CATEGORIES]
    tables = [Table("The peak of each phase, by category", heads, cells)]
    if len(memory.steps) > 1:
        heads = ["step", *(f"{name}, bytes" for name in peaks), "whole step, bytes"]
        rows = []
        for step in memory.steps:
            own = memory.phase_peaks(step)
            known = [f"{totals[own[name]]:,}" if name in own else "" for name in peaks]
            rows.append([step.name, *known, f"{memory.peak_in(step):,}"])
        tables.append(Table("Peaks by step", heads, rows))
    of_peak = SOURCES.format(" of peak: total/peak share;")
    tables.append(Table.of("What fills the peak", filling_peak(memory), of_peak, names=False))
    tables.append(Table.of("The largest allocations", largest(memory), SOURCES.format(""), names=False))
    return "\n\n".join([*parts, *(table.markdown().rstrip("\n") for table in tables)]) + "\n"
