"""Our overlap beside Holistic Trace Analysis's. Skipped without the extra `hta`."""

import pytest

from cs336_systems.profiling.overlap import overlap
from tests.profiling.test_overlap import FIXTURE, GLOO, event, trace
from tests.support.hta import compare_with_hta, hta_overlap, quiet_hta
from tests.support.hta_bridge import bridge

TWO_STEPS = [
    event("step 0", 0, 100),
    event("step 1", 100, 250),
    event("aten::mm", 10, 60),
    event("aten::mm", 110, 200),
    event("aten::add", 120, 130),
    event("gloo:all_reduce", 50, 90, GLOO),
    event("gloo:all_reduce", 150, 240, GLOO),
]


@pytest.fixture(scope="module")
def hta():
    """The library, without the warnings of what it stands on."""
    with quiet_hta():
        return pytest.importorskip("hta")


def test_the_fixtures_overlap_equals_hta(hta):
    rows = compare_with_hta(FIXTURE)
    assert [(row.rank, row.hta) for row in rows] == [(0, 46.16), (1, 45.11)]
    assert [round(row.ours, 2) for row in rows] == [row.hta for row in rows]


def test_cpu_traces_through_the_bridge(hta, profiles):
    for kind in ("naive", "bucketed"):
        for row in compare_with_hta(profiles / kind):
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
