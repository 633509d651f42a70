"""The log that this project's own training writes becomes a row of a scaling study."""

import json
from pathlib import Path

import pytest

from benchmarks.lib.scaling_logs import ScalingRun, parse_log, parse_train_log, read_runs
from benchmarks.scaling import import_log
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.train import __main__ as train

MODEL = {
    "vocab_size": 512, "d_model": 64, "d_ff": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 0,
    "feed_forward": "gelu", "num_experts": 0, "recompute": "none",
}  # fmt: skip
HEADER = {
    "recipe": {"precision": "fp16"}, "model": MODEL, "seq": 32, "batch_size": 8, "micro_batch_size": 2,
    "mesh": {"pp": 2, "dp": 2, "ep": 1, "tp": 1}, "environment": {"device": "CPU"},
}  # fmt: skip
LAST = {"steps": 40, "peak_memory": [2.0**20, 3 * 2.0**20]}


def report(step: int, ms: float, compute: float, skipped: int = 0) -> dict:
    """A log line; ranks 0 and 1 are the first stage, 2 and 3 the last."""
    timers = {"forward-recv": [None, None, 5.0, 6.0], "forward-compute": [1.0, 1.0, 2.0, compute]}
    timers |= {"forward-send": [1.0, 1.0, None, None]}
    return {"step": step, "loss": 1.0, "step_ms": ms, "timers_ms": timers, "loss_scale": 1.0, "skipped": skipped}


REPORTS = [report(10, 900.0, 90.0, skipped=3), report(20, 80.0, 7.0), report(30, 40.0, 8.0), report(40, 48.0, 9.0)]


def text(*lines: dict) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def parsed(*lines: dict, model: dict | None = None, **header) -> ScalingRun:
    (run,) = parse_train_log(text(HEADER | {"model": MODEL | (model or {})} | header, *lines), "a.jsonl")
    return run


def test_a_log_is_the_median_of_its_reports_without_skipped_steps():
    validation = {"step": 20, "validation_loss": 2.0}
    assert parsed(*REPORTS[:2], validation, *REPORTS[2:], LAST) == ScalingRun(
        "a.jsonl", 1, 2, 2, 2, 8, 6.0, {"forward-recv": 6.0, "forward-compute": 8.0}, 4, 64, 32, 512,
        gpu_memory=(1.0, 3.0), source="a.jsonl, fp16 on CPU",
    )  # fmt: skip
    skipped = parsed(REPORTS[0])
    assert (skipped.ms_per_sample, skipped.gpu_memory) == (900.0 / 8, None)
    assert parsed(*REPORTS, LAST | {"peak_memory": [0.0, 0.0]}).gpu_memory is None


def test_a_log_that_is_still_written_ends_with_its_last_whole_line():
    whole, cut = text(HEADER, *REPORTS[1:3]), json.dumps(REPORTS[3])
    (run,) = parse_train_log(whole + cut[:100], "a.jsonl")
    assert run.ms_per_sample == 60.0 / 8


@pytest.mark.parametrize(
    ("ours", "theirs"), [("none", "none"), ("segments", "full"), ("nested", "full"), ("attention", "selective")]
)
def test_recomputation_has_megatrons_names(ours, theirs):
    run = parsed(*REPORTS, model={"recompute": ours})
    assert (run.recompute, run.num_layers) == (theirs, None if ours == "nested" else 4)


@pytest.mark.parametrize("other", [{"d_ff": 170}, {"feed_forward": "swiglu"}, {"num_experts": 8}, {"num_kv_heads": 2}])
def test_flops_of_other_models_stay_unknown(other):
    assert parsed(*REPORTS, model=other).num_layers is None
    assert parsed(*REPORTS, model={"num_kv_heads": 4}).num_layers == 4


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (text(HEADER, {"step": 10, "loss": 1.0}, LAST), r"^a\.jsonl has no timers: train with --timers max$"),
        (text(HEADER), "has no step yet: wait for the first line"),
        (text({"mesh": {}}, *REPORTS), "first line does not have recipe, model, seq, batch_size, micro_batch_size"),
        (text(HEADER) + "{\n" + text(*REPORTS), "line 2 is not JSON: a log, like records, has a JSON object"),
        ("[1]\n", "line 1 is not JSON"),
        ("iteration", "line 1 is not JSON"),
        ("", "is empty"),
        (text(HEADER | {"mesh": HEADER["mesh"] | {"ep": 2}}, *REPORTS), "2 expert-parallel ranks have no place"),
        (text(HEADER | {"mesh": {}}, *REPORTS), r"is not as python -m cs336_systems.train writes its log: KeyError"),
        (text(HEADER | {"batch_size": 6}, *REPORTS), "global batch 6 is not a multiple of micro-batch 2 x dp 2 = 4"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(log, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_train_log(log, "a.jsonl")
    assert "\n" not in str(caught.value)


def test_a_real_run_is_imported_by_the_command(capsys, quick_probe, tmp_path: Path):
    path = tmp_path / "train.jsonl"
    arguments = [
        "--data", "random", "--context", "16", "--batch-size", "4", "--micro-batch-size", "2", "--num-layers", "1",
        "--device", "cpu", "--steps", "2", "--log-every", "1", "--eval-iters", "1", "--log-file", str(path),
        "--timers", "max",
    ]  # fmt: skip
    assert run_command(train.main, arguments) == 0
    (run,) = read_runs([path])
    assert (run.layout, run.global_batch_size, run.micro_batch_size) == ("1/1/1", 4, 2)
    assert (run.num_layers, run.hidden_size, run.seq_length, run.vocab_size) == (1, 128, 16, 256)
    assert {"forward-compute", "backward-compute", "optimizer"} <= set(run.timers)
    assert run.gpu_memory
    capsys.readouterr()
    assert run_command(import_log, ["--markdown", str(path)]) == 0
    assert "| 1 | 1/1/1 | 4 | 2 |" in capsys.readouterr().out


def test_what_a_run_prints_is_refused_with_a_pointer_to_its_log():
    printed = (
        "iteration        2/       6 | consumed samples:            8 | elapsed time per iteration (ms): 82.2 | "
        "global batch size:     4 |\ntime (ms) | forward-recv: 6.31 | forward-compute: 16.77\n"
    )
    with pytest.raises(UserError) as caught:
        parse_log(printed, "out.log")
    assert str(caught.value).endswith(
        "; of this project's own runs give the log file (--log-file), not what is printed"
    )
    partial = f"{'-' * 24} arguments {'-' * 24}\n  world_size ..... 2\n{printed}"
    with pytest.raises(UserError, match=r"prints first$"):
        parse_log(partial, "out.log")
