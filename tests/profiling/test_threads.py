"""The roles of threads."""

from pathlib import Path

from cs336_systems.profiling.timeline import lane_number, role_of, roles
from cs336_systems.profiling.trace import read_trace, trace_files
from tests.support.chrome_events import MAIN, event, tag, trace

ENGINE = "autograd::engine::evaluate_function: MmBackward0"


def lane(thread: object) -> tuple[int, object]:
    return 1, thread


def test_every_role():
    spans = [event(f"aten::op{i}", i, 1, lane(3)) for i in range(20)]
    spans += [tag("step 0", 0, 100, lane(9)), event(ENGINE, 1, 5, lane(12)), event(ENGINE, 1, 5, lane(13))]
    spans += [tag("gloo:all_reduce", 1, 5, lane(8)), event("aten::div_", 2, 1, lane(8))]
    spans += [tag("gloo:all_reduce", 1, 5, lane(10)), tag("gloo:recv", 1, 5, lane(9)), tag("gloo:send", 2, 5, lane(9))]
    spans += [event("gemm", 1, 5, (0, 7), "kernel")]
    found = roles(trace(*spans))
    assert list(found.items()) == [
        (lane(9), "main thread"),
        (lane(12), "autograd thread"),
        (lane(13), "autograd thread 1"),
        (lane(8), "communication thread 0"),
        (lane(10), "communication thread 1"),
        (lane("in flight 0"), "in flight 0"),
        (lane("in flight 1"), "in flight 1"),
        (lane(3), "other thread 0"),
    ]
    assert [role_of(name) for name in ("autograd thread 1", "in flight 0")] == ["autograd thread", "in flight"]


def test_the_main_thread_has_our_annotations_or_the_process_number_or_the_most_spans():
    busy = [event("aten::mm", i, 1, lane(5)) for i in range(5)]
    assert roles(trace(*busy, event("aten::mm", 0, 1)))[MAIN] == "main thread", "its number is the process's"
    for name in ("forward", "ProfilerStep#3", "model (Net)"):
        assert roles(trace(*busy, event("aten::mm", 0, 1), tag(name, 0, 9, lane(4))))[lane(4)] == "main thread"
    assert roles(trace(*busy, event("aten::mm", 0, 1, lane(3))))[lane(5)] == "main thread"
    assert roles(trace(event("aten::mm", 0, 1, lane(3)), event("aten::mm", 0, 1, lane(2))))[lane(2)] == "main thread"


def test_backward_on_the_main_thread_and_nccl_on_any():
    spans = [tag("step 0", 0, 100), event(ENGINE, 1, 5), tag("nccl:all_reduce", 8, 2)]
    spans += [event(ENGINE, 1, 5, lane(2)), tag("nccl:all_reduce", 2, 1, lane(2)), tag("nccl:barrier", 0, 1, lane(3))]
    assert roles(trace(*spans)) == {MAIN: "main thread", lane(2): "autograd thread", lane(3): "other thread 0"}


def test_traces_without_threads():
    assert roles(trace()) == {}
    assert lane_number((1, "stream")) == 0
    found = roles(read_trace(trace_files(Path(__file__).resolve().parents[1] / "files" / "cuda_two_ranks")[0]))
    assert next(iter(found.values())) == "main thread"
