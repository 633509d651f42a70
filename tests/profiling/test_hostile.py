"""Traces of any content: each field by each type of JSON is read, or refused in a line that names file and field."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cs336_systems.errors import UserError
from cs336_systems.profiling.__main__ import read_ranks
from cs336_systems.profiling.fields import OURS
from cs336_systems.profiling.flame import flames
from cs336_systems.profiling.memory import memory_markdown, memory_timeline
from cs336_systems.profiling.merge import merge
from cs336_systems.profiling.overlap import overlap_table
from cs336_systems.profiling.pictures import draw_flames, draw_memory
from cs336_systems.profiling.tables import render_markdown
from cs336_systems.profiling.timeline_picture import draw_timeline, steps_of
from cs336_systems.profiling.trace import Trace, parse, read_json, write_json
from tests.support.chrome_events import STREAM, backward, event, product, tag
from tests.support.garble import VALUES, garbled
from tests.support.traces import memory

EVENTS = [
    product("aten::mm", 2, 8, [2, 3], [3, 4], **{"External id": 5}),
    event("gemm", 5, 9, STREAM, "kernel", **{"External id": 5, "correlation": 9, "stream": 7}),
    event("c10d::allreduce_", 121, 2, **{"Input Dims": [[[8]], [8]], "Input type": ["TensorList", "float"]}),
    event("gloo:all_reduce", 125, 20, (1, 2), "user_annotation", **{"Input Dims": [[8]], "Input type": ["float"]}),
    memory(13.0, 4096),
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}},
    *backward("MmBackward0", 100, 9, 2, 1)[1:],
    event("cudaLaunchKernel", 3, 1, cat="cuda_runtime", **{"External id": 5, "correlation": 9}),
    tag("step 0", 0, 400),
    tag("launch all-reduce 0#1 x", 120, 9),
]
GROUP = {"pg_name": "0", "ranks": [0, 1]}
RANK = {"rank": 0, "world_size": 2, "steps": 2, "run": "1", "size": "tiny"}
RANK |= {"held": [["parameters", 5, 64, "cpu"]], "marks": [[10**18 + 20_000, "gradients", 5]]}
GOOD = {"baseTimeNanoseconds": 10**18, "host_name": "a", "distributedInfo": {"rank": 0, "pg_config": [GROUP]}}
GOOD |= {OURS: RANK, "traceEvents": EVENTS}
# Parts of it whose fields are garbled: one event of each phase, the arguments that some kinds have, and the head.
EACH: list[tuple] = [("traceEvents", number) for number in (0, 4, 7)]
EACH += [("traceEvents", number, "args") for number in (1, 2, 5)] + [("distributedInfo",), (OURS,)]


def report(found: Trace, path: Path) -> None:
    """All that is made of a trace, but for its pictures."""
    write_json(merge([found]), path)
    tables = render_markdown([found]) + overlap_table([found]).markdown()
    assert flames(found) is not None
    (tables + memory_markdown(found, memory_timeline(found))).encode()


def test_any_field_of_any_type_is_read_or_refused_by_name(tmp_path):
    path, read, refused = tmp_path / "x.json", 0, list[tuple]()
    made = [each for part in EACH for each in garbled(GOOD, part)]
    made += [((key,), value, GOOD | {key: value}) for key in GOOD for value in VALUES if key != "traceEvents"]
    made += [(("event", 1), value, GOOD | {"traceEvents": [value]}) for value in VALUES]
    for where, value, chrome in made:
        try:
            report(parse(chrome, path), path)
            read += 1
        except UserError as error:
            refused.append((where, value, str(error)))
    assert read > 100
    assert len(refused) > 300
    assert not [said for *_, said in refused if str(path) not in said or "\n" in said]
    for where, value, said in refused:
        field = [key for key in where if isinstance(key, str)][-1]
        assert field in said or "out of range" in said or value == {}, (where, value)


def test_traces_of_any_content_have_pictures():
    made = [each for part in EACH for each in garbled(GOOD, part, [-7.5, "$<b>\n", [], 2**40])]
    drawn = 0
    for _, _, chrome in made[::3]:
        try:
            found = parse(chrome)
        except UserError:
            continue
        draw_flames(flames(found), "flame")
        draw_memory(memory_timeline(found), "memory")
        draw_timeline([found], max(steps_of(found)), "timeline")
        drawn += 1
    assert drawn > 20


@pytest.mark.parametrize("name", ["rank0.trace.json", "rank0.trace.json.gz"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="a pipe or a device"):
        read_ranks([tmp_path / name])
    for path, why in (("/dev/zero", "a pipe or a device"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=why):
            read_json(Path(path))


def test_a_number_that_json_cannot_hold_is_refused_where_it_is_written(tmp_path):
    text = json.dumps({"traceEvents": [product("aten::mm", 2, 8, [2, 3], other="NUMBER")]}).replace('"NUMBER"', "1e999")
    (tmp_path / "x.json").write_text(text)
    found = merge(read_ranks([tmp_path / "x.json"]))
    with pytest.raises(UserError, match="out of range"):
        write_json(found, tmp_path / "merged.json")


def nested(n: int) -> list[dict]:
    """One inside another, n deep; they lie in [0, 2n)."""
    return [event("f", i, 2 * (n - i)) for i in range(n)]


# Events whose number is a multiple of n, by what was once done for each pair of them.
MANY: dict[str, Callable[[int], list[dict]]] = {
    "crossing": lambda n: [event("a", i, n) for i in range(n)],
    "posted": lambda n: [tag("gloo:send", i, n) for i in range(n)],
    "queued": lambda n: (
        [event("gloo:all_reduce", n + i, 0.5, (1, 2), "user_annotation") for i in range(n)]
        + [event("c10d::allreduce_", i, 0.5) for i in range(n)]
    ),
    "queued, twice as many as were asked for": lambda n: (
        [event("gloo:all_reduce", n + i, 0.5, (1, 2), "user_annotation") for i in range(n)]
        + [event("c10d::allreduce_", i, 0.5) for i in range(n // 2)]
    ),
    "queued, after the waits": lambda n: (
        [tag(f"launch all-reduce 0#{i}", i, 0.8) for i in range(n)]
        + [event("c10d::allreduce_", i, 0.5) for i in range(n)]
        + [tag(f"wait all-reduce 0#{i}", n + i, 0.5) for i in range(n)]
        + [event("gloo:all_reduce", 3 * n + i, 0.5, (1, 2), "user_annotation") for i in range(n)]
    ),
    "nested, with kernels": lambda n: (
        [event("a", i, 2 * (n - i), **{"External id": i}) for i in range(n)]
        + [event("gemm", i, 1, STREAM, "kernel", **{"External id": i, "stream": 7}) for i in range(n)]
    ),
    "nested, with allocations in them": lambda n: nested(n) + [memory(n + i / 2, 64) for i in range(n)],
    "nested, and allocations and arrows afterwards": lambda n: (
        nested(n)
        + [memory(2 * n + i, 64) for i in range(n)]
        + [{"ph": "s", "cat": "ac2g", "name": "a", "id": i, "pid": 1, "tid": 1, "ts": 2 * n + i} for i in range(n)]
    ),
    "one address again and again": lambda n: [memory(i, 64 * (-1) ** i) for i in range(n)],
}


@pytest.mark.parametrize("what", MANY)
def test_four_times_the_events_take_four_times_the_lines_of_python(what, tmp_path):
    def lines(n: int) -> int:
        count = 0

        def trace(frame, happened, value):
            nonlocal count
            count += happened == "line"
            return trace

        marks = [[1000 * i, "gradients", 5] for i in range(n)] if "again" in what else []
        chrome = {"traceEvents": MANY[what](n), OURS: {"marks": marks}}
        sys.settrace(trace)
        try:
            report(parse(chrome), tmp_path / "x.json")
        finally:
            sys.settrace(None)
        return count

    # What is done for all pairs grows 16-fold; a stack is climbed up to a depth between these two sizes at most.
    assert lines(1200) < 5 * lines(300)
