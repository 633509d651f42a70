"""The benchmark of long sequences, run as a user runs it with ranks that are made up: gate, records, table, picture."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks import long_context
from benchmarks.lib import scaling_study
from benchmarks.lib.scaling_measure import measure_peak
from benchmarks.lib.sheets import pages
from benchmarks.records import append_record, read_records
from cs336_systems.cost import Hardware
from cs336_systems.host.console import run_command

PEAK = {
    "rank": asdict(Hardware("fast", 1e12, 1e11, "made up")),
    "machine_flops": 2e12,
    "gpus": 0,
    "environment": {"device": "Test CPU", "cores": 2, "torch": "2.13", "commit": "abc", "device_type": "cpu"},
}


WRONG: list[str] = []  # ways that learn something else


def made_up_ranks(here, device, ranks: int, work, recipe, steps: int, *options) -> dict:
    """Ranks that answer at once: a step takes 100 ms over the ranks."""
    if work is measure_peak:
        return PEAK
    losses = [5.5, 4.0] if recipe.parallel.cp_type in WRONG and ranks > 1 else [5.0, 4.0]
    answer = {"losses": losses, "norms": [1.0, 1.0], "memory_bytes": [2**20 // ranks] * ranks, "skipped": 0}
    answer["link"] = {"latency": 1e-4, "bandwidth": 1e9} if ranks > 1 else None
    return answer | {"samples_ms": [100.0 / ranks] * steps}


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    monkeypatch.setattr(scaling_study, "on_ranks", made_up_ranks)


def run(*arguments: str) -> int:
    return run_command(long_context.main, ["--device", "cpu", *arguments])


def test_every_way_has_a_record_and_a_row(in_tmp, capsys):
    assert run("--contexts", "64", "--cp", "2", "--rounds", "2", "--results", "here") == 0
    found = {(each.config["way"], each.config["cp"]): each for each in read_records(in_tmp / "here/long_context.jsonl")}
    assert list(found) == [("one rank", 1), ("ring", 2), ("gather", 2), ("ulysses", 2)]
    ring, alone = found["ring", 2], found["one rank", 1]
    assert ring.samples_ms == [50.0] * 4
    assert ring.metrics["ratio_median"] == 0.5
    assert (ring.metrics["memory_bytes"], ring.metrics["balance"]) == (2**19, 1.0)
    # A layer's keys and values: 2 x 64 x 128 numbers of 4 bytes; half there, half again, all of their gradients home.
    assert ring.predicted["sent_bytes"] == 4 * 2 * 2 * 64 * 128 * 4
    assert found["gather", 2].predicted["sent_bytes"] == 4 * 2 * 64 * 128 * 4
    assert ring.predicted["live_bytes"] < alone.predicted["live_bytes"]
    out = capsys.readouterr().out
    assert "ulysses" in out
    picture = (in_tmp / "here/long_context.svg").read_bytes()
    assert picture.startswith(b"<?xml")
    (other := in_tmp / "other.jsonl").write_bytes((in_tmp / "here/long_context.jsonl").read_bytes())
    append_record(replace(alone, config=alone.config | {"size": "small", "context": 128}), other)
    assert long_context.draw(other, alone).read_bytes() == picture  # of one model
    (table,) = pages(in_tmp, "long_context", long_context.sheets)
    assert table.endswith(long_context.NOTE)
    assert "| 64 | 2 | ring | 50 ms |" in table


def test_a_way_that_learns_something_else_has_no_speed(in_tmp, capsys, monkeypatch):
    monkeypatch.setitem(globals(), "WRONG", ["ulysses"])
    assert run("--contexts", "64", "--cp", "2", "--results", "here") == 2
    lines = [json.loads(line) for line in (in_tmp / "here/long_context.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "ok", "ok", "unsupported"]
    assert lines[-1]["samples_ms"] == []
    assert "64 tokens, ulysses over 2 ranks: the first loss is 5.5 and 5 on one rank" in capsys.readouterr().err


def test_a_smoke_run_records_nothing(in_tmp, capsys):
    assert run("--smoke") == 0
    shown = capsys.readouterr().out.replace(" ", "")
    assert "│64│2│ring│" in shown
    assert "│4│" not in shown
    assert not list(in_tmp.iterdir())
