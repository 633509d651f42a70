"""Logs of Megatron-LM, whole and mangled, and of this project's own training become runs of a scaling study."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.lib.scaling_logs import ScalingRun, parse_log, parse_published, parse_train_log, read_runs
from benchmarks.scaling import import_log
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.train import __main__ as train

ARGUMENTS = {
    "checkpoint_activations": True, "data_parallel_size": 2, "ffn_hidden_size": 256, "global_batch_size": 32,
    "hidden_size": 64, "make_vocab_size_divisible_by": 128, "micro_batch_size": 4, "num_layers": 4,
    "pipeline_model_parallel_size": 2, "seq_length": 128, "tensor_model_parallel_size": 2,
    "vocab_file": "/somewhere/bert-large-cased-vocab.txt", "world_size": 8,
}  # fmt: skip
TIMERS = {"forward-compute": 53.94, "forward-recv": 11.05, "backward-compute": 99.2, "optimizer": 10.59}
LINE = "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in TIMERS.items())


def block(**changes) -> str:
    """The arguments as Megatron-LM prints them; None leaves one out."""
    named = {name: value for name, value in (ARGUMENTS | changes).items() if value is not None}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in named.items()]
    return "\n".join([f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 21}"])


def notes(name: str = "x", count: str = "3200", time: str = "7.25", **changes) -> str:
    return (
        f"## {name}\n\n{block(**changes)}\n\nGPU util: ~83%\nGPU mem: 5624MiB - 6176MiB / 40537MiB\n\n"
        f"(over 100 iterations = {count} samples)\n{time} ms per sample \n\n{LINE}\n\n---\n"
    )


def iteration(number: int, ms: float, skipped: int = 0) -> str:
    fields = (
        f" iteration {number:8d}/ 2000000", f"consumed samples: {number * 32:12d}",
        f"elapsed time per iteration (ms): {ms:.1f}", "learning rate: 1.000E-04", "global batch size:    32",
        "lm loss: 1.000000E+01", "loss scale: 65536.0", "grad norm: 2.125",
        f"number of skipped iterations: {skipped:3d}", "number of nan iterations:   0 |",
    )  # fmt: skip
    return " | ".join(fields)


def test_notes_with_several_runs():
    text = notes("Single node") + notes(
        "Two nodes", "1,280", "2.95", data_parallel_size=4, world_size=16, global_batch_size=64
    )
    first, second = parse_log(text.replace("~83%", "83~%", 1), "notes.txt")
    assert first == ScalingRun(
        "Single node", 2, 2, 2, 4, 32, 7.25, TIMERS, 4, 64, 128, 29_184, "full", 100, 3200, 83.0, (5624, 6176), 40_537,
        None, False, "notes.txt",
    )  # fmt: skip
    assert (second.name, second.world, second.micro_batches, second.samples) == ("Two nodes", 16, 4, 1280)
    assert (second.ms_per_sample, second.gpu_util) == (2.95, 83.0)


def test_a_training_log_is_the_median_of_its_windows_without_skipped_steps():
    words = " > padded vocab (size: 28996) with 188 dummy tokens (new size: 29184)"
    memory = "(after 10 iterations) memory (MB) | allocated: 1.0 | reserved: 7.0 | max reserved:"
    lines = [words, iteration(10, 900.0, skipped=9), f"[Rank 0] {memory} 9.5", f"[Rank 4] {memory} 7.5"]
    lines.append("time (ms) | forward-compute: 500.00 | optimizer: 1.00")
    for number, ms, forward in ((20, 240.0, 50.0), (30, 232.0, 60.0), (40, 224.0, 55.0)):
        lines += [iteration(number, ms), f"time (ms) | forward-compute: {forward:.2f} | optimizer: 9.00"]
    lines.append("time (ms) | save-checkpoint: 3000.00")
    (run,) = parse_log("\n".join([block(vocab_file=None), *lines]), "train.log")
    assert run.ms_per_sample == 232.0 / 32
    assert run.timers == {"forward-compute": 55.0, "optimizer": 9.0}
    assert (run.iterations, run.samples, run.vocab_size, run.gpu_memory) == (30, 960, 29_184, (7.5, 9.5))
    (skipped,) = parse_log(f"{block()}\n{iteration(10, 64.0, skipped=1)}\n{LINE}")
    assert (skipped.ms_per_sample, skipped.iterations, skipped.timers) == (2.0, None, TIMERS)


@pytest.mark.parametrize(
    ("changes", "layers", "recompute", "words"),
    [
        ({"ffn_hidden_size": 170, "checkpoint_activations": None}, None, "none", 29_184),
        ({"checkpoint_activations": None, "recompute_granularity": "selective"}, 4, "selective", 29_184),
        ({"swiglu": True}, None, "full", 29_184),
        ({"num_experts": 8, "vocab_file": "own.txt"}, None, "full", None),
        ({"tensor_model_parallel_size": 1, "data_parallel_size": 4}, 4, "full", 29_056),
        ({"padded_vocab_size": 30_000}, 4, "full", 30_000),
    ],
)  # fmt: skip
def test_models_recomputation_and_padded_words(changes, layers, recompute, words):
    """FLOPs of other models than the formula's stay unknown, as they have no layers."""
    (run,) = parse_log(notes(**changes))
    assert (run.num_layers, run.recompute, run.vocab_size) == (layers, recompute, words)


@pytest.mark.parametrize("width", [30, 37, 61, 80, 97])
def test_wrapped_lines_are_put_together(width):
    """A terminal cuts anywhere, in names and numbers, and at some widths right between two fields."""
    texts = [notes() + "12: 99\nforward-recv 1.00\n"]  # what follows a whole line is left alone
    # A piece of an iteration's line is known by the bar in it, and names are long.
    texts += [f"{block()}\n{iteration(10, 64)}\n{LINE}"] * (width > 60)
    for text in texts:
        cut = [
            line[i : i + width] if line.startswith(("time", " iteration")) else line
            for line in text.splitlines()
            for i in (range(0, len(line), width) if line.startswith(("time", " iteration")) else (0,))
        ]
        assert len(cut) > len(text.splitlines())
        assert parse_log(text)[0].timers == TIMERS
        assert parse_log("\n".join(cut)) == parse_log(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", r"x.log has no timers .*looked for .*time \(ms\) \| forward-compute"),
        (f"{block()}\ntime (ms) | save-checkpoint: 3000.00", "no timers of a training step"),
        (LINE, "tensor_model_parallel_size is not there in the block"),
        (f"{block(world_size='many')}\n{LINE}", "world_size says 'many'"),
        (f"{block(world_size=16)}\n{LINE}", "world_size 16 is not tensor 2 x pipeline 2 x data 2 = 8"),
        (f"{block()}\n{LINE}", "not the time of an iteration: looked for `elapsed time per iteration"),
        (f"{block(global_batch_size=30)}\n1.0 ms per sample\n{LINE}", "30 is not a multiple of .* 4 x dp 2 = 8"),
        (f"{block()}\n0.0 ms per sample\n{LINE}", "must be positive, not 0.0 ms"),
        (f"{block(micro_batch_size=0)}\n1.0 ms per sample\n{LINE}", "micro_batch_size must be a whole .* not 0"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_log(text, "x.log")
    assert "\n" not in str(caught.value)


def test_published_runs_come_back(tmp_path: Path):
    (run,) = parse_log(notes())
    runs, log = tmp_path / "runs.json", tmp_path / "a.log"
    runs.write_text(json.dumps({"source": "here", "common": {"seq_length": 128}, "runs": [asdict(run)]}))
    log.write_text(notes())
    back, parsed = read_runs([runs, log])
    assert back == replace(run, gpu_memory=list(run.gpu_memory))
    assert parsed.source == "a.log"
    with pytest.raises(UserError, match="cannot read"):
        read_runs([tmp_path / "none.log"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"source": "", "runs": []}', r"runs\.json has no run"),
        *((text, r"runs\.json does not hold runs") for text in ("{", "[]", '{"runs": [{}]}')),
        ('{"source": "", "runs": [3]}', r"runs\.json does not hold runs"),
        ('{"source": "", "runs": [{"name": "x"}]}', r"runs\.json does not hold runs"),
        ('{"source": "", "runs": [{"speed": 1}]}', "unexpected keyword argument 'speed'"),
    ],
)
def test_what_holds_no_runs_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_published(text, "runs.json")


# Logs of cs336_systems.train.

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
    ("model", "layers", "recompute"),
    [
        *(({"recompute": ours}, 4, theirs) for ours, theirs in (("segments", "full"), ("attention", "selective"))),
        ({"recompute": "nested"}, None, "full"),
        *((other, None, "none") for other in ({"d_ff": 170}, {"feed_forward": "swiglu"}, {"num_experts": 8})),
        ({"num_kv_heads": 2}, None, "none"),
        ({"num_kv_heads": 4}, 4, "none"),
    ],
)
def test_models_and_recomputation_in_megatrons_names(model, layers, recompute):
    run = parsed(*REPORTS, model=model)
    assert (run.num_layers, run.recompute) == (layers, recompute)


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
def test_what_is_missing_in_a_log_of_train_is_one_line(log, message):
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
    assert (run.num_layers, run.hidden_size, run.seq_length, run.vocab_size) == (1, 128, 16, 256)
    assert {"forward-compute", "backward-compute", "optimizer"} <= set(run.timers)
    assert run.gpu_memory
    capsys.readouterr()
    assert run_command(import_log, [str(path)]) == 0
    assert "│1│1/1/1│4│2│" in capsys.readouterr().out.replace(" ", "")


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
