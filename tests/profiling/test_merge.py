"""One file for all ranks: names, arrows, curves, checks, and the command that writes it."""

import gzip
import json

import pytest

from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.profiling.__main__ import main, read_ranks
from cs336_systems.profiling.align import CONVERSION, match, offsets
from cs336_systems.profiling.merge import merge
from cs336_systems.profiling.names import LINE_UP
from cs336_systems.profiling.report import missing_ranks, write_report
from cs336_systems.profiling.trace import OURS, Trace, parse, read_json, read_trace, trace_files, write_json
from tests.support.merged_trace import validate
from tests.support.traces import BASE, GLOO, MAIN, PID, SECOND, gloo, kernel, slice_, trace, two_ranks


def of(merged: dict, phases: str, **wanted) -> list[dict]:
    return [e for e in merged["traceEvents"] if e["ph"] in phases and all(e.get(k) == v for k, v in wanted.items())]


def test_merged_ranks_have_names_and_one_clock():
    merged = merge(two_ranks(ahead=SECOND))
    assert merged["baseTimeNanoseconds"] == BASE
    names = {e["pid"]: e["args"]["name"] for e in of(merged, "M", name="process_name")}
    assert names == {1: f"rank 0 (host0, pid {PID})", 1001: f"rank 1 (host1, pid {PID})"}
    threads = [(e["pid"], e["args"]["name"]) for e in of(merged, "M", name="thread_name")]
    lanes = [f"main thread ({MAIN})", f"communication thread 0 ({GLOO})"]
    assert threads == [(pid, lane) for pid in (1, 1001) for lane in lanes]
    assert [e["ts"] for e in of(merged, "X", name="aten::mm")] == [10.0, 10.0]
    found = validate(merged)
    assert (found.problems, found.ranks, found.slices) == ([], 2, len(of(merged, "X")))
    assert json.dumps(merged) == json.dumps(merge(two_ranks(ahead=SECOND)[::-1])), "in any order of files"
    start = 86_399 * 10**6 + 123.457  # a day after the trace's zero, as many digits as a float has
    event = of(merge([trace(0, slice_("aten::mm", start, start + 0.003))]), "X")[0]
    assert (event["ts"], event["dur"]) == (123.457, 0.003)
    named = {"ph": "M", "name": "thread_name", "pid": PID, "tid": 90, "args": {"name": "thread 90 (loader)"}}
    events = [named, slice_("aten::mm", 0, 9), slice_("read", 0, 5, 90), slice_("read", 0, 5, 91)]
    names = [e["args"]["name"] for e in of(merge([trace(0, *events)]), "M", name="thread_name")]
    assert names == [f"main thread ({MAIN})", "thread 90 (loader)", "thread 91"]
    with pytest.raises(UserError, match="one of 2 ranks and rank 1 one of 4"):
        merge([trace(0, world=2), trace(1, world=4)])


def test_arrows_go_from_the_last_to_join_to_where_the_others_leave():
    merged = merge(two_ranks(ahead=SECOND))
    ends = [(e["ph"], e["name"], e["pid"], e["ts"]) for e in of(merged, "sf", cat="collective")]
    assert ends == [
        ("s", "line up", 1, 0.001),
        ("f", "line up", 1001, 0.999),
        ("s", "all-reduce 0#1 bucket", 1001, 200.001),
        ("s", "gloo:all_reduce [[8]] #0", 1001, 201.001),
        ("f", "gloo:all_reduce [[8]] #0", 1, 299.999),
        ("f", "all-reduce 0#1 bucket", 1, 300.499),
    ]
    assert all(e["bp"] == "e" for e in of(merged, "f"))
    arrows = of(merged, "s")
    assert len({e["id"] for e in arrows}) == len(arrows) == 5  # two ranks, three collectives; both ranks had used 1
    assert sorted((e["pid"], e["ts"]) for e in of(merged, "sf", cat="fwdbwd")) == [
        *((1, 10.0), (1, 30.0)),
        *((1001, 10.0), (1001, 30.0)),
    ]
    # At equal times a viewer reads on, and would hang an arrow on the slice around.
    at_ten = [(e["ph"], e["name"]) for e in merged["traceEvents"] if e["pid"] == 1 and e.get("ts") == 10.0]
    assert at_ten == [("X", "aten::mm"), ("s", "fwdbwd")]


def test_arrows_never_point_back_nor_to_a_child():
    """Of a broadcast the source may be gone before the last comes."""
    traces = [trace(0, gloo(0, 10, "gloo:broadcast")), trace(1, gloo(20, 30, "gloo:broadcast"))]
    assert of(merge(traces), "sf") == []

    def reduced(child: tuple[float, float], last: tuple[float, float], end: float = 50) -> list[float]:
        slices = (gloo(0, end), slice_("aten::div_", *child, GLOO)), (gloo(10, 50), slice_("aten::div_", *last, GLOO))
        merged = merge([trace(rank, *each, host="one") for rank, each in enumerate(slices)])
        return [e["ts"] for e in of(merged, "sf")]

    assert reduced((40, 50), (10, 20)) == [20.0, 39.999]
    assert reduced((5, 50), (10, 50)) == [10.001, 49.999], "where children leave no room"
    assert reduced((1, 2), (10, 45), 44) == [10.001, 43.999], "or only after another rank has left"


def test_gpus_of_several_ranks_stay_apart():
    """On each machine GPU 0 is process 0."""
    merged = merge([trace(r, slice_("aten::mm", 0, 9), kernel(20 + r, 40)) for r in range(2)])
    names = {e["pid"]: e["args"]["name"] for e in of(merged, "M", name="process_name") if "GPU" in e["args"]["name"]}
    assert names == {2: "rank 0 GPU 0", 1002: "rank 1 GPU 0"}
    assert "stream 20, communication" in {e["args"]["name"] for e in of(merged, "M", name="thread_name")}
    assert validate(merged).problems == []


def test_the_checker_finds_what_a_viewer_would_drop():
    def first(events: list[dict], **wanted) -> dict:
        return next(e for e in events if all(e.get(k) == v for k, v in wanted.items()))

    changes = {
        "crosses another": lambda events: first(events, name="aten::mm").update(dur=1500),
        "no times: -1": lambda events: first(events, name="aten::mm").update(ts=-1),
        "1 starts and 0 ends": lambda events: events.remove(first(events, ph="f")),
        "2 starts and 2 ends": lambda events: [e.update(id=1) for e in events if e["ph"] in "sf"],
        "touches no slice": lambda events: first(events, name="gloo:all_reduce [[8]] #0", ph="s").update(ts=1),
        "no times": lambda events: first(events, name="aten::mm").update(dur=float("inf")),
        "ends before it starts": lambda events: first(events, ph="f").update(ts=0),
        "has the names rank 0": lambda events: first(events, pid=1001, name="process_name").update(pid=1),
        "has no name": lambda events: events.remove(first(events, name="thread_name")),
    }
    for problem, change in changes.items():
        merged = merge(two_ranks())
        change(merged["traceEvents"])
        assert problem in "; ".join(validate(merged).problems)


def merge_command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = console.run_command(main, ["merge", *arguments])
    return code, *capsys.readouterr()


def test_the_command_merges_a_folder(tmp_path, capsys):
    for each in two_ranks(ahead=SECOND):
        write_json(each.chrome, tmp_path / f"rank{each.rank}.trace.json.gz")
    code, out, err = merge_command(capsys, str(tmp_path))
    assert (code, err) == (0, "")
    assert "1000.000" in out
    assert "collectives" in out
    assert "2 ranks" in out
    assert "https://ui.perfetto.dev" in out
    merged = read_json(tmp_path / "merged.trace.json.gz")
    assert merged == merge(two_ranks(ahead=SECOND))
    assert "cross" not in out
    crossing = two_ranks(ahead=SECOND)[0].chrome
    crossing["traceEvents"] += [slice_("aten::a", 400, 600), slice_("aten::b", 500, 700), slice_("aten::c", 510, 710)]
    write_json(crossing, tmp_path / "rank0.trace.json.gz")
    code, out, _ = merge_command(capsys, str(tmp_path))  # again: the merged file is no rank's
    assert (code, "2 slices cross others" in out) == (0, True)
    write_report(tmp_path, read_ranks(trace_files(tmp_path)), console.console())
    assert "2 slices cross others" in capsys.readouterr().out


def test_a_missing_rank_is_a_note(tmp_path, capsys):
    write_json(two_ranks()[1].chrome, tmp_path / "rank1.trace.json")
    code, out, _ = merge_command(capsys, str(tmp_path))
    assert code == 0
    assert "rank 0 of 2 missing" in out
    write_report(tmp_path, read_ranks([tmp_path / "rank1.trace.json"]), console.console())
    assert "rank 0 of 2 missing" in capsys.readouterr().out
    assert "rank 0 of 2 missing" in (tmp_path / "index.html").read_text()
    assert missing_ranks([trace(0, world=1000)]).endswith(", 19, 20 and 979 more of 1000 missing")


def test_traces_of_plain_torch_go_by_their_names(tmp_path, capsys):
    for rank in range(2):
        events = {"traceEvents": [slice_("aten::mm", rank, 9)]}
        write_json(events, tmp_path / f"rank{rank}.123.pt.trace.json.gz")
    code, _, err = merge_command(capsys, str(tmp_path))
    assert (code, err) == (0, "")
    assert validate(read_json(tmp_path / "merged.trace.json.gz")).ranks == 2
    assert [each.world_size for each in read_ranks(trace_files(tmp_path))] == [2, 2]


def test_errors_are_one_clear_line(tmp_path, capsys):
    whole = json.dumps(two_ranks()[0].chrome).encode()
    cases = {
        "half": (whole[: len(whole) // 2], "is cut short"),
        "half of a gzip": (gzip.compress(whole)[:200], "is cut short"),
        "text": (b"what is this?", "no JSON"),
        "empty": (b"", "no JSON"),
        "short": (whole[:-1], "is cut short"),
        "list": (b"[]", "no list traceEvents"),
        "other": (b'{"a": 1}', "no list traceEvents"),
        "nameless": (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}', "lacks"),
        "odd": (b'{"traceEvents": [1]}', "no trace of torch.profiler"),
        "deep": (b"[" * 100_000, "recursion depth"),
        "again": (whole, "both of rank 0"),
    }
    for name, (data, said) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rank0.trace.json").write_bytes(whole)
        (folder / "rank1.trace.json").write_bytes(data)
        code, out, err = merge_command(capsys, str(folder))
        assert (code, out, err.count("\n")) == (2, "", 1), name
        assert said in err, err
        assert str(folder / "rank1.trace.json") in err
    (tmp_path / "nothing").mkdir()
    assert "holds no trace" in merge_command(capsys, str(tmp_path / "nothing"))[2]
    with pytest.raises(UserError, match="cannot read"):
        read_ranks([tmp_path / "absent.json"])
    (tmp_path / "full" / "merged.trace.json.gz").mkdir(parents=True)
    (tmp_path / "full" / "rank0.trace.json").write_bytes(whole)
    code, _, err = merge_command(capsys, str(tmp_path / "full"))
    assert (code, "cannot write" in err) == (2, True)
    assert merge_command(capsys)[0] == 2


def test_a_real_capture_with_a_clock_set_wrong(profiles, tmp_path):
    found = match([read_trace(path) for path in trace_files(profiles / "groups")])
    assert [sum(each.key.startswith(verb) for each in found) for verb in ("all-reduce", "reduce-scatter")] == [4, 3]
    chromes = [read_json(path) for path in trace_files(profiles / "groups")]
    chromes[1]["baseTimeNanoseconds"] += SECOND
    injected = [parse(each) for each in chromes]

    def bare(each: Trace) -> Trace:
        """A trace without what `Capture` adds to it."""
        events = [event for event in each.chrome["traceEvents"] if event.get("cat") != LINE_UP]
        return parse({key: value for key, value in each.chrome.items() if key != OURS} | {"traceEvents": events})

    # The ranks share a host, so that one of them must be wrong about it: the collectives know better.
    for traces in (injected, [bare(each) for each in injected]):
        found = offsets(traces)[1]
        assert found.source == "collectives; contradicted: same host"
        assert abs(found.nanoseconds - SECOND) <= found.bound + 2 * CONVERSION
    merged = merge(injected)
    assert validate(merged).problems == []
    between = of(merged, "s", cat="collective")
    assert len([e for e in between if e["name"].startswith(("all-reduce", "reduce-scatter"))]) >= 6
    write_json(merged, tmp_path / "merged.trace.json")
    validator = pytest.importorskip("torch.profiler._trace_validator")
    assert validator.validate_trace(str(tmp_path / "merged.trace.json")) == (True, [])
