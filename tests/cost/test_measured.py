"""Times of this project's own training logs, and of lists of runs."""

import json
from dataclasses import asdict

import pytest

from cs336_systems.cost.fitting.observations import LogOptions, read_measured
from cs336_systems.cost.machines import system_preset
from cs336_systems.errors import UserError
from cs336_systems.presets import model_preset

A100 = LogOptions(system_preset("A100-40GB"))


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
    with pytest.raises(UserError, match="give --system"):
        read_measured(path, LogOptions())
    step, compute = read_measured(path, A100)
    assert (compute.what, compute.seconds) == ("compute", 0.042)
    run = step.run
    assert (step.seconds, run.config) == (0.052, model_preset("tiny"))
    assert (run.plan.dp, run.plan.zero, run.plan.microbatches, run.plan.width) == (2, 1, 2, 2)
    for bad, says in (
        (lines[:2], r"train\.jsonl has no timers: train with --timers"),
        ([header | {"seq": "x"}, *lines[2:]], "is no training log of this project"),
        ([header | {"recipe": {}}, *lines[2:]], "is no training log of this project: it lacks 'chunks'"),
        ([{"benchmark": "e2e"}], r"is no log of python -m cs336_systems\.train"),
        (["[" * 100_000], "line 1 is not JSON"),
    ):
        path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in bad))
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
