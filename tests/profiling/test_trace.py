"""Reading traces: their content, what is repaired, and one clear line for a file that is no trace."""

import gc
import json
from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.profiling.nesting import Node, nest
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


def test_links_and_allocations():
    flow = [{"ph": ph, "id": 5, "pid": 7, "tid": 1, "ts": ts, "cat": "fwdbwd", "name": "f"} for ph, ts in ("s1", "f9")]
    flow = [each | {"ts": float(each["ts"])} for each in flow]
    memory = {"Total Allocated": 9, "Bytes": -4, "Device Id": 0, "Device Type": 1, "Addr": 99}
    event = {"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": 2.0, "args": memory}
    trace = parse(chrome(*flow, event))
    assert trace.links == {((7, 1), BASE + 9000): ((7, 1), BASE + 1000)}
    assert [(a.address, a.nbytes, a.device, a.total) for a in trace.allocations] == [(99, -4, "cuda", 9)]


def test_garbled_names_are_read(tmp_path):
    """torch.profiler writes bytes that are no UTF-8, and control characters, for frames whose code is gone."""
    text = json.dumps(chrome(slice_("GARBLED", 0, 1))).encode().replace(b"GARBLED", b"\xa0~\x05")
    (tmp_path / "x.json").write_bytes(text)
    assert read_trace(tmp_path / "x.json").spans[0].name.endswith("~\x05")


@pytest.mark.parametrize("name", ["rank0.trace.json", "rank0.trace.json.gz"])
def test_what_is_written_is_read(tmp_path, name):
    write_json(chrome(slice_("aten::mm", 1, 2)), tmp_path / name)
    assert trace_files(tmp_path) == [tmp_path / name]
    assert read_trace(tmp_path / name).spans[0].duration == 2000


def test_an_empty_folder_gets_one_clear_line(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="no trace rank"):
            trace_files(folder)
    for rank in (10, 2):
        write_json(chrome(), tmp_path / f"rank{rank}.trace.json.gz")
    assert [path.name for path in trace_files(tmp_path)] == ["rank2.trace.json.gz", "rank10.trace.json.gz"]


def span(name: str, start: int, end: int, category: str = "cpu_op") -> Span:
    return Span(name, category, start, end, (7, 1))


def shape(nodes: list, parent: Node | None = None) -> list:
    inside = [node for node in nodes if node.parent is parent]
    return [(node.span.name, self_time(node), shape(nodes, node)) for node in inside]


def self_time(node: Node) -> int:
    return node.duration - sum(child.duration for child in node.children)


def test_nesting_gives_exact_self_times():
    spans = [span("a", 0, 100), span("b", 10, 40), span("c", 10, 20), span("d", 40, 50), span("e", 100, 110)]
    want = [("a", 60, [("b", 20, [("c", 10, [])]), ("d", 10, [])]), ("e", 10, [])]
    assert shape(nest(spans)) == want


def test_frames_that_cross_an_annotation_are_left_out():
    """`__enter__` begins before the annotation and ends inside it, `__exit__` begins inside and ends after it."""
    frame, tag = "python_function", "user_annotation"
    spans = [
        span("loop", 0, 1_000_000, frame),
        span("__enter__", 10_000, 30_000, frame),
        span("inside enter", 11_000, 12_000, frame),
        span("tag", 20_000, 90_000, tag),
        span("op", 40_000, 50_000),
        span("__exit__", 80_000, 99_000, frame),
    ]
    nodes = nest(spans)
    assert [node.span.name for node in nodes] == ["loop", "inside enter", "tag", "op"]
    assert sum(map(self_time, nodes)) == 1_000_000


def test_what_is_inside_of_two_frames_that_cross_belongs_to_the_span_around_both():
    frame, tag = "python_function", "user_annotation"
    spans = [
        span("loop", 0, 1_000_000),
        span("__enter__", 10_000, 40_000, frame),
        span("_enter", 11_000, 40_000, frame),
    ]
    nodes = nest([*spans, span("op", 12_000, 13_000), span("tag", 20_000, 90_000, tag)])
    assert shape(nodes) == [("loop", 929_000, [("op", 1000, []), ("tag", 70_000, [])])]


def test_a_child_outlasts_its_parent_by_rounding_only():
    rounded = nest([span("a", 0, 5000), span("b", 1000, 5400)])
    assert shape(rounded) == [("a", 1000, [("b", 4000, [])])]
    crossing = nest([span("a", 0, 5000), span("b", 1000, 9000)])
    assert shape(crossing) == [("a", 5000, [])]


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
    assert count(replace(trace, spans=[])) == 0
    assert trace == parse(chrome(slice_("aten::mm", 0, 1)))


def test_collection_of_garbage_goes_on_after_an_error():
    with pytest.raises(ValueError, match="inside"), uncollected():
        raise ValueError("inside")
    assert gc.isenabled()
