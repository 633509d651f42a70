"""What fills the memory: peaks by phase, what a peak consists of, and where the largest allocations come from."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cs336_systems.console import format_bytes
from cs336_systems.profiling.allocations import Allocated, Timeline, phase_peaks
from cs336_systems.profiling.attribution import ENGINE, PHASES, Placed
from cs336_systems.profiling.held import CATEGORIES
from cs336_systems.profiling.names import FRAME, parse_collective, without_layer_numbers
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.sheet import Sheet
from cs336_systems.profiling.tags import parse_tag
from cs336_systems.profiling.trace import Span, Trace

BEFORE = "before profiling"
BARE = re.compile(r"aten::(new_)?(empty|resize)")  # operators that only allocate, for another around them
FRAME_LINE = re.compile(r"\.py\(\d+\): ")


@dataclass(frozen=True)
class Source:
    """Allocations that are alike: `count` times `nbytes`, made by one line of work.

    `module` is a qualified name, with * for the number of a layer, and says whether its backward or a second forward
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


def sources(timeline: Timeline, blocks: Iterable[Allocated]) -> list[Source]:
    """Blocks that are alike put together; the most bytes first."""
    counts: dict[tuple[str, str, str, str, str, int], int] = {}
    for block in blocks:
        node = block.origin.node if block.origin else None
        phase, module = _phase(timeline, block), _module(block.origin)
        key = (block.category, phase, module, _operator(node), _frame(node), block.nbytes)
        counts[key] = counts.get(key, 0) + 1
    return sorted((Source(*key, count) for key, count in counts.items()), key=lambda each: -each.total)


def largest(timeline: Timeline, count: int = 10) -> list[Source]:
    """The allocations with the most bytes each, wherever in the profile; the largest first."""
    return sorted(sources(timeline, timeline.blocks), key=lambda each: -each.nbytes)[:count]


def filling_peak(timeline: Timeline, count: int = 10) -> list[Source]:
    """What was alive at the peak; the most bytes in all first."""
    return sources(timeline, timeline.alive(timeline.peak_time))[:count]


def _phase(timeline: Timeline, block: Allocated) -> str:
    if block.lane is None:
        return BEFORE
    if block.origin is not None and block.origin.phase != "other":
        return block.origin.phase
    return next((each.name for each in timeline.phases if each.start <= block.start < each.end), "between phases")


def _module(origin: Placed | None) -> str:
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
            return fallback or (f"{found.what} {found.verb} {found.label}".rstrip() if found else span.name)
    return fallback


def _frame(node: Node | None) -> str:
    """`model.py(12): forward`, the innermost frame that is neither torch's nor Python's own."""
    for span in _outwards(node):
        foreign = span.name.startswith(("torch/", "<")) or "site-packages" in span.name or "/lib/python" in span.name
        if span.category == FRAME and FRAME_LINE.search(span.name) and not foreign:
            return "/".join(span.name.split("/")[-2:])
    return ""


def memory_markdown(trace: Trace, timeline: Timeline, count: int = 10) -> str:
    """The tables of one rank as Markdown; the largest `count` in each."""
    if not timeline.blocks:
        return f"# Memory of rank {trace.rank}\n\nThe trace has no allocations: profile with profile_memory=True.\n"
    after = (timeline.peak_time - timeline.times[0]) / 1e6
    parts = [
        f"# Memory of rank {trace.rank} on {timeline.device}",
        f"Peak {_exact(timeline.peak)} at {after:.2f} ms{_during(timeline)}. "
        f"{_exact(timeline.before)} were alive when profiling began, {_exact(timeline.totals[-1])} when it ended.",
    ]
    sheets = [_phases_sheet(timeline)]
    if len(timeline.steps) > 1:
        sheets.append(_steps_sheet(trace, timeline))
    sheets.append(_sources_sheet("What fills the peak", filling_peak(timeline, count), timeline.peak))
    sheets.append(_sources_sheet("The largest allocations", largest(timeline, count), None))
    return "\n\n".join([*parts, *(sheet.markdown().rstrip("\n") for sheet in sheets)]) + "\n"


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"


def _during(timeline: Timeline) -> str:
    """Where in the profile the peak lies."""
    time = timeline.peak_time
    phase = next((each.name for each in timeline.phases if each.start <= time < each.end), None)
    step = next((each.name for each in timeline.steps if each.start <= time < each.end), None)
    return "".join(f"{word} {name}" for word, name in ((", in", phase), (" of" if phase else ", in", step)) if name)


def _phases_sheet(timeline: Timeline) -> Sheet:
    best: dict[str, int] = {}
    for phase in timeline.phases:
        index = timeline.highest_in(phase.start, phase.end)
        if phase.name not in best or timeline.totals[index] > timeline.totals[best[phase.name]]:
            best[phase.name] = index
    rows = best | {"**whole profile**": timeline.peak_index}
    cells = [
        [name, f"{timeline.totals[i]:,}", format_bytes(timeline.totals[i]), *map(format_bytes, timeline.amounts[i])]
        for name, i in rows.items()
    ]
    heads = ["phase", "peak, bytes", "peak", *CATEGORIES]
    return Sheet("The peak of each phase, and what it consists of", heads, cells)


def _steps_sheet(trace: Trace, timeline: Timeline) -> Sheet:
    names = list(phase_peaks(trace, timeline))
    rows = []
    for step in timeline.steps:
        peaks = phase_peaks(trace, timeline, step.name)
        whole = timeline.peak_in(step.start, step.end)
        rows.append([step.name, *(f"{peaks[name]:,}" if name in peaks else "" for name in names), f"{whole:,}"])
    heads = ["step", *(f"{name}, bytes" for name in names), "whole step, bytes"]
    return Sheet("Peaks by step", heads, rows)


def _sources_sheet(title: str, found: Sequence[Source], whole: int | None) -> Sheet:
    framed = any(source.frame for source in found)
    rows = []
    for source in found:
        share = [] if whole is None else [f"{source.total / whole:.1%}"]
        where = [source.frame] if framed else []
        size = f"{source.count} x {source.nbytes:,}"
        origin = [source.category, source.phase, source.module, source.operator, *where]
        rows.append([size, format_bytes(source.total), *share, *origin])
    shares = [] if whole is None else ["of peak"]
    frames = ["Python frame"] if framed else []
    heads = ["count x bytes", "in all", *shares, "category", "phase", "module", "innermost operator", *frames]
    return Sheet(title, heads, rows)
