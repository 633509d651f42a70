"""Bytes of memory alive over time, by category, added up from every allocation and free of a trace.

On a CPU the allocator's events are added to what was held when profiling began; torch does not report that such memory
is freed, unless by using its address again. On a GPU the allocator's own sum rules: it rounds every block up (to 512
bytes), and what the known blocks do not explain is `other`.

An allocation is a parameter, a gradient or optimizer state if it was labelled so; otherwise an activation if it was
made in a forward pass (also one that backward runs again), and other, such as a temporary of backward, if it was not.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cs336_systems.profiling.labels import CATEGORIES
from cs336_systems.profiling.nesting import Node
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Allocation, Lane, Span, Trace, once

PLACE = {category: i for i, category in enumerate(CATEGORIES)}


@dataclass
class Allocated:
    """Some memory from when it was allocated until it was freed, [start, end) in nanoseconds.

    `end` is None if it outlived the profile; `lane` is None if it was there before, and `start` is then the timeline's.
    `origin` is the innermost span inside which it was allocated.
    """

    address: int
    nbytes: int
    start: int
    end: int | None = None
    category: str = "other"
    lane: Lane | None = None
    origin: Node | None = None

    def alive(self, time: int) -> bool:
        """True if it was allocated and not yet freed at a time."""
        return self.start <= time and (self.end is None or time < self.end)


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive on one device. `amounts[i]`, by category in the order of CATEGORIES, hold from `times[i]` on.

    `blocks` are the allocations of the trace in order, `earlier` what was there before.
    """

    device: str
    times: list[int]
    amounts: list[tuple[int, ...]]
    blocks: list[Allocated]
    earlier: list[Allocated]
    phases: list[Span]
    steps: list[Span]

    @cached_property
    def totals(self) -> list[int]:
        """Bytes alive, all categories together; the first are those when profiling began."""
        return [sum(amounts) for amounts in self.amounts]

    @property
    def levels(self) -> list[tuple[int, dict[str, int]]]:
        """(nanoseconds, bytes by category) at the start and after every event."""
        return [(time, self.composition(i)) for i, time in enumerate(self.times)]

    @cached_property
    def peak_index(self) -> int:
        """The index of the highest level, the first of several."""
        return self.totals.index(max(self.totals))

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once."""
        return self.totals[self.peak_index]

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return self.composition(self.peak_index)

    @property
    def peak_time(self) -> int:
        return self.times[self.peak_index]

    def composition(self, index: int) -> dict[str, int]:
        """One level in bytes by category."""
        return dict(zip(CATEGORIES, self.amounts[index], strict=True))

    def index_at(self, time: int) -> int:
        """The index of the level at a moment, after all events of that moment; before the start, the first."""
        return max(0, bisect_right(self.times, time) - 1)

    def highest_in(self, start: int, end: int) -> int:
        """The index of the highest level at any moment in [start, end], the level at its start included."""
        window = range(self.index_at(start), self.index_at(end) + 1)
        return max(window, key=lambda i: (self.totals[i], -i))

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

    def alive(self, time: int) -> list[Allocated]:
        """The blocks that were alive at a moment, the earlier first."""
        return [block for block in (*self.earlier, *self.blocks) if block.alive(time)]


def memory_timeline(trace: Trace, device: str | None = None) -> MemoryTimeline:
    """The memory of a rank over time on `device`, cpu or cuda; by default cuda if anything was allocated there."""
    if device is None:
        device = "cuda" if any(each.device == "cuda" for each in trace.allocations) else "cpu"
    return _by_device(trace)[device]


@once
def _by_device(trace: Trace) -> dict[str, MemoryTimeline]:
    return {device: _memory_timeline(trace, device) for device in ("cpu", "cuda")}


def _memory_timeline(trace: Trace, device: str) -> MemoryTimeline:
    events, found = [each for each in trace.allocations if each.device == device and each.nbytes], timeline(trace)
    beginnings = [span.start for span in trace.spans[:1]] + [event.time for event in events[:1]]
    beginnings += [time for time, _, _ in trace.ours.get("marks", ())]
    ledger = _Ledger(trace, device, min(beginnings, default=0))
    changes = [ledger.enter(event) for event in events]
    _find_origins(found.nodes, ledger.blocks)
    _categorise(trace, [*ledger.earlier, *ledger.blocks])
    now = [0] * len(CATEGORIES)

    def trust(total: int) -> None:
        """The allocator's sum on a GPU; a CPU's adds up all profiles of a process."""
        if device == "cuda":
            now[PLACE["other"]] = max(0, total - sum(now) + now[PLACE["other"]])

    for block in ledger.earlier:
        now[PLACE.get(block.category, PLACE["other"])] += block.nbytes
    if events:
        trust(events[0].total - events[0].nbytes)
    times, amounts = [ledger.start], [tuple(now)]
    for event, changed in zip(events, changes, strict=True):
        for block, sign in changed:
            now[PLACE.get(block.category, PLACE["other"])] += sign * block.nbytes
        trust(event.total)
        times.append(event.time)
        amounts.append(tuple(now))
    return MemoryTimeline(device, times, amounts, ledger.blocks, ledger.earlier, found.phases, found.steps)


class _Ledger:
    """Matches every free with its allocation."""

    def __init__(self, trace: Trace, device: str, start: int) -> None:
        self.start = start
        self.blocks: list[Allocated] = []
        self.earlier: list[Allocated] = []
        self.living: dict[int, Allocated] = {}
        self.addresses: list[int] = []  # of the living, in order
        for category, address, nbytes, where in trace.ours.get("held", ()):
            if where == device and address not in self.living:
                self._add(Allocated(address, nbytes, start, category=category), self.earlier)

    def enter(self, event: Allocation) -> list[tuple[Allocated, int]]:
        """The blocks that an event adds (1) or takes away (-1)."""
        if event.nbytes < 0:
            if event.address not in self.living:  # nobody told of it, but it must have been there from the beginning
                self._add(Allocated(event.address, -event.nbytes, self.start), self.earlier)
            return [(self._take(event.address, event.time), -1)]
        # Living blocks in memory that is given out again were freed unseen.
        first = bisect_left(self.addresses, event.address)
        if first and self.addresses[first - 1] + self.living[self.addresses[first - 1]].nbytes > event.address:
            first -= 1
        overlapping = self.addresses[first : bisect_left(self.addresses, event.address + event.nbytes)]
        gone = [(self._take(address, event.time), -1) for address in overlapping]
        new = Allocated(event.address, event.nbytes, event.time, lane=event.lane)
        self._add(new, self.blocks)
        return [*gone, (new, 1)]

    def _add(self, block: Allocated, blocks: list[Allocated]) -> None:
        blocks.append(block)
        self.living[block.address] = block
        insort(self.addresses, block.address)

    def _take(self, address: int, time: int) -> Allocated:
        block = self.living.pop(address)
        block.end = time
        del self.addresses[bisect_left(self.addresses, address)]
        return block


def _find_origins(nodes: Iterable[Node], blocks: Iterable[Allocated]) -> None:
    """Find for every block the innermost span of its thread at the time; nodes come parents before children."""
    lanes: dict[Lane | None, list[Node]] = {}
    for node in nodes:
        lanes.setdefault(node.span.lane, []).append(node)
    for block in blocks:
        lane = lanes.get(block.lane, [])
        place = bisect_right(lane, block.start, key=lambda node: node.span.start)
        around = lane[place - 1].outwards() if place else iter(())
        block.origin = next((node for node in around if node.end > block.start), None)


def _categorise(trace: Trace, blocks: Iterable[Allocated]) -> None:
    """Give every block its category: the first label given while it lived decides, but a parameter stays one."""
    lives: dict[int, list[Allocated]] = {}
    for each in blocks:
        lives.setdefault(each.address, []).append(each)
        if each.origin is not None and (each.origin.phase == "forward" or each.origin.recomputed):
            each.category = "activations"
    labelled: set[int] = set()
    for time, category, address in sorted(trace.ours.get("marks", ())):
        same = lives.get(address, [])  # in order of start, and no two at once
        place = bisect_right(same, time, key=lambda each: each.start) - 1
        block = same[place] if place >= 0 and same[place].alive(time) else None
        if block is None or id(block) in labelled or category not in CATEGORIES:
            continue
        labelled.add(id(block))
        if block.lane is not None or block.category != "parameters":
            block.category = category
