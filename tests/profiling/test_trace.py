"""Reading traces: their content, what is repaired, and one clear line for a file that is no trace."""

import gc
import json
from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.profiling.nesting import nest
from cs336_systems.profiling.trace import Span, once, parse, read_trace, trace_files, uncollected, write_json
from tests.support.chrome_events import event

BASE = 1_790_857_026_000_000_000


def slice_(name: str, start: float, duration: float, category: str = "cpu_op", tid: object = 1, **args) -> dict:
    return event(name, start, duration, (7, tid), category, **args)


def chrome(*events: dict, **top) -> dict:
    return {"traceEvents": list(events), "baseTimeNanoseconds": BASE, **top}


def test_times_are_exact_nanoseconds_since_the_epoch():
    late = 4_445_598_326_500.421  # microseconds of three months, as kineto counts
    trace = parse(chrome(slice_("aten::mm", late, 0.003)))
    assert trace.spans[0].start == BASE + 4_445_598_326_500_421
    assert trace.spans[0].duration == 3
    assert parse(chrome(slice_("aten::mm", 5, -2))).spans[0].duration == 0
    assert parse(chrome(slice_("f", 5, 2, "python_function"))).spans == [], "Python's frames are left out"
    with pytest.raises(UserError, match="it has no 'ts'"):
        parse(chrome({"ph": "X", "name": "aten::mm", "dur": 2.0}))


def test_rank_comes_from_ours_or_torch():
    info = {"distributedInfo": {"rank": 3, "world_size": 4}}
    assert (parse(chrome(**info)).rank, parse(chrome(**info)).world_size) == (3, 4)
    assert parse(chrome(cs336={"rank": 2, "world_size": 4})).rank == 2
    assert (parse(chrome()).rank, parse(chrome(cs336={"rank": 4})).world_size) == (0, 5)
    for rank, world in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(UserError, match=f"its rank is {rank}, its world_size {world}"):
            parse(chrome(cs336={"rank": rank, "world_size": world}))


def test_sends_and_receives_leave_the_thread_that_posted_them():
    """They last until they are waited for, across what the thread does meanwhile; as few lanes as none crosses."""
    posted = [("gloo:recv", 0, 10), ("gloo:send", 2, 10), ("gloo:recv", 12, 3), ("gloo:send", 11, 9)]
    events = [slice_(name, start, length, "user_annotation") for name, start, length in posted]
    trace = parse(chrome(slice_("aten::mm", 1, 3), *events))
    lanes = {(span.name, span.start - BASE): span.lane for span in trace.spans}
    assert lanes["aten::mm", 1000] == (7, 1)
    assert lanes["gloo:recv", 0] == (7, "in flight 0")
    assert lanes["gloo:send", 2000] == (7, "in flight 1")
    assert lanes["gloo:send", 11000] == (7, "in flight 0")  # free since 10
    assert lanes["gloo:recv", 12000] == (7, "in flight 1")


def test_garbled_names_are_read(tmp_path):
    """torch.profiler writes bytes that are no UTF-8, and control characters, for frames whose code is gone."""
    text = json.dumps(chrome(slice_("GARBLED", 0, 1))).encode().replace(b"GARBLED", b"\xa0~\x05")
    (tmp_path / "x.json").write_bytes(text)
    assert read_trace(tmp_path / "x.json").spans[0].name.endswith("~\x05")


def test_an_empty_folder_gets_one_clear_line(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="no trace rank"):
            trace_files(folder)
    for name in ("rank10.trace.json", "rank2.trace.json.gz"):
        write_json(chrome(slice_("aten::mm", 1, 2)), tmp_path / name)
    assert [path.name for path in trace_files(tmp_path)] == ["rank2.trace.json.gz", "rank10.trace.json"]
    assert [read_trace(path).spans[0].duration for path in trace_files(tmp_path)] == [2000, 2000]


def test_a_child_outlasts_its_parent_by_rounding_only():
    for end, inside in ((5400, [("b", 1000, 5000)]), (9000, [])):
        spans = [Span(name, "cpu_op", *times, (7, 1)) for name, *times in (("a", 0, 5000), ("b", 1000, end))]
        (outer,) = (node for node in nest(spans) if node.parent is None)
        assert [(each.span.name, each.span.start, each.end) for each in outer.children] == inside


def test_what_is_made_of_a_trace_is_made_once_and_again_for_a_changed_one():
    made = []

    @once
    def count(trace):
        made.append((trace.rank, gc.isenabled()))
        return len(trace.spans)

    trace = parse(chrome(slice_("aten::mm", 0, 1)))
    assert [count(trace), count(trace)] == [1, 1]
    assert made == [(0, False)]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), uncollected():
        raise ValueError("inside")
    assert gc.isenabled()
    assert count(replace(trace, spans=[])) == 0
    assert trace == parse(chrome(slice_("aten::mm", 0, 1)))
