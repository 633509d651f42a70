"""The playable parts of the page: what the script looks up is what Python computes, and every control works."""

import json
import random
import shutil
import signal
import subprocess
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")

from cs336_systems.cost.commands.step import command as step_command
from cs336_systems.errors import UserError
from cs336_systems.schedule import schedule, simulate
from writeup.play import grid, page, steps

NODE = shutil.which("node")
PART = '<div id="play-{}" class="play"><p class="paper">paper</p></div>'.format
PARTS = "".join(map(PART, ("layout", "pipeline", "steps")))
LOOK_UP = """
const fs = require("fs"), vm = require("vm");
vm.runInThisContext(fs.readFileSync(process.argv[1], "utf8"));
const {data, choices} = JSON.parse(fs.readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(choices.map(each => [lookup(data, "memory", each), lookup(data, "time", each)])));
"""


def tables(data):
    """Memory and time as arrays with an axis for each of the table's, and the names of these."""
    sizes = {name: len(values) for name, _, values, *_ in data["axes"]}
    for name in ("memory", "time"):
        cells = np.empty(len(data[name]["cells"]), dtype=object)
        cells[:] = data[name]["cells"]
        yield data[name]["axes"], cells.reshape([sizes[axis] for axis in data[name]["axes"]])


def found(tables, choice):
    return [cells[tuple(choice[axis] for axis in axes)] for axes, cells in tables]


def random_choices(data, count):
    draw = random.Random(0)
    return [{name: draw.randrange(len(values)) for name, _, values, *_ in data["axes"]} for _ in range(count)]


def test_the_script_finds_every_layout(data):
    if NODE is None:
        pytest.skip("needs node; the next test holds the tables to Python by the same arithmetic")
    names = [name for name, *_ in data["axes"]]
    choices = [dict(zip(names, each, strict=True)) for each in product(*(range(len(axis[2])) for axis in data["axes"]))]
    assert len(choices) > 9_000
    asked = json.dumps({"data": {key: data[key] for key in ("axes", "memory", "time")}, "choices": choices})
    script = [NODE, "-e", LOOK_UP, str(page.HERE / "play.js")]
    said = subprocess.run(script, input=asked, capture_output=True, text=True, timeout=60, check=True).stdout
    both = list(tables(data))
    assert json.loads(said) == [found(both, choice) for choice in choices]


def test_the_page_shows_what_the_command_that_it_names_prints(data):
    both, refused, verdicts = list(tables(data)), 0, set()
    for choice in random_choices(data, 100):
        options = [axis[3][choice[axis[0]]] for axis in data["axes"]]
        arguments = [*" ".join([data["command"], *options]).split()[4:], "--json"]
        held, timed = found(both, choice)
        result = CliRunner().invoke(step_command, arguments)
        if isinstance(result.exception, UserError):
            assert held == timed
            assert data["texts"][held] == str(result.exception)
            refused += 1
            continue
        record, count = json.loads(result.stdout), len(grid.TIMES)
        seconds = [record["parts"].get(name) for name in grid.TIMES]
        seconds += [record[name] for name in ("seconds", "low_seconds", "high_seconds")]
        assert timed[: count + 4] == [grid.short(each) for each in (*(1e3 * s for s in seconds), 100 * record["mfu"])]
        needed = record["memory_bytes"]
        needs = (sum(needed.values()), record["memory_low_bytes"], record["memory_high_bytes"])
        parts = (needed.get(name, 0) for name in grid.MEMORY)
        assert held[2:] == [record["fullest_stage"], *(grid.short(each / 2**30) for each in (*needs, *parts))]
        verdict = data["verdicts"][timed[count + 4]].lower().strip(": ")
        said = [each for each in record["warnings"] if "out of memory" in each]
        assert said[0].endswith(verdict.removeprefix("refused, ")) if said else verdict == "fits"
        verdicts.add(verdict)
        notes = [data["texts"][each] for each in timed[count + 5 :]]
        assert notes == [each for each in record["warnings"] if each not in said]
    assert 0 < refused < 60
    assert len(verdicts) == len(data["verdicts"])


def test_pipelines_are_those_of_the_simulator(data):
    pipelines = data["pipelines"]
    assert len(pipelines["played"]) == len(list(product(*(pipelines[n] for n in ("names", "stages", "microbatches")))))
    for key, shown in pipelines["played"].items():
        name, stages, microbatches = key.split()
        if isinstance(shown, str):
            with pytest.raises(UserError) as error:
                schedule(name, int(stages), int(microbatches), 2)
            assert shown == str(error.value)
            continue
        rows, idle, live, end = shown
        busy = sum(to - start for row in rows for *_, start, to in row)
        assert idle == grid.short(100 * (1 - busy / (end * int(stages))))
        assert all(earlier[4] <= later[3] for row in rows for earlier, later in pairwise(row))
        played = simulate(schedule(name, int(stages), int(microbatches), grid.LENGTHS[name]), 2, 4, turn=name == "zbv")
        assert (live, end) == (played.peak_live, played.makespan)
        assert [len(row) for row in rows] == [len(row) for row in played.timeline]


def test_recorded_steps_send_and_hold_what_their_wrappers_say(data):
    recorded, whole, model = data["steps"]["rows"], steps.WHOLE, steps.LAYERS * steps.WHOLE
    agreement = recorded["FlatDDP"][-1][2] - model  # which parameters were used
    assert 0 < agreement < 100
    sent = dict.fromkeys(recorded, 1.0) | {"ZeRO 1 (ShardedOptimizer)": 1.5, "ZeRO 3 (FSDP)": 1.5}
    assert {name: rows[-1][2] - agreement for name, rows in recorded.items()} == {n: f * model for n, f in sent.items()}
    starts = {name: [row[0] for row in rows if "bucket" in row[0]] for name, rows in recorded.items()}
    assert [len(each) for each in starts.values()] == [4, 1, 4, 2, 2, 0]
    for name, rows in recorded.items():
        assert [row[2] for row in rows] == list(accumulate(row[1] for row in rows))
        words, overlaps = [row[0] for row in rows], name not in ("NaiveDDP", "FlatDDP")
        first = next(i for i, row in enumerate(rows) if row[1] and ("reduce" in row[0]))
        assert (first < words.index("backward has ended")) == overlaps
        state = [[bytes_ for bytes_, _ in rank[2]] for rank in rows[-1][3:]]
        total = [sum(each) for each in zip(*state, strict=True)]
        assert total == [2 * whole * (1 if "ZeRO" in name else steps.RANKS)] * steps.LAYERS
        averaged = rows[words.index("gradient synchronization has finished")]
        share = whole // 2 if "FSDP" in name else whole
        assert all(each == [share, steps.STATES.index("mean gradient")] for rank in averaged[3:] for each in rank[1])
    gathered = [sum(each[0] > whole for each in rank[0]) for row in recorded["ZeRO 3 (FSDP)"] for rank in row[3:]]
    assert max(gathered) == 3  # of four layers


def test_another_process_computes_the_same_and_is_ended_if_nobody_asks(data, monkeypatch):
    started, open_process = [], page.Popen
    monkeypatch.setattr(
        page, "Popen", lambda *words, **options: started.append(open_process(*words, **options)) or started[-1]
    )
    with page.numbers_ahead() as numbers:
        assert json.loads(numbers()) == data
    with pytest.raises(ZeroDivisionError), page.numbers_ahead():
        raise ZeroDivisionError
    assert [each.returncode for each in started] == [0, -signal.SIGKILL]
    monkeypatch.setattr(page, "Popen", lambda words, **options: open_process(["false"], **options))
    with pytest.raises(UserError, match="ended with code 1"), page.numbers_ahead() as numbers:
        numbers()


def test_other_pages_stay_as_they_are():
    assert page.with_play("<head></head><body></body>", str) == "<head></head><body></body>"


def test_every_part_works_from_a_file_by_the_keyboard(data, opened, tmp_path):
    path, viewport = (
        tmp_path / "index.html",
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
    )
    bare = f"<!DOCTYPE html><head>{viewport}</head><body>{PARTS}</body>"
    path.write_text(page.with_play(bare, lambda: json.dumps(data)), encoding="utf-8")
    shown = opened(path)
    first = found(tables(data), {axis[0]: axis[4] for axis in data["axes"]})
    layout, pipeline, recorded = (shown.locator(f"#play-{name}") for name in ("layout", "pipeline", "steps"))
    assert f"Step: {first[1][len(grid.TIMES)] / 1000:.3g} s" in layout.inner_text()
    layout.locator("select >> nth=0").select_option(label="xl")
    assert "Refused: 25 heads do not divide over tp 2" in layout.inner_text()
    layout.locator("input >> nth=0").press("ArrowLeft")  # tp 1
    assert "Fits: it needs" in layout.inner_text()
    layout.locator("select >> nth=0").select_option(label="gpt3-175b")
    assert "Refused, would run out of memory: it needs" in layout.inner_text()
    pipeline.locator("select").select_option(label="interleaved")
    pipeline.locator("input >> nth=1").press("ArrowLeft")  # 6 microbatches
    assert "Refused: microbatches 6 is not a multiple of stages 4" in pipeline.inner_text()
    recorded.locator("select >> nth=0").select_option(label="ZeRO 3 (FSDP)")
    for _ in range(4):
        recorded.press("ArrowRight")
    recorded.locator("button >> nth=0").click()
    assert f"4 of 26: {data['steps']['rows']['ZeRO 3 (FSDP)'][3][0]}." in recorded.inner_text()
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown.emulate_media(media="print")
    assert shown.locator(".paper >> nth=0").is_visible()
    assert not layout.locator(".controls").is_visible()
