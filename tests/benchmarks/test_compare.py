"""Variants that take turns: what is compared, recorded and refused."""

import pytest

from benchmarks import compare
from benchmarks.lib import workload
from benchmarks.records import read_records
from cs336_systems.cost.observed import observe_passes
from cs336_systems.host.console import run_command
from cs336_systems.presets import model_preset

TINY = ("--device", "cpu", "--size", "tiny", "--batch-size", "1", "--context", "16")


def test_compare_interleaves_and_records_ratios(quick_probe, in_tmp, monkeypatch, capsys):
    monkeypatch.setattr(workload, "instead_of_kernels", lambda case: ["a reason for doubt"])
    arguments = [*TINY, "--steps", "3", "--results", "out"]
    variants = ["norm=rmsnorm", "norm=layernorm,attention=naive", "precision=bf16"]
    assert run_command(compare.main, [*arguments, "--mode", "step", *variants]) == 0
    records = read_records(in_tmp / "out/compare.jsonl")
    assert [r.config["variant"] for r in records] == variants
    chosen = [(r.config["norm"], r.config["attention"], r.config["precision"]) for r in records]
    assert chosen == [("rmsnorm", "sdpa", "fp32"), ("layernorm", "naive", "fp32"), ("rmsnorm", "sdpa", "bf16")]
    assert records[0].metrics["ratio_median"] == 1.0
    pairs = sorted(a / b for a, b in zip(records[2].samples_ms, records[0].samples_ms, strict=True))
    assert records[2].metrics["ratio_median"] == pytest.approx(pairs[1])
    out = capsys.readouterr().out
    assert "precision=bf16" in out
    assert "a reason for doubt" in out


def test_compare_needs_memory_for_all(monkeypatch, capsys):
    one = sum(observe_passes(model_preset("tiny").override(context_length=16), 1, 16).memory("step").values())
    monkeypatch.setattr(compare, "usable_memory", lambda device: 2 * one - 2)
    assert run_command(compare.main, [*TINY, "--mode", "step", "compile", "norm=rmsnorm"]) == 2
    assert "error: tiny compile with batch 1 x 16 needs" in capsys.readouterr().err
