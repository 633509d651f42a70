"""Times of this project's own records and logs, and of lists of runs."""

import json
from dataclasses import asdict

import pytest

from cs336_systems.cost.fitting.logged_runs import LogOptions
from cs336_systems.cost.fitting.observations import read_measured
from cs336_systems.cost.machines import system_preset
from cs336_systems.errors import UserError
from cs336_systems.presets import model_preset

A100 = LogOptions(system_preset("A100-40GB"))


def record(**changes) -> dict:
    about = {
        "size": "tiny", "year": 2024, "mode": "step", "precision": "fp32", "norm": "rmsnorm", "attention": "sdpa",
        "recompute": "nested", "recompute_every": 1, "batch_size": 16, "context": 64,
    }  # fmt: skip
    row = {
        "benchmark": "e2e", "config": about | changes.pop("config", {}), "status": "ok",
        "samples_ms": [90.0, 300.0, 100.0], "environment": {"device": "some CPU", "device_type": "cpu", "cores": 2},
        "metrics": {"peak_flops_per_s": 2e11, "bandwidth_bytes_per_s": 4e10},
    }  # fmt: skip
    return row | changes


def test_own_records(tmp_path):
    layout = {
        "size": "tiny", "objective": "bert", "d_model": 128, "d_ff": 512, "num_layers": 4, "vocab_size": 512,
        "context": 128, "micro_batch_size": 4, "recompute": "none", "layout": "2x2x1", "tp": 2, "pp": 2, "dp": 1,
        "global_batch_size": 16, "precision": "bf16", "chunks": 1, "sequence_parallel": True, "zero": 0,
    }  # fmt: skip
    timers = {"timers_ms": {"forward-compute": [9.0, 4.0], "backward-compute": [9.0, 8.0]}}
    rows = [
        record(), record(config={"mode": "forward-backward"}), record(config={"mode": "forward"}),
        record(status="out-of-memory", samples_ms=[]), record(benchmark="norms"),
        record(benchmark="scaling", config=layout, metrics=timers),
    ]  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, rows[:5])), encoding="utf-8-sig")
    found = read_measured(path, LogOptions())
    assert [(each.what, each.seconds) for each in found] == [("step", 0.1), ("compute", 0.1)]
    assert {(each.run.system.name, each.run.notes) for each in found} == {("some CPU", ())}
    assert "the record's own" in read_measured(path, A100)[0].run.notes[0]
    run = found[0].run
    assert (run.config.recompute, run.seq, run.plan.global_batch, run.plan.width) == ("segments", 64, 16, 4)
    assert (run.system.rate(4), run.system.bandwidth, run.system.processors) == (2e11, 4e10, 2)
    path.write_text(json.dumps(rows[5]))
    with pytest.raises(UserError, match="give --system"):
        read_measured(path, LogOptions())
    step, compute = read_measured(path, A100)
    run = step.run
    assert (run.plan.tp, run.plan.pp, run.plan.sequence, run.plan.width, run.config.causal) == (2, 2, True, 2, False)
    assert (compute.what, compute.seconds) == ("compute", 0.012)
    no_machine = {"peak_flops_per_s": 0, "bandwidth_bytes_per_s": 4e10}
    for text, says in (
        (json.dumps(rows[2]), "no timings that the model predicts"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"benchmark": "e2e"}', "neither records nor a training log of this project: it lacks 'samples_ms'"),
        (json.dumps(record(samples_ms=[-1.0])), "tiny 16 x 64 fp32 step: step took -0.001 s: times are positive"),
        (json.dumps(record(metrics=no_machine)), "bytes/s and cores .* above zero"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            read_measured(path, LogOptions())


def test_a_training_log_of_this_project(tmp_path):
    header = {
        "recipe": {"chunks": 1, "sequence_parallel": False, "zero": 1, "precision": "bf16"},
        "model": asdict(model_preset("tiny")), "seq": 128, "batch_size": 16, "micro_batch_size": 4,
        "mesh": {"tp": 1, "pp": 1, "dp": 2},
    }  # fmt: skip
    lines = [header, {"step": 0, "loss": 5.0}]
    timers = {"forward-compute": [1.0, 20.0], "backward-compute": [2.0, 22.0], "forward-recv": [1.0, None]}
    lines += [
        {"step": n, "step_ms": ms, "skipped": n == 2, "timers_ms": timers}
        for n, ms in enumerate((900.0, 50.0, 1.0, 52.0, 54.0))
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    step, compute = read_measured(path, A100)
    assert (compute.what, compute.seconds) == ("compute", 0.042)
    run = step.run
    assert (step.seconds, run.config) == (0.052, model_preset("tiny"))
    assert (run.plan.dp, run.plan.zero, run.plan.microbatches, run.plan.width) == (2, 1, 2, 2)
    for bad, says in (
        (lines[:2], r"train\.jsonl has no timers: train with --timers"),
        ([header | {"seq": "x"}, *lines[2:]], "is neither records nor a training log"),
    ):
        path.write_text("\n".join(map(json.dumps, bad)))
        with pytest.raises(UserError, match=says):
            read_measured(path, A100)


def test_a_list_of_runs(tmp_path):
    path = tmp_path / "runs.json"
    row = {"id": "a", "h": 1024, "a": 16, "L": 24, "s": 512, "V": 1024, "tp": 1, "pp": 1, "dp": 1, "gbs": 4}
    path.write_text(json.dumps([row, row | {"id": "b", "t_iter_s": 1.5}]))
    assert [(each.run.id, each.what, each.seconds) for each in read_measured(path, LogOptions())] == [
        ("b", "step", 1.5)
    ]
    path.write_text(json.dumps([row]))
    with pytest.raises(UserError, match="no timings: none of its runs has t_iter_s"):
        read_measured(path, LogOptions())
    with pytest.raises(UserError, match="cannot read"):
        read_measured(tmp_path / "missing.log", LogOptions())
