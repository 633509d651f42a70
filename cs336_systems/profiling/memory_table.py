"""Tables of memory: peaks by phase and by step, what a peak consists of, and the origin of the largest allocations."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cs336_systems.host.console import format_bytes
from cs336_systems.host.table import Table
from cs336_systems.profiling.memory import Allocated, MemoryTimeline, phase_peaks
from cs336_systems.profiling.memory_owners import CATEGORIES
from cs336_systems.profiling.module_spans import parse_tag
from cs336_systems.profiling.names import ENGINE, PHASES, parse_collective, without_layer_numbers
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.trace import FRAME, Span, Trace

BEFORE = "before profiling"
BARE = re.compile(r"aten::(new_)?(empty|resize)")  # operators that only allocate, for another around them
FRAME_LINE = re.compile(r"\.py\(\d+\): ")


@dataclass(frozen=True)
class Source:
    """Allocations that are alike: `count` times `nbytes`, made by the same operator in the same place.

    `module` is a qualified name, with * for the number of a layer; it says so if its backward or a second forward
    made them. `frame` is the innermost Python frame outside of torch, if the trace has stacks.
    """

    category: str
    phase: str
    module: str
    operator: str
    frame: str
    nbytes: int
    count: int

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.nbytes * self.count


def sources(memory: MemoryTimeline, blocks: Iterable[Allocated]) -> list[Source]:
    """Group blocks that are alike; the most bytes first."""
    counts: Counter[tuple[str, str, str, str, str, int]] = Counter()
    for block in blocks:
        origin = block.origin
        if block.lane is None:
            phase = BEFORE
        elif origin is not None and origin.phase != "other":
            phase = origin.phase
        else:
            named = (each.name for each in memory.phases if each.start <= block.start < each.end)
            phase = next(named, "between phases")
        counts[block.category, phase, _module(origin), _operator(origin), _frame(origin), block.nbytes] += 1
    return sorted((Source(*key, count) for key, count in counts.items()), key=lambda each: -each.total)


def largest(memory: MemoryTimeline, count: int = 10) -> list[Source]:
    """The allocations with the most bytes each, wherever in the profile; the largest first."""
    return sorted(sources(memory, memory.blocks), key=lambda each: -each.nbytes)[:count]


def filling_peak(memory: MemoryTimeline, count: int = 10) -> list[Source]:
    """The allocations alive at the peak; the most bytes in all first."""
    return sources(memory, memory.alive(memory.peak_time))[:count]


def _module(origin: Node | None) -> str:
    if origin is None or not origin.module:
        return ""
    name = without_layer_numbers(origin.module)
    if origin.direction == "backward":
        return f"backward of {name}"
    return f"{name}, recomputed" if origin.phase == "backward" else name


def _outwards(node: Node | None) -> Iterator[Span]:
    while node is not None:
        yield node.span
        node = node.parent


def _operator(node: Node | None) -> str:
    """The innermost operator around an allocation that does more than allocate, or else what was annotated."""
    fallback = ""
    for span in _outwards(node):
        if span.category == "cpu_op":
            if not BARE.match(span.name):
                return span.name.removeprefix(ENGINE)
            fallback = fallback or span.name
        elif span.category == "user_annotation" and span.name not in PHASES and not parse_tag(span.name):
            found = parse_collective(span.name)
            return fallback or (f"{found.action} {found.verb} {found.label}".rstrip() if found else span.name)
    return fallback


def _frame(node: Node | None) -> str:
    """`model.py(12): forward`, the innermost frame that is neither torch's nor Python's own."""
    for span in _outwards(node):
        foreign = span.name.startswith(("torch/", "<")) or "site-packages" in span.name or "/lib/python" in span.name
        if span.category == FRAME and FRAME_LINE.search(span.name) and not foreign:
            return "/".join(span.name.split("/")[-2:])
    return ""


def memory_markdown(trace: Trace, memory: MemoryTimeline, count: int = 10) -> str:
    """The tables of one rank as Markdown; the largest `count` in each."""
    if not memory.blocks:
        return f"# Memory of rank {trace.rank}\n\nThe trace has no allocations: profile with profile_memory=True.\n"

    def exact(nbytes: int) -> str:
        return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"

    time = memory.peak_time
    phase = next((each.name for each in memory.phases if each.start <= time < each.end), None)
    step = next((each.name for each in memory.steps if each.start <= time < each.end), None)
    during = (f", in {phase}" if phase else "") + (f" of {step}" if phase and step else f", in {step}" if step else "")
    parts = [
        f"# Memory of rank {trace.rank} on {memory.device}",
        f"Peak {exact(memory.peak)} at {(time - memory.times[0]) / 1e6:.2f} ms{during}. "
        f"{exact(memory.before)} were alive when profiling began, {exact(memory.totals[-1])} when it ended.",
    ]
    tables = [_phases_table(memory)]
    if len(memory.steps) > 1:
        tables.append(_steps_table(trace, memory))
    tables.append(_sources_table("What fills the peak", filling_peak(memory, count), memory.peak))
    tables.append(_sources_table("The largest allocations", largest(memory, count), None))
    return "\n\n".join([*parts, *(table.markdown().rstrip("\n") for table in tables)]) + "\n"


def _phases_table(memory: MemoryTimeline) -> Table:
    best: dict[str, int] = {}
    for phase in memory.phases:
        index = memory.highest_in(phase.start, phase.end)
        if phase.name not in best or memory.totals[index] > memory.totals[best[phase.name]]:
            best[phase.name] = index
    rows = best | {"**whole profile**": memory.peak_index}
    cells = [
        [name, f"{memory.totals[i]:,}", format_bytes(memory.totals[i]), *map(format_bytes, memory.amounts[i])]
        for name, i in rows.items()
    ]
    heads = ["phase", "peak, bytes", "peak", *CATEGORIES]
    return Table("The peak of each phase, and what it consists of", heads, cells)


def _steps_table(trace: Trace, memory: MemoryTimeline) -> Table:
    names = list(phase_peaks(memory))
    rows = []
    for step in memory.steps:
        peaks, whole = phase_peaks(memory, step.name), memory.peak_in(step.start, step.end)
        rows.append([step.name, *(f"{peaks[name]:,}" if name in peaks else "" for name in names), f"{whole:,}"])
    heads = ["step", *(f"{name}, bytes" for name in names), "whole step, bytes"]
    return Table("Peaks by step", heads, rows)


def _sources_table(title: str, found: list[Source], whole: int | None) -> Table:
    columns: dict[str, Callable[[Source], str]] = {
        "count x bytes": lambda each: f"{each.count} x {each.nbytes:,}",
        "in all": lambda each: format_bytes(each.total),
        "of peak": lambda each: f"{each.total / (whole or 1):.1%}",
        "category": lambda each: each.category,
        "phase": lambda each: each.phase,
        "module": lambda each: each.module,
        "innermost operator": lambda each: each.operator,
        "Python frame": lambda each: each.frame,
    }
    if whole is None:
        del columns["of peak"]
    if not any(source.frame for source in found):
        del columns["Python frame"]
    return Table(title, list(columns), [[cell(each) for cell in columns.values()] for each in found])
