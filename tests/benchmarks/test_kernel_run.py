"""Shared parts of the kernel benchmarks: candidates left out and why, and a run with nothing to measure."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import norms
from benchmarks.lib import kernel_run
from benchmarks.lib.contest import Contest
from benchmarks.lib.kernel import SizedTask
from benchmarks.lib.kernel_run import Session
from benchmarks.lib.options import Recorder
from cs336_systems.cost import Hardware
from cs336_systems.host.console import run_command

TINY_NORM = (
    *("--rows", "32", "--columns", "64", "--candidate", "layernorm", "--candidate", "eager"),
    *("--device", "cpu", "--rounds", "4", "--results", "out"),
)


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    """Ceilings that need not be measured, and out of reach."""
    monkeypatch.setattr(kernel_run, "measure_once", lambda *_: Hardware("fast", 1e15, 1e15, "made up"))


def lines(folder):
    return [json.loads(line) for line in (folder / "out/norms.jsonl").read_text().splitlines()]


def test_the_budget_lets_no_other_shape_begin(in_tmp, monkeypatch, capsys):
    ticks = iter(range(100))
    monkeypatch.setattr(kernel_run, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    assert run_command(norms.main, [*TINY_NORM, "--columns", "32", "--budget", "1.5"]) == 0
    assert {(r["config"]["columns"], r["config"]["pass"]) for r in lines(in_tmp)} == {(64, "forward")}
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "not begun: the budget of 1.5 s is used up: norm 32 x 64 fp32 forward-backward; norm 32 x 32 fp32 forward;"
        in shown
    )


def test_a_run_that_leaves_everything_out_says_so_and_is_no_error(in_tmp, capsys):
    assert run_command(norms.main, [*TINY_NORM, "--patience", "0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "eager left out, too slow for --patience: norm 32 x 64 fp32 forward, about" in shown
    assert run_command(norms.main, [*TINY_NORM, "--budget", "0"]) == 0
    assert lines(in_tmp) == []


def test_a_candidate_that_was_slow_is_expected_to_be_slow_and_gets_fewer_rounds(in_tmp, monkeypatch):
    settings = norms.NormSettings(device="cpu", rounds=8, patience=8.0, results=in_tmp)
    session = Session("norms", settings, Recorder(None), torch.device("cpu"))
    task, played = SizedTask("norm", (32, 64), "fp32", "forward"), []
    monkeypatch.setattr(session, "names", lambda kernel: ["eager"])
    monkeypatch.setattr(Contest, "play", lambda contest, rounds: played.append(rounds) or contest.entries.clear())
    predicted = session.seconds_of(norms.NORM, task)
    for seconds, note in ((0.1, False), (1.1, False), (1.2, True)):
        session.slowness["eager", "norm", "fp32"] = seconds / predicted
        session.compare(norms.NORM, task)
        assert bool(session.notes) == note
    assert played == [8, 7]
    assert session.notes == {"eager left out, too slow for --patience": [f"{task}, about 1.2 s a call"]}
