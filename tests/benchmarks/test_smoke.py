"""Runs with `--smoke` are quick, show what they leave out, and write nothing."""

from importlib import import_module

import pytest

from benchmarks.lib import kernel_run
from cs336_systems.host.console import run_command
from kernels.launch import INTERPRETED
from tests.support.machine import made_up

WHAT_RAN = f"step-2026: {'fused kernels in' if INTERPRETED else 'plain torch in place'}"
SHOWN = {
    "attention": ("ours: not timed on a CPU", "eager"),
    "e2e": ("tiny",),
    "fused": ("ours: not timed on a CPU", "eager"),
    "leaderboard": ("attention-2025: not run on a CPU", "step-2026: gate: one block equals", WHAT_RAN),
    "memory": (),
    "memory --residuals": (),
    "norms": ("ours: not timed on a CPU", "eager"),
}


@pytest.mark.parametrize("words", SHOWN)
def test_a_smoke_run_is_quick_and_writes_nothing(words, in_tmp, monkeypatch, capsys, quick_probe):
    name, *options = words.split()
    module = import_module(f"benchmarks.{name}")
    for place in (module, kernel_run):
        monkeypatch.setattr(place, "measure_once", made_up, raising=False)
    monkeypatch.setattr("benchmarks.lib.options.open_records", lambda *_: pytest.fail("a smoke run wrote a record"))
    assert run_command(module.main, ["--smoke", "--device", "cpu", *options]) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in SHOWN[words])
    assert not list(in_tmp.iterdir())
