"""The memory timeline: exact bytes from allocations made by hand, in the picture and in the tables."""

import copy
from collections.abc import Iterable

from cs336_systems.profiling import Trace
from cs336_systems.profiling.memory import (
    CATEGORIES,
    MemoryTimeline,
    filling_peak,
    largest,
    memory_markdown,
    memory_timeline,
)
from cs336_systems.profiling.pictures import thin, write_memory_picture
from cs336_systems.profiling.trace import parse
from tests.support.chrome_events import event as chrome_event

MAIN, OTHER = 1, 2  # threads


def event(time: int, address: int, nbytes: int, total: int = 0, cuda: bool = False, thread: int = MAIN) -> dict:
    args = {"Addr": address, "Bytes": nbytes, "Total Allocated": total, "Device Type": int(cuda)}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": thread, "ts": time / 1000, "args": args}


def span(name: str, start: int, end: int, category: str = "user_annotation") -> dict:
    return chrome_event(name, start / 1000, (end - start) / 1000, (1, MAIN), category)


def made(events: Iterable[dict], held: Iterable = (), marks: Iterable = (), spacing: int = 10**5) -> Trace:
    """A trace in which address n stands for n times the spacing, so that blocks do not overlap."""
    events = copy.deepcopy(list(events))
    for each in events:
        if each["ph"] == "i":
            each["args"]["Addr"] *= spacing
    ours = {
        "held": [[category, address * spacing, nbytes, device] for category, address, nbytes, device in held],
        "marks": [[time, category, address * spacing] for time, category, address in marks],
    }
    return parse({"traceEvents": events, "cs336": ours})


def phase_peaks(memory: MemoryTimeline) -> dict[str, int]:
    """Bytes by phase."""
    return {name: memory.totals[index] for name, index in memory.phase_peaks().items()}


def levels(memory: MemoryTimeline) -> list[dict[str, int]]:
    """Bytes by category at the start and after every event."""
    return [dict(zip(CATEGORIES, amounts, strict=True)) for amounts in memory.amounts]


STEP = [span("step 0", 0, 1000), span("forward", 0, 300), span("backward", 300, 700), span("optimizer", 700, 1000)]


def test_levels_phases_and_peak_of_a_step_made_by_hand():
    held = [["parameters", 1, 100, "cpu"], ["other", 500, 7, "cpu"], ["parameters", 900, 1 << 30, "cuda"]]
    events = [
        event(100, 1000, 40),
        event(200, 2000, 60),
        event(400, 3000, 30),  # the gradient
        event(500, 4000, 25),  # a temporary
        event(550, 4000, -25),
        event(600, 1000, -40),
        event(650, 2000, -60),
        event(750, 5000, 80),  # the optimizer's state
        event(900, 3000, -30),
    ]
    marks = [[450, "gradients", 3000], [950, "optimizer state", 5000]]
    trace = made([*STEP, *events], held, marks)
    found = memory_timeline(trace)
    assert found.device == "cpu"
    assert found.peak == 107 + 40 + 60 + 30 + 25
    assert found.times[found.peak_index] == 500
    assert [*found.at_peak.values()] == [100, 30, 0, 100, 7 + 25]
    assert found.totals == [107, 147, 207, 237, 262, 237, 197, 137, 217, 187]
    assert found.times == [0, 100, 200, 400, 500, 550, 600, 650, 750, 900]
    assert levels(found)[-1]["optimizer state"] == 80
    assert levels(found)[-1]["gradients"] == 0
    assert phase_peaks(found) == {"forward": 207, "backward": 262, "optimizer": 217}
    spans = [span("step 0", 0, 150), span("forward", 0, 100), span("step 1", 150, 400), span("forward", 200, 300)]
    trace = made([*spans, event(50, 1, 10), event(120, 1, -10), event(250, 2, 3)])
    found = memory_timeline(trace)
    assert phase_peaks(found) == {"forward": 10}, "the highest over the steps"
    text = memory_markdown(trace, found)
    assert "| forward | 10 | 10 B |" in text
    assert "| whole profile | 10 | 10 B |" in text


def test_a_window_counts_the_level_at_its_start_and_what_happens_at_its_end():
    found = memory_timeline(made([event(100, 1, 10), event(200, 2, 5), event(300, 1, -10), event(400, 3, 2)]))
    peaks = {(150, 160): 10, (250, 350): 15, (300, 399): 5, (300, 400): 7, (0, 50): 0, (0, 10**6): found.peak}
    assert {window: found.totals[found.highest_in(*window)] for window in peaks} == peaks


def test_a_mark_colours_only_the_block_that_is_alive_then():
    events = [event(100, 64, 10), event(200, 64, -10), event(300, 64, 20), event(400, 64, -20), event(500, 64, 30)]
    found = memory_timeline(
        made([span("forward", 0, 1000), *events], marks=[[350, "gradients", 64], [450, "gradients", 64]])
    )
    assert [block.category for block in found.blocks] == ["activations", "gradients", "activations"]
    assert [block.alive(found.times.index(300)) for block in found.blocks] == [False, True, False]
    # Marked later, when it is somebody else's, or as something unknown.
    marks = [[200, "gradients", 64], [320, "no such thing", 64], [340, "optimizer state", 64], [350, "gradients", 64]]
    found = memory_timeline(made([span("forward", 0, 1000), *events], marks=marks))
    assert [block.category for block in found.blocks] == ["activations", "optimizer state", "activations"]
    # What was held keeps its category if it was a parameter.
    held = [["parameters", 1, 10, "cpu"], ["other", 2, 5, "cpu"]]
    found = memory_timeline(made([event(100, 3, 1)], held, [[50, "gradients", 1], [50, "gradients", 2]]))
    assert [*found.at_peak.values()] == [10, 5, 0, 0, 1]


def test_memory_whose_address_is_used_again_was_freed_unseen():
    held = [["gradients", 1000, 100, "cpu"], ["parameters", 2000, 50, "cpu"]]
    # The first lies across the end of what was held, the second starts before it, the third touches and no more.
    for address, nbytes, gone in [(1090, 20, 100), (990, 20, 100), (1100, 20, 0), (980, 20, 0), (990, 1015, 150)]:
        found = memory_timeline(made([event(10, address, nbytes)], held, spacing=1))
        assert found.totals == [150, 150 + nbytes - gone], address
    # The total of a CPU's allocator goes on from profile to profile of a process: it is not used.
    found = memory_timeline(made([event(10, 64, 8, 3_000_008), event(20, 64, 16), event(30, 64, -16, 3_000_000)]))
    assert found.totals == [0, 8, 16, 0]
    assert found.times[found.blocks[0].last] == 20


def test_memory_freed_without_an_allocation_was_there_from_the_start():
    held = [["gradients", 1, 100, "cpu"]]
    found = memory_timeline(made([event(10, 50, 7), event(20, 2, -30), event(30, 1, -100)], held))
    assert found.totals == [130, 137, 107, 7]
    assert [*levels(found)[0].values()] == [0, 100, 0, 0, 30]
    # An earlier profile of the same process left it another size in torch's books: what was held counts.
    assert memory_timeline(made([event(30, 1, -64)], held)).totals == [100, 0]


def test_on_a_gpu_the_allocators_sum_rules():
    held = [["parameters", 1, 1000, "cuda"], ["gradients", 2, 100, "cuda"], ["parameters", 3, 9999, "cpu"]]
    events = [
        event(10, 50, 512, 4096 + 512, cuda=True),
        event(15, 60, 123, 123),  # the CPU's
        event(20, 2, -512, 4096, cuda=True),  # 100 bytes, as the allocator rounds them
        event(30, 77, -1024, 3072, cuda=True),  # unknown
        event(40, 51, 2048, 5120, cuda=True),
        event(50, 50, -512, 4608, cuda=True),
    ]
    found = memory_timeline(made(events, held, [[45, "optimizer state", 51]]))
    assert found.device == "cuda"
    assert found.totals == [4096, 4608, 4096, 3072, 5120, 4608]  # to the byte what max_memory_allocated saw
    assert [*levels(found)[0].values()] == [1000, 100, 0, 0, 4096 - 1100]
    assert [*found.at_peak.values()] == [1000, 0, 2048, 0, 5120 - 3048]
    assert memory_timeline(made(events, held), "cpu").totals == [9999, 9999 + 123]
    # The sums of two GPUs are added up.
    events = [event(10, 1, 512, 4608, cuda=True), event(20, 2, 1024, 1024, cuda=True)]
    events += [event(30, 3, 512, 5120, cuda=True), event(40, 2, -1024, 0, cuda=True)]
    for each, number in zip(events, (0, 1, 0, 1), strict=True):
        each["args"]["Device Id"] = number
    assert memory_timeline(made(events)).totals == [4096, 4608, 5632, 6144, 5120]


def test_recomputation_in_backward_makes_activations_and_other_threads_none():
    engine = span("autograd::engine::evaluate_function: CheckpointBackward", 410, 600, "cpu_op")
    events = [
        event(450, 1, 10),
        event(510, 2, 20),
        event(610, 3, 40),
        event(520, 4, 80, thread=OTHER),
        event(150, 5, 160),
        event(160, 6, 320, thread=OTHER),
        event(1100, 7, 640),
    ]
    trace = made([*STEP, engine, span("blocks.3.norm (RMSNorm)", 500, 590), *events])
    found = memory_timeline(trace)
    categories = {block.nbytes: block.category for block in found.blocks}
    assert [nbytes for nbytes, category in categories.items() if category == "activations"] == [160, 20]
    assert set(categories.values()) == {"activations", "other"}
    sources = {source.nbytes: source for source in largest(found)}
    assert sources[20].module == "blocks.*.norm, recomputed"
    assert sources[20].phase == "backward"
    assert sources[320].phase == "forward"
    assert sources[640].phase == "between phases"


def test_a_trace_without_phases_shows_those_that_its_operators_give_away():
    spans = [
        span("model (Net)", 0, 100),
        span("autograd::engine::evaluate_function: A", 150, 200, "cpu_op"),
        span("autograd::engine::evaluate_function: B", 210, 260, "cpu_op"),
        span("Optimizer.step#SGD.step", 300, 400),
        span("Optimizer.step#SGD.step", 310, 390),
        span("aten::item", 450, 460, "cpu_op"),
    ]
    found = memory_timeline(made([*spans, event(50, 1, 5), event(155, 2, 9), event(350, 3, 1)]))
    assert [(each.name, each.start, each.end) for each in found.phases] == [
        ("forward", 0, 100),
        ("backward", 150, 260),
        ("optimizer", 300, 400),
    ]
    assert [block.category for block in found.blocks] == ["activations", "other", "other"]


def test_sources_say_where_alike_allocations_come_from():
    spans = [
        *STEP,
        span("blocks.0.attention (SelfAttention)", 10, 100),
        span("aten::softmax", 20, 90, "cpu_op"),
        span("aten::empty_like", 25, 80, "cpu_op"),
        span("aten::empty_strided", 26, 79, "cpu_op"),
        span("blocks.1.attention (SelfAttention)", 110, 200),
        span("aten::softmax", 120, 190, "cpu_op"),
        span("autograd::engine::evaluate_function: MmBackward0", 310, 400, "cpu_op"),
        span("launch all-reduce 0#3 bucket 1", 410, 450),
    ]
    events = [event(50, 1, 64), event(150, 2, 64), *(event(160 + i, 10 + i, 32) for i in range(3))]
    events += [event(350, 4, 48), event(420, 5, 8)]
    found = memory_timeline(made([*spans, *events], [["parameters", 1 << 20, 200, "cpu"]]))
    by_total = filling_peak(found)
    assert [(each.nbytes, each.count) for each in by_total] == [(200, 1), (64, 2), (32, 3), (48, 1), (8, 1)]
    alike = by_total[1]
    assert (alike.phase, alike.module, alike.operator) == ("forward", "blocks.*.attention", "aten::softmax")
    assert (by_total[0].phase, by_total[0].category) == ("before profiling", "parameters")
    assert (by_total[3].operator, by_total[3].phase) == ("MmBackward0", "backward")
    assert by_total[4].operator == "launch all-reduce bucket 1"
    assert [each.nbytes for each in largest(found, 2)] == [64, 48]
    text = memory_markdown(made([*spans, *events]), found)
    assert "| 2 x 64 | 128 B | 26.7% | activations | forward | blocks.\\*.attention | aten::softmax |" in text
    assert "Peak 480 B (480 bytes)" in text
    assert "in backward of step 0" in text


def test_the_picture_keeps_every_columns_highest_level():
    events = []
    for i in range(500):  # a spike of one nanosecond among many small ones
        events += [event(2 * i, 64, 1000 if i == 321 else 10 + i % 7), event(2 * i + 1, 64, -1000)]
    found = memory_timeline(made(events))
    columns = thin(found, 20, found.times[-1])
    assert len(columns) <= 21
    assert max(found.totals[index] for _, index in columns) == found.peak == 1000
    assert {found.totals[index] for column, index in columns} == {16, 1000}
    flat = memory_timeline(made([event(0, 1, 5), event(500_000, 2, 6), event(10**6, 3, 7)]))
    times = [time - flat.times[0] for time, _ in thin(flat, 1000, flat.times[-1])]
    assert [round(time / 1000) for time in times] == [0, 499, 999, 1000], "a column has both its ends"


def test_a_trace_without_allocations_has_tables_that_say_so_and_no_picture(tmp_path):
    assert write_memory_picture(made(STEP), tmp_path / "memory.svg") == []
    assert "profile_memory=True" in memory_markdown(made(STEP), memory_timeline(made(STEP)))
    assert memory_timeline(made([])).peak == 0
