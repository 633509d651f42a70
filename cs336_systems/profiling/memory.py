"""Bytes of memory alive over time, by category, added up from every allocation and free of a trace; and their tables:
peaks by phase, the contents of a peak, and the origin of the largest allocations.

On a CPU events are added to the memory held when profiling began; that it was freed shows only if its address is used
again. On a GPU the allocator's own sum counts: it rounds blocks up, and bytes beyond the known blocks are `other`.
"""

import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from cs336_systems.host.console import format_bytes
from cs336_systems.host.table import Table
from cs336_systems.profiling.names import ENGINE, LINE_UP, PHASES, parse_collective, parse_tag, without_layer_numbers
from cs336_systems.profiling.nesting import Node, allocations
from cs336_systems.profiling.timeline import phase_at, timeline
from cs336_systems.profiling.trace import Allocation, Span, Trace, once

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")
BARE = re.compile(r"aten::(new_)?(empty|resize)")  # operators that only allocate, for another around them
SOURCES = (
    "count x bytes: sizes text; in all: total bytes;{} category: category text; phase: phase text; module: module text;"
    "innermost operator: operator text"
)


@dataclass
class Allocated:
    """Some memory from when it was allocated until it was freed."""

    address: int
    nbytes: int
    first: int = 0  # index of that event of the allocator; 0 if it was there before
    category: str = "other"
    origin: Node | None = None  # the innermost span inside which it was allocated
    last: int | None = None  # None if it outlived the profile

    def alive(self, index: int) -> bool:
        """True if it is allocated and not yet freed after an event."""
        return self.first <= index and (self.last is None or index < self.last)


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive on one device. `blocks` are those held before, then the allocations in order."""

    device: str
    times: list[int]  # the start, and all events of the allocator
    amounts: list[list[int]]  # from each of these times on, in the order of CATEGORIES
    totals: list[int]  # all categories together
    blocks: list[Allocated]
    phases: list[Span]
    steps: list[Span]

    @cached_property
    def peak_index(self) -> int:
        """The index of the highest level, the first of several."""
        return self.totals.index(self.peak)

    @cached_property
    def peak(self) -> int:
        return max(self.totals)

    @property
    def at_peak(self) -> dict[str, int]:
        return dict(zip(CATEGORIES, self.amounts[self.peak_index], strict=True))

    def highest_in(self, start: int, end: int) -> int:
        """The index of the highest level in [start, end], the first of several. The level at a moment is the one after
        all its events; before the start it is the first."""
        first, last = (max(1, bisect_right(self.times, time)) for time in (start, end))
        return max(range(first - 1, last), key=self.totals.__getitem__)

    def peak_in(self, span: Span) -> int:
        """The most bytes alive during a step or a phase."""
        return self.totals[self.highest_in(span.start, span.end)]

    def phase_peaks(self) -> dict[str, int]:
        """The index of the highest level in each phase, by its name, in order, over all steps."""
        found: dict[str, int] = {}
        for phase in self.phases:
            index = self.highest_in(phase.start, phase.end)
            if self.totals[index] > self.totals[found.setdefault(phase.name, index)]:
                found[phase.name] = index
        return found


@once
def memory_timeline(trace: Trace, device: str = "") -> MemoryTimeline:
    """The memory of a rank over time on `device`, cpu or cuda; by default cuda if anything was allocated there."""
    if not device:
        return memory_timeline(trace, trace.memory_device)
    found, around = timeline(trace), allocations(trace, device)
    events = [event for event, _ in around]
    times = [event.time for event in events]
    spans = [span.start for span in trace.spans if span.category != LINE_UP]
    marks = [time for time, *_ in trace.ours.get("marks", ())]
    times.insert(0, min([*spans[:1], *times[:1], *marks], default=0))
    blocks = _blocks(trace, around, device)
    changes = np.zeros((len(times), len(CATEGORIES)), dtype=np.int64)
    for block in blocks:
        place = CATEGORIES.index(block.category) if block.category in CATEGORIES else -1
        changes[block.first, place] += block.nbytes
        if block.last is not None:
            changes[block.last, place] -= block.nbytes
    amounts = changes.cumsum(axis=0)
    if device == "cuda" and events:
        of_gpus = {event.number: event.total - event.nbytes for event in reversed(events)}
        known = [sum(of_gpus.values())]
        for event in events:
            of_gpus[event.number] = event.total
            known.append(sum(of_gpus.values()))
        amounts[:, -1] = np.maximum(0, np.array(known) - amounts[:, :-1].sum(axis=1))
    totals = amounts.sum(axis=1).tolist()
    return MemoryTimeline(device, times, amounts.tolist(), totals, blocks, found.phases, found.steps)


def _blocks(trace: Trace, made: list[tuple[Allocation, Node | None]], device: str) -> list[Allocated]:
    """Match every free with its allocation, and give blocks the category of the first label while they lived (but a
    parameter that was held stays one); blocks held before come first."""
    blocks: list[Allocated] = []
    living: dict[int, Allocated] = {}
    addresses: list[int] = []  # of the living, in order
    index, labelled = 0, set[int]()

    def add(block: Allocated) -> None:
        blocks.append(block)
        living[block.address] = block
        insort(addresses, block.address)

    def take(address: int) -> None:
        living.pop(address).last = index
        del addresses[bisect_left(addresses, address)]

    for category, address, nbytes, where in trace.ours.get("held", ()):
        if where == device and address not in living:
            add(Allocated(address, nbytes, category=category))
    happened: list[tuple[int, Any, Any]] = [(event.time, event, origin) for event, origin in made]
    happened += sorted(trace.ours.get("marks", ()))
    for _, what, about in sorted(happened, key=itemgetter(0)):  # a label comes after the events of its moment
        if isinstance(what, str):
            if (known := living.get(about)) and id(known) not in labelled and what in CATEGORIES:
                labelled.add(id(known))
                known.category = what if known.first or known.category != "parameters" else known.category
            continue
        index += 1
        if what.nbytes < 0:
            if what.address not in living:  # its allocation is not in the trace: it was there from the beginning
                add(Allocated(what.address, -what.nbytes))
            take(what.address)
            continue
        # Living blocks in memory that is allocated again were freed without an event.
        first = bisect_left(addresses, what.address)
        if first and addresses[first - 1] + living[addresses[first - 1]].nbytes > what.address:
            first -= 1
        for address in addresses[first : bisect_left(addresses, what.address + what.nbytes)]:
            take(address)
        forward = about is not None and (about.phase == "forward" or about.recomputed)
        add(Allocated(what.address, what.nbytes, index, "activations" if forward else "other", about))
    return sorted(blocks, key=lambda block: block.first > 0)


@dataclass(frozen=True)
class Source:
    """Allocations that are alike: `count` times `nbytes`, made by the same operator in the same place."""

    category: str
    phase: str
    module: str  # with * for a layer's number, and a note if its backward or a second forward made them
    operator: str
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
    counts: Counter[tuple[str, str, str, str, int]] = Counter()
    phase_of = phase_at(memory.phases)
    for block in blocks:
        origin = block.origin
        phase = origin.phase if origin is not None else "other"
        phase = phase_of(memory.times[block.first]) if phase == "other" else phase
        phase = "before profiling" if not block.first else "between phases" if phase == "other" else phase
        counts[block.category, phase, *(_origin(origin) if origin else ("", "")), block.nbytes] += 1
    found = (Source(*key, memory.peak or 1, count) for key, count in counts.items())
    return sorted(found, key=lambda each: -each.total)


def largest(memory: MemoryTimeline, count: int = 10) -> list[Source]:
    """The largest single allocations of the whole profile; the largest first."""
    made = (block for block in memory.blocks if block.first)
    return sorted(sources(memory, made), key=lambda each: -each.nbytes)[:count]


def filling_peak(memory: MemoryTimeline, count: int = 10) -> list[Source]:
    """The allocations alive at the peak; the most bytes in all first."""
    return sources(memory, (block for block in memory.blocks if block.alive(memory.peak_index)))[:count]


def _origin(node: Node) -> tuple[str, str]:
    """The module and operator of an allocation, given the innermost span around it: the innermost operator that does
    more than allocate, or else the annotation."""
    module = without_layer_numbers(node.modules[-1][0]) if node.modules else ""
    if module and node.direction == "backward":
        module = f"backward of {module}"
    operator = bare = ""
    for each in node.outwards():
        name, category = each.span.name, each.span.category
        if operator or category not in ("cpu_op", "user_annotation") or name in PHASES or parse_tag(name):
            continue
        if BARE.match(name):
            bare = bare or name
        elif category == "cpu_op":
            operator = name.removeprefix(ENGINE)
        else:
            found = parse_collective(name)
            operator = bare or (found.title if found else name)
    return f"{module}, recomputed" if node.recomputed else module, operator or bare


def memory_markdown(trace: Trace, memory: MemoryTimeline) -> str:
    """The tables of one rank as Markdown."""
    if len(memory.times) == 1:
        how = "profile with profile_memory=True, by torch 1.13 or newer"
        return f"# Memory of rank {trace.rank}\n\nThe trace has no allocations with addresses: {how}.\n"

    def exact(nbytes: int) -> str:
        return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"

    time, totals = memory.times[memory.peak_index], memory.totals
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
        for name, i in (peaks | {"whole profile": memory.peak_index}).items()
    ]
    heads = ["phase", "peak, bytes", "peak", *CATEGORIES]
    tables = [Table("The peak of each phase, by category", heads, cells)]
    of_peak = SOURCES.format(" of peak: total/peak share;")
    tables.append(Table.of("What fills the peak", filling_peak(memory), of_peak, names=False))
    tables.append(Table.of("The largest allocations", largest(memory), SOURCES.format(""), names=False))
    return "\n\n".join([*parts, *(table.markdown().rstrip("\n") for table in tables)]) + "\n"
