"""The picture of a step: what is drawn, where, and in which words."""

from pathlib import Path

import pytest

from cs336_systems.profiling.collectives import flights
from cs336_systems.profiling.intervals import length, union
from cs336_systems.profiling.overlap import last_starts
from cs336_systems.profiling.pictures import WIDTH
from cs336_systems.profiling.timeline_picture import FILLS, StepTracks, steps_of, write_timeline
from cs336_systems.profiling.trace import Trace, read_trace, trace_files
from tests.profiling.test_overlap import FIXTURE, GLOO, event, kernel, trace
from tests.support.svg_shapes import placed_texts, shapes, texts

STEP = [
    event("step 0", 0, 10),
    event("gloo:all_reduce", 2, 6, GLOO),
    event("step 1", 100, 300),
    event("forward", 100, 150),
    event("blocks.0 (TransformerBlock)", 110, 140),
    event("aten::mm", 112, 130),
    event("backward", 150, 220),
    event("aten::mm", 160, 168),
    event("aten::mm", 174, 210),
    event("launch all-reduce 0#1 bucket 0, from head.weight", 170, 172),
    event("c10d::allreduce_", 171, 172),
    event("gloo:all_reduce", 180, 230, GLOO),
    event("synchronise", 220, 240),
    event("wait all-reduce 0#1 bucket 0, from head.weight", 225, 231),
    event("launch all-gather 0#2 blocks.0.up.weight", 240, 242),
    event("gloo:recv", 241, 259),
    event("wait all-gather 0#2 blocks.0.up.weight", 250, 260),
    event("aten::mm", 262, 270),
]


def figures(tracks: StepTracks) -> tuple[int, int, int]:
    """Nanoseconds of communication, of it overlapped, and in waits."""
    waits = union((wait.start, wait.end) for wait in tracks.waits)
    return length(tracks.communicating), length(tracks.overlapped), length(waits)


def drawn(tmp_path: Path, *traces: Trace) -> str:
    (path,) = write_timeline(traces, tmp_path / "new" / "timeline.svg")
    svg = path.read_text()
    assert all(0 <= each.left <= each.right <= WIDTH for each in shapes(svg)), "nothing is drawn outside"
    assert all(x + 0.6 * size * len(said) <= WIDTH for x, _, size, said in placed_texts(svg))
    return svg


def test_flights_of_every_backend():
    before, queued, posted = flights(trace(*STEP))
    assert (before.start, before.launch) == (2000, None)
    assert (queued.verb, queued.number, queued.label) == ("all-reduce", "0#1", "bucket 0, from head.weight")
    assert [span.name for span in queued.transfers] == ["gloo:all_reduce"]
    assert (queued.start, queued.end, queued.posted) == (170_000, 231_000, False)
    assert [span.name for span in posted.transfers] == ["gloo:recv"]
    assert (posted.start, posted.end, posted.posted) == (240_000, 260_000, True)
    for path in trace_files(FIXTURE):
        found = flights(read_trace(path))
        assert [(f.verb, f.label, len(f.transfers)) for f in found] == [
            ("all-reduce", "bucket 0, from down.weight", 1),
            ("all-reduce", "bucket 1, from up.weight", 1),
        ]
        assert found[0].transfers[0].end < found[1].transfers[0].start
    spans = [kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 10, 20, 20), event("gloo:all_to_all", 0, 5, GLOO)]
    found = [(f.verb, f.start, f.end) for f in flights(trace(*spans))]
    assert found == [("all-to-all", 0, 5000), ("reduce-scatter", 10_000, 20_000)], "without annotations"


def test_a_queue_is_first_in_first_out():
    spans = [event("c10d::allreduce_", 1, 2), event("gloo:all_reduce", 3, 20, GLOO)]
    spans += [event("launch broadcast 0#7 buffer", 4, 9), event("c10d::broadcast_", 5, 8)]
    spans += [event("c10d::send", 2, 3), event("gloo:broadcast", 20, 30, GLOO)]
    spans += [event("c10d::allreduce_", 12, 13), event("gloo:all_reduce", 32, 40, GLOO)]
    unknown, known, later = flights(trace(*spans))
    assert (later.label, later.launch) == ("", None)
    assert (unknown.verb, unknown.label, unknown.launch) == ("all-reduce", "", None)
    assert (known.label, known.transfers[0].name, known.wait) == ("buffer", "gloo:broadcast", None)
    assert known.end == 30_000


def collective(number: str, start: float, size: int, transfer: tuple[float, float, int], wait: float | None) -> list:
    """A collective whose label is its number: its launch, what gloo's thread did for it, and when its wait was over."""
    name = f"all-reduce {number} {number}"
    call = event("c10d::allreduce_", start + 1, start + 2, **{"Input Dims": [[[size]], []]})
    begin, end, thread = transfer
    ran = event("gloo:all_reduce", begin, end, thread, **{"Input Dims": [[size]], "ran": number})
    waited = [] if wait is None else [event(f"wait {name}", start + 4, wait)]
    return [event(f"launch {name}", start, start + 3), call, ran, *waited]


def assert_told_apart(*collectives: list) -> None:
    found = flights(trace(*[each for events in collectives for each in events]))
    assert {flight.label: [span.args["ran"] for span in flight.transfers] for flight in found} == {
        events[0]["name"].split()[-1]: [events[0]["name"].split()[-1]] for events in collectives
    }


def test_collectives_are_told_apart_by_shape_and_thread():
    """Two threads of a group swap. Group 0's are busy, so its third waits, while group 1 runs a later one at once."""
    assert_told_apart(collective("0#1", 0, 8, (21, 30, 2), 90), collective("0#2", 10, 16, (20, 40, 3), 95))
    big = [collective("0#1", 0, 99, (4, 60, 2), None), collective("0#2", 10, 99, (14, 70, 3), None)]
    first = collective("1#1", 20, 5, (24, 26, 4), None)
    small = [collective("0#3", 30, 8, (61, 65, 2), None), collective("1#2", 40, 8, (44, 50, 4), None)]
    assert_told_apart(*big, first, *small)
    # What was launched before the profile takes no call.
    args = {"Input Dims": [[8]]}
    before = [event("gloo:all_reduce", 0, 50, GLOO, **args), event("gloo:all_reduce", 5, 60, 3, **args)]
    mine = collective("0#9", 10, 8, (61, 70, GLOO), 72)
    assert [flight.start for flight in flights(trace(*before, *mine)) if not flight.launch] == [0, 5000]


def test_types_tell_apart_where_the_call_says_them():
    def one(number, start, begin, kind):
        args = {"Input Dims": [[16], [8], []], "Input type": [kind, kind, ""]}
        ran = {"Input Dims": [[8]], "Input type": [kind], "ran": number}
        return [
            event(f"launch all-gather {number} {number}", start, start + 3),
            event("c10d::_allgather_base_", start + 1, start + 2, **args),
            event("gloo:all_gather", begin, begin + 5, int(begin), **ran),
        ]

    assert_told_apart(one("0#1", 0, 30, "float"), one("1#1", 10, 20, "c10::BFloat16"))


def test_launches_of_two_threads_are_kept_apart():
    spans = [event("launch all-reduce 0#1 mine", 0, 10), event("launch all-reduce 0#2 theirs", 1, 9, thread=5)]
    spans += [event("c10d::allreduce_", 3, 4, thread=5), event("gloo:all_reduce", 12, 20, GLOO)]
    assert [(f.label, len(f.transfers)) for f in flights(trace(*spans))] == [("mine", 0), ("theirs", 1)]
    asked = event("cudaLaunchKernel", 5, 6, 5, "cuda_runtime", correlation=3)
    ran = event("ncclDevKernel_AllReduce(x)", 12, 20, 20, "kernel", correlation=3, stream=20)
    assert [(f.label, len(f.transfers)) for f in flights(trace(*spans[:2], asked, ran))] == [("mine", 0), ("theirs", 1)]


def test_the_tracks_of_a_step():
    found = StepTracks(trace(*STEP), 1, {})
    names, tracks = [name for name, _ in found.tracks], dict(found.tracks)
    assert names == ["phase", "block", "operators", "waits", "collectives", "overlap"]
    assert [(p.name, p.start) for p in tracks["phase"]] == [
        ("forward", 100_000),
        ("backward", 150_000),
        ("synchronise", 220_000),
    ]
    assert [(b.name, b.start, b.end) for b in tracks["block"]] == [("blocks.0", 110_000, 140_000)]
    assert [(b.kind, b.start) for b in tracks["operators"]] == [
        ("forward", 112_000),
        ("backward", 160_000),
        ("backward", 174_000),
        ("other", 262_000),
    ]
    assert [(b.kind, b.start, b.end, b.posted) for b in tracks["collectives"]] == [
        ("all-reduce", 180_000, 230_000, False),
        ("all-gather", 240_000, 260_000, True),
    ]
    assert found.launches == [170_000, 240_000]
    assert figures(found) == (68_000, 30_000, 16_000)
    traces = [read_trace(path) for path in trace_files(FIXTURE)]
    first, second = (StepTracks(each, 0, last_starts(traces)) for each in traces)
    kinds = [bar.kind for bar in dict(first.tracks)["stream 7"]]
    assert kinds == ["forward"] * 4 + ["backward"] * 5 + ["optimizer"]
    # Clocks are not aligned here: rank 1's is 5 us ahead.
    assert [bar.joined - bar.start for bar in (*first.collectives, *second.collectives)] == [65_250, 65_250, 0, 0]
    assert figures(first) == (560_000, 258_500, 30_000)


def test_steps(tmp_path):
    assert steps_of(trace(*STEP)) == {0: (0, 10_000), 1: (100_000, 300_000)}
    assert steps_of(trace(event("ProfilerStep#7", 1, 3))) == {7: (1000, 3000)}
    assert steps_of(trace(event("aten::mm", 5, 9), event("aten::add", 2, 6))) == {0: (2000, 9000)}
    both = [trace(event("step 0", 0, 1), event("step 1", 1, 2)), trace(event("step 0", 0, 1))]
    assert "Step 0 on 2 ranks: computation and communication" in drawn(tmp_path, *both)
    assert write_timeline([trace()], tmp_path / "timeline.svg") == []


def test_shapes_lie_at_their_times(tmp_path):
    svg = drawn(tmp_path, trace(*STEP))
    # A tooltip of a collective has a colon of its own only after the label.
    found = {each.tooltip.split(":")[0]: each for each in shapes(svg)}
    scale = (found["backward"].right - found["forward"].left) / 120

    def at(time):
        return found["forward"].left + (time - 100) * scale

    expected = {
        "forward": (100, 150),
        "backward": (150, 220),
        "all-reduce 0#1 bucket 0, from head.weight": (180, 230),
        "all-gather 0#2 blocks.0.up.weight": (240, 260),
        "blocks.0": (110, 140),
        "exposed": (241, 259),
    }
    for name, (start, end) in expected.items():
        assert (found[name].left, found[name].right) == pytest.approx((at(start), at(end)), abs=0.02), name
    assert found["all-gather 0#2 blocks.0.up.weight"].fill == FILLS["all-gather"]
    assert found["blocks.0"].top > found["forward"].bottom, "one track below the other"
    said = texts(svg)
    assert {"forward", "backward", "synchronise", "blocks.0", "bucket 0", "time in ms"} <= {*said}
    assert "rank 0: 44.1 % overlapped, communication ≤ 0.068 ms, exposed ≤ 0.038 ms, CPU in waits = 0.016 ms" in said
    assert {"ended here or earlier", "launch of a collective", "CPU thread waits", "overlapped", "exposed"} <= {*said}
    assert "Step 1 on 1 rank: computation and communication" in said
    assert "BucketedDDP, step 1 on 1 rank" in drawn(tmp_path, trace(*STEP, wrapper="BucketedDDP"))
    assert svg == drawn(tmp_path, trace(*STEP, wrapper="none")), "the same every time"
    assert "pattern" in svg, "hatches have names that a salt makes"


def test_labels_are_written_where_they_fit(tmp_path):
    def block(name, start, end):
        return event(f"{name} (TransformerBlock)", start, end)

    blocks = [block("layers.7", 0, 500), block("layers.8", 510, 530), block("layers.9", 540, 541)]
    said = texts(drawn(tmp_path, trace(event("step 0", 0, 1000), event("forward", 0, 1000), *blocks)))
    names = {name for number in "789" for name in (number, f"layers.{number}")}
    assert [words for words in said if words in names] == ["layers.7", "8"]


def test_the_fixtures_picture(tmp_path):
    found = drawn(tmp_path, *(read_trace(path) for path in trace_files(FIXTURE)))
    said = texts(found)
    assert {"stream 7", "waits", "collectives", "overlap", "until all ranks joined"} <= {*said}
    ranks = [words.split(",")[0] for words in said if words.startswith("rank ")]
    assert ranks == ["rank 0: 46.2 % overlapped", "rank 1: 45.1 % overlapped"]
    assert said.count("bucket 0") == said.count("bucket 1") == 2
    hovers = [each.tooltip for each in shapes(found)]
    joined = "all-reduce 0#1 bucket 0, from down.weight: 0.26 ms, of which 0.0602 ms until the last rank had joined"
    assert {joined, "all-reduce 0#1 bucket 0, from down.weight: 0.2 ms"} <= {*hovers}
    launched = [each for each in shapes(found) if each.tooltip.startswith("all-reduce 0#2")]
    assert len({round(max(e.right for e in launched if e.top == top), 1) for top in {e.top for e in launched}}) == 1, (
        "on one clock both ranks leave together"
    )


def test_a_plain_trace_is_drawn_as_far_as_it_says(tmp_path):
    engine = "autograd::engine::evaluate_function: MmBackward0"
    plain = trace(event("aten::mm", 0, 10), event(engine, 10, 30), event("aten::mm", 12, 28), rank=1)
    assert {"rank 1: no communication", "backward"} <= {*texts(drawn(tmp_path, plain))}
    assert "rank 0: 0.0 % overlapped" in drawn(tmp_path, trace(event("gloo:all_reduce", 0, 10, GLOO)))
