"""Bytes of memory alive over time, by category, added up from every allocation and free of a trace.

On a CPU the allocator's events are added to the memory held when profiling began. torch does not report when that is
freed: it shows only if its address is used again. On a GPU the allocator's own sum counts. It rounds every block up
(to 512 bytes), and bytes beyond the known blocks are `other`.

An allocation is a parameter, a gradient or optimizer state if it was labelled so; otherwise an activation if it was
made in a forward pass (also one that backward runs again), and other, such as a temporary of backward, if it was not.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cs336_systems.profiling.names import LINE_UP
from cs336_systems.profiling.nesting import Node, allocations
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Allocation, Lane, Span, Trace, grouped, once

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")


@dataclass
class Allocated:
    """Some memory from when it was allocated until it was freed."""

    address: int
    nbytes: int
    start: int  # in nanoseconds; the timeline's start if it was there before
    first: int = 0  # index of that event of the allocator
    lane: Lane | None = None  # None if it was there before
    category: str = "other"
    origin: Node | None = None  # the innermost span inside which it was allocated
    end: int | None = None  # None if it outlived the profile
    last: int | None = None

    def alive(self, time: int) -> bool:
        """True if it is allocated and not yet freed at a time."""
        return self.start <= time and (self.end is None or time < self.end)


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive on one device. `blocks` are those held before, then the allocations in order."""

    device: str
    times: list[int]  # the start, and all events of the allocator
    amounts: list[list[int]]  # from each of these times on, in the order of CATEGORIES
    blocks: list[Allocated]
    phases: list[Span]
    steps: list[Span]

    @cached_property
    def totals(self) -> list[int]:
        """Bytes alive, all categories together; the first are those when profiling began."""
        return [sum(amounts) for amounts in self.amounts]

    @cached_property
    def levels(self) -> list[dict[str, int]]:
        """Bytes by category at the start and after every event."""
        return [dict(zip(CATEGORIES, amounts, strict=True)) for amounts in self.amounts]

    @cached_property
    def peak_index(self) -> int:
        """The index of the highest level, the first of several."""
        return self.totals.index(max(self.totals))

    @property
    def peak(self) -> int:
        return self.totals[self.peak_index]

    @property
    def peak_time(self) -> int:
        return self.times[self.peak_index]

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

    def phase_peaks(self, step: Span | None = None) -> dict[str, int]:
        """The index of the highest level in each phase, by its name, in order: over all steps, or in one."""
        found: dict[str, int] = {}
        for phase in self.phases:
            if step is None or (step.start <= phase.start and phase.end <= step.end):
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
    blocks = _blocks(trace, around, device, times[0])
    _categorise(trace, blocks)
    changes = np.zeros((len(times), len(CATEGORIES)), dtype=np.int64)
    for block in blocks:
        place = CATEGORIES.index(block.category) if block.category in CATEGORIES else -1
        changes[block.first, place] += block.nbytes
        if block.last is not None:
            changes[block.last, place] -= block.nbytes
    amounts = changes.cumsum(axis=0)
    if device == "cuda" and events:
        known = np.array([events[0].total - events[0].nbytes, *(event.total for event in events)])
        amounts[:, -1] = np.maximum(0, known - amounts[:, :-1].sum(axis=1))
    return MemoryTimeline(device, times, amounts.tolist(), blocks, found.phases, found.steps)


def _blocks(trace: Trace, made: list[tuple[Allocation, Node | None]], device: str, start: int) -> list[Allocated]:
    """Match every free with its allocation; blocks held before come first."""
    blocks: list[Allocated] = []
    living: dict[int, Allocated] = {}
    addresses: list[int] = []  # of the living, in order

    def add(block: Allocated) -> None:
        blocks.append(block)
        living[block.address] = block
        insort(addresses, block.address)

    def take(address: int, index: int) -> None:
        block = living.pop(address)
        block.end, block.last = made[index - 1][0].time, index
        del addresses[bisect_left(addresses, address)]

    for category, address, nbytes, where in trace.ours.get("held", ()):
        if where == device and address not in living:
            add(Allocated(address, nbytes, start, category=category))
    for index, (event, origin) in enumerate(made, 1):
        if event.nbytes < 0:
            if event.address not in living:  # its allocation is not in the trace: it was there from the beginning
                add(Allocated(event.address, -event.nbytes, start))
            take(event.address, index)
            continue
        # Living blocks in memory that is allocated again were freed without an event.
        first = bisect_left(addresses, event.address)
        if first and addresses[first - 1] + living[addresses[first - 1]].nbytes > event.address:
            first -= 1
        for address in addresses[first : bisect_left(addresses, event.address + event.nbytes)]:
            take(address, index)
        add(Allocated(event.address, event.nbytes, event.time, index, event.lane, origin=origin))
    return sorted(blocks, key=lambda block: block.lane is not None)


def _categorise(trace: Trace, blocks: Iterable[Allocated]) -> None:
    """Give every block its category: by the first label while it lived; a parameter stays one."""
    lives = grouped(blocks, lambda block: block.address)
    for each in blocks:
        if each.origin is not None and (each.origin.phase == "forward" or each.origin.recomputed):
            each.category = "activations"
    labelled: set[int] = set()
    for time, category, address in sorted(trace.ours.get("marks", ())):
        known = lives.get(address, [])  # one after another
        block = known[max(0, bisect_right(known, time, key=lambda each: each.start) - 1)] if known else None
        if block is None or not block.alive(time) or id(block) in labelled or category not in CATEGORIES:
            continue
        labelled.add(id(block))
        if block.lane is not None or block.category != "parameters":
            block.category = category
