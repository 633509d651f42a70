"""Our overlap beside Holistic Trace Analysis's. Skipped without the extra `hta`."""

import pytest

from cs336_systems.profiling.overlap import overlap
from cs336_systems.profiling.trace import read_json, read_trace, trace_files
from tests.profiling.test_overlap import FIXTURE, GLOO, event, profiled, trace
from tests.support.hta import compare_with_hta, hta_overlap, quiet_hta
from tests.support.hta_bridge import bridge, project

TWO_STEPS = [
    event("step 0", 0, 100),
    event("step 1", 100, 250),
    event("aten::mm", 10, 60),
    event("aten::mm", 110, 200),
    event("aten::add", 120, 130),
    event("gloo:all_reduce", 50, 90, GLOO),
    event("gloo:all_reduce", 150, 240, GLOO),
]


@pytest.fixture
def hta():
    """The library, without the warnings of what it stands on."""
    with quiet_hta():
        return pytest.importorskip("hta")


def test_a_cpu_trace_becomes_one_of_a_gpu():
    chrome = project(trace(*TWO_STEPS, rank=1))
    kernels = [e for e in chrome["traceEvents"] if e["cat"] == "kernel"]
    assert [(e["name"], e["args"]["stream"], e["ts"], e["dur"]) for e in kernels] == [
        ("aten::mm", 7, 10, 50),
        ("ncclDevKernel_all_reduce", 20, 50, 40),
        ("aten::mm", 7, 110, 90),
        ("ncclDevKernel_all_reduce", 20, 150, 90),
    ]
    launches = {e["args"]["correlation"]: e for e in chrome["traceEvents"] if e["cat"] == "cuda_runtime"}
    assert all(launches[e["args"]["correlation"]]["ts"] <= e["ts"] for e in kernels)
    assert not [e for e in chrome["traceEvents"] if e["name"].startswith("gloo:")]
    steps = [(e["name"], e["ts"], e["dur"]) for e in chrome["traceEvents"] if e["name"].startswith("ProfilerStep")]
    assert steps == [("ProfilerStep#0", 0, 100), ("ProfilerStep#1", 100, 150), ("ProfilerStep#2", 250, 1)]
    assert chrome["distributedInfo"]["rank"] == 1
    later = project(trace(event("aten::mm", 5, 9)))
    assert later["baseTimeNanoseconds"] == 5000, "small numbers keep their nanoseconds as floats"
    assert [e["ts"] for e in later["traceEvents"]] == [0, 0, 0, 0, 4]


def test_a_gpus_trace_is_left_as_it_is():
    path = trace_files(FIXTURE)[0]

    def slices(events: list[dict]) -> list[tuple]:
        return sorted((e["name"], e["cat"], str(e["tid"]), e["ts"], e["dur"]) for e in events if e["ph"] == "X")

    after = slices(project(read_trace(path))["traceEvents"])
    assert [each for each in after if "ProfilerStep" not in each[0]] == slices(read_json(path)["traceEvents"])


def test_the_fixtures_overlap_equals_hta(hta):
    rows = compare_with_hta(FIXTURE)
    assert [(row.rank, row.hta) for row in rows] == [(0, 46.16), (1, 45.11)]
    assert [round(row.ours, 2) for row in rows] == [row.hta for row in rows]


@pytest.mark.parametrize("kind", ["naive", "bucketed"])
def test_cpu_traces_through_the_bridge(hta, tmp_path, kind):
    profiled(tmp_path, kind)
    for row in compare_with_hta(tmp_path):
        assert row.hta == pytest.approx(row.ours, abs=0.01)
        assert kind != "naive" or row.hta == row.ours == 0


def test_hta_sees_every_step_although_it_drops_the_last(hta, tmp_path):
    found = trace(*TWO_STEPS)
    files = bridge([found], tmp_path / "new")
    assert files[0].is_absolute()
    assert hta_overlap(files) == {0: round(100 * overlap(found).share, 2)} == {0: round(100 * 60 / 130, 2)}
    with quiet_hta():
        from hta.trace_analysis import TraceAnalysis

        table = TraceAnalysis({0: str(files[0])}).get_comm_comp_overlap(visualize=False)
    assert table["comp_comm_overlap_pctg"][0] == round(100 * 60 / 130, 2)


def test_no_communication_is_none_to_both(hta, tmp_path):
    files = bridge([trace(event("aten::mm", 0, 10), event("aten::add", 20, 30))], tmp_path)
    assert hta_overlap(files) == {0: None}
