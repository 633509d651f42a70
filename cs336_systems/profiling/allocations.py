"""The memory timeline: how many bytes of each category were alive at every moment, added up from allocations.

On a CPU the allocator's events are added to what was held when profiling began; torch does not report that such memory
is freed, unless by using its address again. On a GPU the allocator's own sum rules: it rounds every block up (to 512
bytes), and what the known blocks do not explain is `other`.

An allocation is a parameter, a gradient or optimizer state if somebody marked it so; otherwise an activation if it was
made in a forward pass (also one that backward runs again), and other, such as a temporary of backward, if it was not.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cs336_systems.profiling.attribution import PHASES, Placed, attribute
from cs336_systems.profiling.held import CATEGORIES
from cs336_systems.profiling.memo import of_ranks
from cs336_systems.profiling.names import step_number
from cs336_systems.profiling.trace import Allocation, Lane, Trace

OTHER = CATEGORIES.index("other")


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
    origin: Placed | None = None

    def alive(self, time: int) -> bool:
        """Whether it was allocated and not yet freed."""
        return self.start <= time and (self.end is None or time < self.end)


@dataclass(frozen=True)
class Period:
    """A phase or a step: [start, end) in nanoseconds."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Bytes alive on one device. `amounts[i]`, by category in the order of CATEGORIES, hold from `times[i]` on.

    `blocks` are the allocations of the trace in order, `earlier` what was there before.
    """

    device: str
    times: list[int]
    amounts: list[tuple[int, ...]]
    blocks: list[Allocated]
    earlier: list[Allocated]
    phases: list[Period]
    steps: list[Period]

    @cached_property
    def totals(self) -> list[int]:
        """Bytes alive, all categories together."""
        return [sum(amounts) for amounts in self.amounts]

    @property
    def levels(self) -> list[tuple[int, dict[str, int]]]:
        """(nanoseconds, bytes by category) at the start and after every event."""
        return [(time, self.composition(i)) for i, time in enumerate(self.times)]

    @property
    def before(self) -> int:
        """Bytes alive when profiling began."""
        return self.totals[0]

    @cached_property
    def peak_index(self) -> int:
        """Which level is the highest, the first of several."""
        return self.totals.index(max(self.totals))

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once."""
        return self.totals[self.peak_index]

    @property
    def peak_time(self) -> int:
        """When that was."""
        return self.times[self.peak_index]

    @property
    def at_peak(self) -> dict[str, int]:
        """What the peak consists of, in bytes by category."""
        return self.composition(self.peak_index)

    def composition(self, index: int) -> dict[str, int]:
        """One level in bytes by category."""
        return dict(zip(CATEGORIES, self.amounts[index], strict=True))

    def index_at(self, time: int) -> int:
        """Which level held at a moment, after everything that happened then; before the start, the first."""
        return max(0, bisect_right(self.times, time) - 1)

    def highest_in(self, start: int, end: int) -> int:
        """Which level was the highest at any moment in [start, end], the one that held at its start included."""
        window = range(self.index_at(start), self.index_at(end) + 1)
        return max(window, key=lambda i: (self.totals[i], -i))

    def peak_in(self, start: int, end: int) -> int:
        """The most bytes alive at any moment in [start, end]."""
        return self.totals[self.highest_in(start, end)]

    def alive(self, time: int) -> list[Allocated]:
        """The blocks that were alive at a moment, the earlier first."""
        return [block for block in (*self.earlier, *self.blocks) if block.alive(time)]


def timeline(trace: Trace, device: str | None = None) -> Timeline:
    """The memory of a rank over time on `device`, cpu or cuda; by default cuda if anything was allocated there."""
    if device is None:
        device = "cuda" if any(each.device == "cuda" for each in trace.allocations) else "cpu"
    return of_ranks([trace], f"memory, {device}", lambda: _timeline(trace, device))


def _timeline(trace: Trace, device: str) -> Timeline:
    events = [each for each in trace.allocations if each.device == device and each.nbytes]
    placed = attribute(trace)
    beginnings = [span.start for span in trace.spans[:1]] + [event.time for event in events[:1]]
    beginnings += [time for time, _, _ in trace.ours.get("marks", ())]
    ledger = _Ledger(trace, device, min(beginnings, default=0))
    changes = [ledger.enter(event) for event in events]
    _find_origins(placed, ledger.blocks)
    _colour(trace, ledger)
    times, amounts = _add_up(ledger, events, changes)
    annotated = [span for span in trace.spans if span.category == "user_annotation"]
    steps = [Period(span.name, span.start, span.end) for span in annotated if step_number(span.name) is not None]
    return Timeline(device, times, amounts, ledger.blocks, ledger.earlier, _find_phases(trace, placed), steps)


def phase_peaks(trace: Trace, timeline: Timeline, step: str | None = None) -> dict[str, int]:
    """The most bytes alive during each phase, by its name, in order: over all steps, or in one, `step 0`."""
    inside = [each for each in timeline.steps if each.name == step]
    found: dict[str, int] = {}
    for phase in timeline.phases:
        if step is None or any(each.start <= phase.start and phase.end <= each.end for each in inside):
            found[phase.name] = max(found.get(phase.name, 0), timeline.peak_in(phase.start, phase.end))
    return found


class _Ledger:
    """Matches what is freed with what was allocated."""

    def __init__(self, trace: Trace, device: str, start: int) -> None:
        self.start = start
        self.blocks: list[Allocated] = []
        self.earlier: list[Allocated] = []
        self.living: dict[int, Allocated] = {}
        self.addresses: list[int] = []  # of the living, in order
        for category, address, nbytes, where in trace.ours.get("held", ()):
            if where == device and address not in self.living:
                self.earlier.append(Allocated(address, nbytes, start, category=category))
                self._add(self.earlier[-1])

    def enter(self, event: Allocation) -> list[tuple[Allocated, int]]:
        """What an event adds (1) or takes away (-1)."""
        if event.nbytes < 0:
            block = self._take(event.address, event.time)
            if block is None:  # nobody told of it, but it must have been there from the beginning
                block = Allocated(event.address, -event.nbytes, self.start, event.time)
                self.earlier.append(block)
            return [(block, -1)]
        new = Allocated(event.address, event.nbytes, event.time, lane=event.lane)
        gone = [self._take(address, event.time) for address in self._overlapping(event.address, event.nbytes)]
        self.blocks.append(new)
        self._add(new)
        return [*((block, -1) for block in gone if block is not None), (new, 1)]

    def _overlapping(self, address: int, nbytes: int) -> list[int]:
        """Where the living lie in memory that is given out again: they were freed unseen."""
        first = bisect_left(self.addresses, address)
        if first and self.addresses[first - 1] + self.living[self.addresses[first - 1]].nbytes > address:
            first -= 1
        return self.addresses[first : bisect_left(self.addresses, address + nbytes)]

    def _add(self, block: Allocated) -> None:
        self.living[block.address] = block
        insort(self.addresses, block.address)

    def _take(self, address: int, time: int) -> Allocated | None:
        block = self.living.pop(address, None)
        if block is not None:
            block.end = time
            del self.addresses[bisect_left(self.addresses, address)]
        return block


def _find_origins(placed: Sequence[Placed], blocks: Iterable[Allocated]) -> None:
    """For every block the innermost span of its thread at the time; spans come parents before children."""
    spans: dict[Lane, list[Placed]] = {}
    for each in placed:
        spans.setdefault(each.lane, []).append(each)
    reached = dict.fromkeys(spans, 0)
    stacks: dict[Lane, list[Placed]] = {lane: [] for lane in spans}
    for block in blocks:
        if block.lane is None or block.lane not in spans:
            continue
        lane, stack = spans[block.lane], stacks[block.lane]
        while reached[block.lane] < len(lane) and lane[reached[block.lane]].span.start <= block.start:
            stack.append(lane[reached[block.lane]])
            reached[block.lane] += 1
        while stack and stack[-1].node.end <= block.start:
            stack.pop()
        block.origin = stack[-1] if stack else None


def _colour(trace: Trace, ledger: _Ledger) -> None:
    """Give every block its category: the first mark made while it lived decides, but a parameter stays one."""
    lives: dict[int, list[Allocated]] = {}
    for each in (*ledger.earlier, *ledger.blocks):
        lives.setdefault(each.address, []).append(each)
        if _is_activation(each.origin):
            each.category = "activations"
    marked: set[int] = set()
    for time, category, address in sorted(trace.ours.get("marks", ())):
        same = lives.get(address, [])  # in order of start, and no two at once
        place = bisect_right(same, time, key=lambda each: each.start) - 1
        block = same[place] if place >= 0 and same[place].alive(time) else None
        if block is None or id(block) in marked or category not in CATEGORIES:
            continue
        marked.add(id(block))
        if block.lane is not None or block.category != "parameters":
            block.category = category


def _is_activation(origin: Placed | None) -> bool:
    if origin is None:
        return False
    recomputed = origin.phase == "backward" and origin.direction == "forward" and bool(origin.modules)
    return origin.phase == "forward" or recomputed


def _add_up(
    ledger: _Ledger, events: Sequence[Allocation], changes: Sequence[list[tuple[Allocated, int]]]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The times and the bytes by category from then on."""
    place = {category: i for i, category in enumerate(CATEGORIES)}
    now = [0] * len(CATEGORIES)
    # Where no GPU has a sum of its own, torch's adds up all profiles of a process.
    trusted = [event.total for event in events if event.device == "cuda"]

    def agree(total: int) -> None:
        now[OTHER] = max(0, total - sum(now) + now[OTHER])

    for block in ledger.earlier:
        now[place.get(block.category, OTHER)] += block.nbytes
    if trusted:
        agree(trusted[0] - events[0].nbytes)
    times, amounts = [ledger.start], [tuple(now)]
    for i, (event, changed) in enumerate(zip(events, changes, strict=True)):
        for block, sign in changed:
            now[place.get(block.category, OTHER)] += sign * block.nbytes
        if trusted:
            agree(trusted[i])
        times.append(event.time)
        amounts.append(tuple(now))
    return times, amounts


def _find_phases(trace: Trace, placed: Sequence[Placed]) -> list[Period]:
    """The phases that were annotated; in a trace without, those that operators give away, run together."""
    named = [s for s in trace.spans if s.name in PHASES and s.category == "user_annotation"]
    if named:
        return [Period(span.name, span.start, span.end) for span in named]
    found: list[Period] = []
    for each in sorted(_outermost(placed), key=lambda each: each.span.start):
        if found and found[-1].name == each.phase:
            found[-1] = Period(each.phase, found[-1].start, max(found[-1].end, each.span.end))
        else:
            found.append(Period(each.phase, each.span.start, each.span.end))
    return found


def _outermost(placed: Sequence[Placed]) -> Iterator[Placed]:
    phase = {id(each.node): each.phase for each in placed}
    for each in placed:
        parent = each.node.parent
        if each.phase != "other" and (parent is None or phase[id(parent)] == "other"):
            yield each
