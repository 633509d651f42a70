"""Overlap of communication and computation: by hand to the nanosecond, and on real ranks by the order of events."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.profiling.collectives import flights
from cs336_systems.profiling.names import LINE_UP
from cs336_systems.profiling.overlap import last_starts, overlap, overlap_table, overlaps
from cs336_systems.profiling.trace import Trace, read_trace, trace_files
from tests.support import chrome_events
from tests.support.flame_cases import span as event

FIXTURE = Path(__file__).resolve().parents[1] / "files" / "cuda_two_ranks"
MAIN, GLOO = 1, 2
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: float, end: float, stream: int = 7, category: str = "kernel") -> dict:
    return event(name, start, end, stream, category, stream=stream)


def met(ahead: float = 0.0) -> dict:
    """The line-up of the ranks, in no time, on a clock that is ahead."""
    return event(LINE_UP, ahead, ahead, category=LINE_UP)


def trace(*events: dict, rank: int = 0, host: str = "", **ours) -> Trace:
    return replace(chrome_events.trace(*events, **{"rank": rank, "world_size": 2} | ours), host=host)


OURS = [event(f"{what} all-reduce 0#1 x", start, start + 9) for what, start in (("launch", 91), ("wait", 101))]


@pytest.mark.parametrize(
    ("spans", "communication", "overlapped"),
    [
        # What was posted leaves its thread a thread that computes.
        ([event("gloo:recv", 0, 100), event("gloo:send", 5, 110), event("aten::mm", 20, 50)], 110, 30),
        # NCCL's spans on the CPU say only when a kernel was enqueued, and waits for one block no thread.
        ([event("nccl:all_reduce", 0, 100), event("aten::mm", 0, 90)], 0, 0),
        ([event("nccl:all_reduce", 0, 100), event("aten::mm", 0, 90), *OURS], 0, 0),
        # gloo under a GPU's kernels.
        ([event("gloo:all_reduce", 0, 100, GLOO), kernel("gemm", 40, 60), event("aten::mm", 0, 90)], 100, 20),
    ],
)
def test_spans_of_a_cpu(spans, communication, overlapped):
    found = overlap(trace(*spans))
    assert (found.communication, found.overlapped) == (1000 * communication, 1000 * overlapped)
    assert found.exposed == found.communication - found.overlapped
    assert found.posted == (spans[0]["name"] == "gloo:recv")


@pytest.mark.parametrize(
    ("kernels", "share"),
    [
        ([kernel(NCCL, 0, 100, 20), kernel("gemm", 100, 200)], 0),
        ([kernel(NCCL, 0, 100, 20), kernel("gemm", 50, 200)], 0.5),
        # Two streams of computation and two of communication: 90 of 140.
        ([kernel(NCCL, 0, 100, 20), kernel(NCCL, 60, 140, 21), kernel("a", 10, 70), kernel("b", 50, 100, 8)], 90 / 140),
        ([kernel(NCCL, 0, 100, 20), kernel("Memcpy HtoD", 0, 100, 7, "gpu_memcpy")], 0),
        ([kernel(NCCL, 0, 100, 20), event("nccl:all_reduce", 0, 400, 7, "gpu_user_annotation", stream=7)], 0),
        ([kernel(NCCL, 0, 100, 20), event("cudaLaunchKernel", 0, 50, 3, "cuda_runtime")], 0),
        ([kernel(NCCL, 0, 100, 20), kernel("ncclKernel_AllGather_RING_LL_Sum", 0, 60, 21), kernel("a", 90, 300)], 0.1),
        ([kernel("gemm", 0, 100)], None),
    ],
    ids=["touching", "half", "two streams", "copy", "annotation", "launch", "old name", "none"],
)
def test_kernels_by_the_definition_of_holistic_trace_analysis(kernels, share):
    assert overlap(trace(*kernels)).share == share


def test_the_fixture_to_the_nanosecond():
    found = overlaps([read_trace(path) for path in trace_files(FIXTURE)])
    assert [(f.communication, f.overlapped, f.exposed) for f in found] == [
        (560_000, 258_500, 301_500),
        (439_500, 198_250, 241_250),
    ]
    assert [(f.waited, f.transferred, f.blocked) for f in found] == [(120_500, 439_500, 30_000), (0, 439_500, 30_000)]
    assert not any(f.posted for f in found)


def test_waiting_is_apart_from_transfer():
    args = {"Input Dims": [[4]], "Input type": ["float"]}

    def one(rank: int, start: float, ahead: float) -> Trace:
        spans = [event("gloo:all_reduce", start + ahead, 100 + ahead, GLOO, **args)]
        spans.append(event("gloo:all_gather", 10 + ahead, 10 + 10 * rank + ahead, GLOO))
        return trace(met(ahead), *spans[: rank + 1], rank=rank, host=str(rank))

    first, second = overlaps([one(1, 70, 12.5), one(0, 20, 0)])
    assert (first.rank, first.waited, first.transferred) == (0, 50_000, 30_000)
    assert (second.rank, second.waited, second.transferred) == (1, 0, 40_000), "what has no partner was transferred"
    alone = overlaps([one(0, 20, 0)])
    assert [each.waited for each in alone] == [None]
    # A broadcast's source does not wait for who comes after its end.
    traces = [trace(met(), event("gloo:broadcast", 50 * r, 50 * r + 30, GLOO), rank=r, host=str(r)) for r in range(2)]
    assert [(each.waited, each.transferred) for each in overlaps(traces)] == [(0, 30_000), (0, 30_000)]


def test_in_shared_memory_ranks_wait_until_the_last_has_launched():
    def one(rank: int, *times: tuple[float, float, float]) -> Trace:
        spans = [event(f"launch all-reduce 0#{i} x", launch, launch + 2) for i, (launch, *_) in enumerate(times)]
        spans += [event(f"wait all-reduce 0#{i} x", start, end) for i, (_, start, end) in enumerate(times)]
        return trace(*spans, rank=rank, host="same")

    found = overlaps([one(0, (0, 10, 70), (80, 95, 100)), one(1, (50, 60, 75), (90, 92, 99))])
    assert [(each.communication, each.waited) for each in found] == [(65_000, 40_000), (22_000, 0)]


def test_ranks_wait_for_each_other_in_the_collective_of_the_same_name():
    """Two groups of the same ranks run equal collectives, each rank in another order: counting would pair wrongly."""

    def one(rank: int, *times: tuple[float, float]) -> Trace:
        spans = [met()]
        for group, (begin, end) in enumerate(times):
            name = f"all-reduce {group}#1 group {group}"
            call = event("c10d::allreduce_", 1 + 5 * group, 2 + 5 * group, **{"Input Dims": [[[8]], []]})
            ran = event("gloo:all_reduce", begin, end, GLOO + group, **{"Input Dims": [[8]]})
            waited = event(f"wait {name}", 10 + group, end + 1)
            spans += [event(f"launch {name}", 5 * group, 3 + 5 * group), call, ran, waited]
        found = trace(*spans, rank=rank, host=str(rank))
        groups = [{"pg_name": name, "ranks": [0, 1]} for name in "01"]
        return replace(found, chrome=found.chrome | {"distributedInfo": {"pg_config": groups}})

    traces = [one(0, (20, 130), (100, 140)), one(1, (120, 160), (30, 110))]
    last = last_starts(traces)
    ran = {(each.rank, f.label): f.transfers[0] for each in traces for f in flights(each)}
    assert {(*key, span.start, last[id(span)]) for key, span in ran.items()} == {
        (0, "group 0", 20_000, 120_000),
        (0, "group 1", 100_000, 100_000),
        (1, "group 0", 120_000, 120_000),
        (1, "group 1", 30_000, 100_000),
    }


def test_a_posted_transfer_begins_when_the_last_rank_has_launched():
    def one(rank: int, start: float) -> Trace:
        return trace(
            met(),
            event("launch all-gather 0#1 weight", start, start + 5),
            event("gloo:recv", start + 1, 90),
            event("wait all-gather 0#1 weight", 80, 91),
            rank=rank,
            host=str(rank),
        )

    first, second = overlaps([one(0, 0), one(1, 50)])
    assert (first.communication, first.waited) == (89_000, 49_000)
    assert (second.communication, second.waited) == (39_000, 0)


def test_the_note_below_the_table_explains_its_columns():
    traces = [read_trace(path) for path in trace_files(FIXTURE)]
    text = overlap_table(traces).markdown()
    assert "| 0 | 0.560 | 0.259 | 0.301 | 46.2 % | 0.120 | 0.440 | 0.030 |" in text
    assert "upper bounds" not in text
    posted = overlap_table([trace(event("gloo:recv", 0, 100))]).markdown()
    assert "| 0 | 0.100 | 0.000 | 0.100 | 0.0 % | - | - | - |" in posted
    assert "upper bounds" in posted
    twice = [event(f"{kind}{k}", 100 * k, 100 * k + 90) for k in (0, 1) for kind in ("ProfilerStep#", "step ")]
    above = [event(f"step {k}", 100 * k, 100 * k + 90, 7, "gpu_user_annotation") for k in (0, 1)]
    assert "Sums over 2 steps" in overlap_table([trace(*twice, *above)]).markdown(), "each step counts once"
    assert "| 0 | 0.000 | 0.000 | 0.000 | - | - | - | 0.000 |" in overlap_table([trace()]).markdown()


def launched_in(trace: Trace, phase: str) -> list[int]:
    """The numbers of the buckets launched within each of a phase's spans, in order."""
    spans = [span for span in trace.spans if span.name == phase]
    buckets = [flight for flight in flights(trace) if flight.label.startswith("bucket")]
    return [
        int(flight.label.split(",")[0].removeprefix("bucket "))
        for span in spans
        for flight in buckets
        if span.start <= flight.start < span.end
    ]


def test_synchronous_reductions_overlap_with_nothing(profiles):
    for kind in ("naive", "flat", "synchronous"):
        traces = [read_trace(path) for path in trace_files(profiles / kind)]
        for each in overlaps(traces):
            assert each.communication > 0
            assert each.overlapped == 0
            assert each.waited + each.transferred == each.communication
        for each in traces if kind == "naive" else ():
            assert not launched_in(each, "backward")
            assert launched_in(each, "synchronise") == [*range(8)] * 2


def test_buckets_are_launched_while_backward_runs(profiles):
    for each in (read_trace(path) for path in trace_files(profiles / "bucketed")):
        assert launched_in(each, "backward") == [0, 1, 2, 3] * 2
        first = next(flight for flight in flights(each) if flight.label.startswith("bucket 0"))
        backward = next(span for span in each.spans if span.name == "backward")
        later = [s for s in each.spans if s.name == "aten::mm" and first.start < s.start < backward.end]
        assert later, "backward goes on after the first launch"
        assert first.transfers[0].start > first.start
        assert not launched_in(each, "synchronise")


def test_two_groups_of_real_ranks(profiles):
    for each in (read_trace(path) for path in trace_files(profiles / "groups")):
        sizes = {f.label: [span.args["Input Dims"] for span in f.transfers] for f in flights(each)}
        wanted = {f"big {i}": [[[300_000]]] for i in range(3)} | {"small": [[[8]]]}
        assert {label: sizes[label] for label in wanted} == wanted
