"""Shared parts of the kernel benchmarks: candidates left out and why, and a run with nothing to measure."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import norms
from benchmarks.lib import kernel_run
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
    assert run_command(norms.main, [*TINY_NORM, "--forward", "--patience", "0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "eager left out, too slow for --patience: norm 32 x 64 fp32 forward, about" in shown
    assert run_command(norms.main, [*TINY_NORM, "--budget", "0"]) == 0
    assert lines(in_tmp) == []
