"""The end-to-end benchmark, run as a user runs it: what it plans, measures, records and refuses; and its gate."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks import e2e
from benchmarks.harness import Measurement, WrongResultError
from benchmarks.lib import workload
from benchmarks.lib.gate import check
from benchmarks.lib.workload import Case, Workload
from benchmarks.records import read_records
from cs336_systems.cost import MODES, Hardware, forward_flops
from cs336_systems.cost.observed import observe_passes
from cs336_systems.host.console import run_command
from cs336_systems.presets import ModelConfig, model_preset
from tests.support.machine import one_layer_each

CPU = torch.device("cpu")
FAST = Hardware("fast", 1e12, 1e11, "made up")
TINY = ("--size", "tiny", "--batch-size", "1", "--context", "16", "--results", "out")
CONFIG = model_preset("tiny").override(context_length=16)
SMALL = ModelConfig(vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=2, num_heads=4)


def run(*arguments: str) -> int:
    return run_command(e2e.main, ["--device", "cpu", *arguments])


def bench(usable: int, **settings) -> workload.Bench:
    return workload.Bench(workload.PassSettings(**settings), CPU, FAST, usable, {})


def test_a_run_prints_a_table_and_records_every_mode(in_tmp, capsys):
    assert run(*TINY, "--steps", "3") == 0
    records = read_records(Path("out/e2e.jsonl"))
    assert [r.config["mode"] for r in records] == list(MODES)
    shown = capsys.readouterr().out
    forward = sum(forward_flops(CONFIG, 1, 16).values())
    for record, flops in zip(records, (forward, 2 * forward, 3 * forward, 3 * forward), strict=True):
        metrics, predicted = record.metrics, record.predicted
        assert record.status == "ok"
        assert len(record.samples_ms) == 3
        assert metrics["flops"] == flops
        assert metrics["tokens_per_s"] == pytest.approx(16 / metrics["mean_ms"] * 1e3)
        assert metrics["mfu"] == pytest.approx(flops / metrics["mean_ms"] * 1e3 / metrics["peak_flops_per_s"])
        assert predicted["mean_ms"] > 0
        assert predicted["peak_memory_bytes"] == sum(predicted["memory_by_part"].values())
        assert record.config["mode"] in shown


def test_fused_kernels_pass_the_gate_and_are_named(in_tmp, quick_probe):
    short = (*TINY, "--mode", "forward", "--steps", "1")
    assert run(*short) == 0
    assert run(*short, "--kernels", "triton", "--attention", "flash") == 0
    plain, fused = read_records(Path("out/e2e.jsonl"))
    assert (fused.config["kernels"], fused.config["attention"]) == ("triton", "flash")
    assert "kernels" not in plain.config  # as in the records from before there was a choice
    what_ran = ("fused kernels in Triton's interpreter", "plain torch in place of the fused kernels")
    assert [flag.startswith(what_ran) for flag in fused.flags if "fused" in flag] == [True]
    assert not any("fused" in flag for flag in plain.flags)


@pytest.mark.parametrize(
    ("mebibytes", "end"),
    [
        (2, "; use a smaller --size"),
        # The passes take 84.4.
        (88, "what fits here: --mode forward or --mode backward or --mode forward-backward or --batch-size 8"),
    ],
)
def test_a_mode_that_does_not_fit_is_refused_and_what_fits_is_offered(mebibytes, end, monkeypatch, capsys):
    monkeypatch.setattr(e2e, "usable_memory", lambda device: mebibytes * 2**20)
    assert run("--size", "tiny", "--mode", "step") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: tiny with batch 16 x 128 needs 90.8 MiB for a step (parameters 3.2 MiB, ")
    assert line.endswith(end)


def test_a_shorter_context_is_offered_where_a_smaller_batch_does_not_help(monkeypatch, capsys):
    monkeypatch.setattr(e2e, "usable_memory", lambda device: 12 * 2**20)
    short = ("--size", "tiny", "--batch-size", "1", "--mode", "forward")
    assert run(*short, "--context", "4096") == 2
    offer = capsys.readouterr().err.split("what fits here: --context ")[1]
    assert run(*short, "--context", str(2 * int(offer))) == 2
    shorter = model_preset("tiny").override(context_length=int(offer))
    assert sum(observe_passes(shorter, 1, int(offer)).memory("forward").values()) <= 12 * 2**20


def test_modes_that_do_not_fit_are_recorded_and_the_rest_is_run(in_tmp, monkeypatch, capsys):
    just_forward = sum(observe_passes(CONFIG, 1, 16).memory("forward").values())
    monkeypatch.setattr(e2e, "usable_memory", lambda device: just_forward)
    assert run(*TINY, "--steps", "1") == 0
    records = read_records(Path("out/e2e.jsonl"))
    assert [r.status for r in records] == ["ok"] + ["out-of-memory"] * 3
    assert records[3].samples_ms == []
    assert records[3].predicted["peak_memory_bytes"] == sum(observe_passes(CONFIG, 1, 16).memory("step").values())
    assert capsys.readouterr().out.count("does not fit") == 6


def test_a_real_out_of_memory_is_recorded_too(in_tmp, monkeypatch):
    error = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(Workload, "run", Mock(side_effect=error))
    assert run(*TINY) == 0
    assert {r.status for r in read_records(Path("out/e2e.jsonl"))} == {"out-of-memory"}


def test_what_was_measured_outlives_what_fails_later(in_tmp, monkeypatch):
    monkeypatch.setattr(Workload, "backward", lambda self: self.loss.fill_(float("nan")))
    assert run(*TINY, "--steps", "1") == 2
    assert [(r.config["mode"], r.status) for r in read_records(Path("out/e2e.jsonl"))] == [("forward", "ok")]


def test_all_sizes_covers_the_edition(monkeypatch, tmp_path):
    monkeypatch.setattr(e2e, "usable_memory", lambda device: 0)
    one_layer_each(monkeypatch, workload.PassSettings)
    assert run("--all-sizes", "--year", "2024", "--results", str(tmp_path)) == 0
    records = read_records(tmp_path / "e2e.jsonl")
    assert [r.config["size"] for r in records[::4]] == ["small", "medium", "large", "xl", "2.7B"]
    assert {r.status for r in records} == {"out-of-memory"}


def test_a_plan_runs_each_pass_once():
    case = Case(SMALL, 2, "fp32", False, CPU)
    need = {mode: sum(observe_passes(SMALL, 2, 16).memory(mode).values()) for mode in MODES}
    assert bench(need["step"]).plan(case) == {"forward": ("forward",), "step": ("backward", "forward-backward", "step")}
    assert list(bench(need["step"] - 1).plan(case)) == ["forward", "forward-backward"]
    assert list(bench(need["forward-backward"] - 1).plan(case)) == ["forward"]
    assert bench(need["forward"] - 1).plan(case) == {}
    assert bench(10**12, mode="backward").plan(case) == {"backward": ("backward",)}


def test_long_passes_are_repeated_less():
    case = Case(SMALL, 16, "fp32", False, CPU)
    slow = replace(bench(10**12), hardware=Hardware("slow", 1e6, 1e5, ""))
    assert slow.passes(case, "step") == 2 + 2
    assert replace(slow, settings=workload.PassSettings(steps=7, warmup=0)).passes(case, "step") == 7
    assert bench(10**12).passes(case, "step") == 2 + 5


def test_a_modes_peak_is_its_own():
    first, later = {"forward": 5, "backward": 7, "optimizer": 9}, {"forward": 8, "backward": 11, "optimizer": 10}
    done = Measurement({}, first, later)
    assert workload.peak_of(done, "forward-backward", False) == 7  # before the optimizer made its state
    assert workload.peak_of(done, "step", False) == 11
    assert workload.peak_of(done, "backward", compiled=True) is None  # the compiler was in it
    assert workload.peak_of(done, "step", compiled=True) == 11
    assert workload.peak_of(Measurement({}), "step", False) is None


@pytest.mark.parametrize(("warmup", "order"), [("0", ["forward", "step", "gate"]), ("1", ["gate"])])
def test_a_wrong_model_leaves_no_figure_and_a_warm_up_of_zero_keeps_the_start_cold(
    warmup, order, monkeypatch, in_tmp, capsys
):
    began, true_run, true_check = [], Workload.run, e2e.check
    monkeypatch.setattr("cs336_systems.model.attention.F.scaled_dot_product_attention", lambda q, k, v, **_: v)
    monkeypatch.setattr(e2e, "check", lambda case: began.append("gate") or true_check(case))
    monkeypatch.setattr(Workload, "run", lambda self, mode, *rest: began.append(mode) or true_run(self, mode, *rest))
    assert run(*TINY, "--steps", "1", "--warmup", warmup) == 2
    assert began == order
    assert "is off its reference by" in capsys.readouterr().err
    assert (in_tmp / "out/e2e.jsonl").read_text() == ""


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.lib.workload.shutil.which", lambda name: None)
    assert run("--smoke", "--compile") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: --compile needs one of g++, clang++, c++ on the PATH")


def test_a_workload_trains():
    load = Workload(Case(SMALL, 4, "fp32", False, CPU))
    load.run("forward", 0, 1)
    assert not load.loss.requires_grad  # nothing was kept for a backward
    before = load.loss.item()
    assert all(p.grad is None for p in load.weights.parameters())
    load.run("step", 0, 20)
    assert load.loss.item() < before
    assert all(p.grad is None for p in load.weights.parameters())


# The course's width, at which a sum has as many terms as there; the rest is smaller, and quicker.
WIDE = replace(model_preset("small"), d_ff=256, vocab_size=64, context_length=32)
GATED = {"tiny": model_preset("tiny"), "wide": WIDE}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("size", "attention"), [("tiny", "sdpa"), ("wide", "naive")])
def test_the_gate_passes_what_is_right(size, precision, attention):
    error, tolerance = check(Case(replace(GATED[size], attention=attention), 2, precision, False, CPU))
    assert 0 < error < tolerance


BROKEN = {
    "no causal mask": lambda q, k, v, **_: F.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v,
    "no scale": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v, is_causal=True, scale=1.0),
    "no output": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v, is_causal=True) * 0,
    "no gradient": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v, is_causal=True).detach(),
    "neighbour's value": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v.roll(1, dims=1), is_causal=True),
}
TRUE_ATTENTION = F.scaled_dot_product_attention


# In bf16, whose tolerance is the widest: what it stops is stopped in a finer format. One mistake shows that those have
# tolerances of their own.
@pytest.mark.parametrize(
    ("name", "size", "precision"),
    [
        *((name, size, "bf16") for name in BROKEN for size in GATED),
        *(("no scale", "tiny", f) for f in ("fp32", "fp16")),
    ],
)
def test_the_gate_stops_what_is_wrong(name, size, precision, monkeypatch):
    case = Case(replace(GATED[size], attention="sdpa"), 2, precision, False, CPU)
    monkeypatch.setattr("cs336_systems.model.attention.F.scaled_dot_product_attention", BROKEN[name])
    with pytest.raises(WrongResultError):
        check(case)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_a_compiled_model_passes_the_gate(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # starting others takes longer than they save
    error, tolerance = check(Case(replace(SMALL, num_layers=1), 2, "fp32", True, CPU))
    assert 0 < error < tolerance
