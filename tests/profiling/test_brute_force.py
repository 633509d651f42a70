"""Times of random traces: sums over the nested spans equal a look at what runs in every microsecond."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from cs336_systems.profiling.breakdown import part_rows
from cs336_systems.profiling.flame import flames
from cs336_systems.profiling.merge import merge
from cs336_systems.profiling.operators import OUTSIDE, op_rows
from cs336_systems.profiling.overlap import overlap
from cs336_systems.profiling.tables import phase_times
from cs336_systems.profiling.timeline import phase_at
from cs336_systems.profiling.trace import Trace
from tests.support.chrome_events import GLOO, MAIN, event, tag, trace
from tests.support.merged_trace import validate

MORE, GLOOS, END = (1, 3), (GLOO, (1, 4)), 200  # a second thread that computes; gloo's two; microseconds
PHASES = ("forward", "backward", "optimizer", "synchronise")
ROWS = dict.fromkeys((*PHASES, "step 0", "model (Net)", "blocks.0 (Block)"), OUTSIDE)
ROWS |= {"wait all-reduce 0#1 x": "wait all-reduce", "launch all-reduce 0#1 x": "launch all-reduce"}
WORK = ("aten::mm", "aten::add", "aten::copy_")  # would launch a kernel
ALLOCATION = "aten::empty"  # nothing counts inside
OPERATORS = (*WORK, ALLOCATION, "aten::view", "aten::slice", "aten::to", "c10d::allreduce_", "mylib::op")


def nested(rng: random.Random, start: int, end: int, lane: tuple[int, int], depth: int = 0) -> Iterator[dict]:
    while start < end and depth < 5 and rng.random() < 0.7:
        first = rng.randint(start, end)
        last = rng.randint(first, end)
        make, names = (event, OPERATORS) if rng.random() < 0.5 else (tag, [*ROWS])
        yield make(rng.choice(names), first, last - first, lane)
        yield from nested(rng, first, last, lane, depth + 1)
        start = max(last, start + 1)


def on_gloos_thread(rng: random.Random, lane: tuple[int, int]) -> Iterator[dict]:
    start = 0
    while start < END:
        start, end = sorted((rng.randint(start, END), rng.randint(start, END)))
        yield from (tag("gloo:all_reduce", start, end - start, lane), event("aten::mm", start, end - start, lane))
        start = end + 1


def looks(found: Trace) -> Iterator[tuple[tuple, int, list[str]]]:
    """(lane, microsecond, names of the spans around it, from the outermost inwards)."""
    for lane, spans in found.lanes("cpu_op", "user_annotation").items():
        for time in range(END):
            names = [span.name for span in spans if span.start <= 1000 * time < span.end]
            if names:
                yield lane, time, names


def computes(names: list[str]) -> bool:
    if any(ROWS.get(name, OUTSIDE) != OUTSIDE for name in names):
        return False
    counted = [name for name in names if name in (*WORK, ALLOCATION)]
    return bool(counted) and counted[0] != ALLOCATION


@pytest.mark.parametrize("seed", range(16))
def test_sums_are_those_of_every_microsecond(seed):
    rng = random.Random(seed)
    threads = [*nested(rng, 0, END, MAIN), *nested(rng, 0, END // 2, MORE)]
    events = [tag("step 0", 0, END), *threads, *(each for lane in GLOOS for each in on_gloos_thread(rng, lane))]
    rng.shuffle(events)
    found = trace(*events)
    own, total, phases = Counter[str](), Counter[str](), Counter[str]()
    busy, communicating, computing = 0, set(), set()
    for lane, time, names in looks(found):
        busy += 1000
        if lane in GLOOS:
            communicating.add(time)
            continue
        own[ROWS.get(names[-1], names[-1])] += 1000
        total.update({ROWS.get(name, name): 1000 for name in names})
        phases.update({name: 1000 for name in names if name in PHASES})
        computing |= {time} if computes(names) else set()
    rows = [row for row in op_rows(found) if row.cpu_total]
    assert {row.name: row.cpu_self for row in rows if row.cpu_self} == own
    assert {row.name: row.cpu_total for row in rows} == total | {OUTSIDE: own[OUTSIDE]}
    assert sum(row.total for row in part_rows(found)) == own.total()
    assert sum(root.total for root in flames(found)) == busy
    assert +phase_times(found) == phases
    hidden = overlap(found)
    assert (hidden.communication, hidden.overlapped) == tuple(
        1000 * len(each) for each in (communicating, communicating & computing)
    )
    assert validate(merge([found])).problems == []
    spans = [span for span in found.annotated if span.name in PHASES and span.lane == MAIN]
    phase_of = phase_at(spans)
    for time in range(0, 1000 * END, 500):
        assert phase_of(time) == next((s.name for s in reversed(spans) if s.start <= time < s.end), "other")
