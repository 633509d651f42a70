"""Logs of Megatron-LM, whole and mangled, become runs."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.lib.scaling_logs import ScalingRun, parse_log, parse_published, read_runs
from cs336_systems.errors import UserError

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


def notes(name: str, count: str, time: str, **changes) -> str:
    return (
        f"## {name}\n\n{block(**changes)}\n\nGPU util: ~83%\nGPU mem: 5624MiB - 6176MiB / 40537MiB\n\n"
        f"({count})\n{time} ms per sample \n\n{LINE}\n\n---\n"
    )


def iteration(number: int, ms: float, skipped: int = 0, batch: int = 32) -> str:
    fields = (
        f" iteration {number:8d}/ 2000000", f"consumed samples: {number * batch:12d}",
        f"elapsed time per iteration (ms): {ms:.1f}", "learning rate: 1.000E-04", f"global batch size: {batch:5d}",
        "lm loss: 1.000000E+01", "loss scale: 65536.0", "grad norm: 2.125",
        f"number of skipped iterations: {skipped:3d}", "number of nan iterations:   0 |",
    )  # fmt: skip
    return " | ".join(fields)


TRAINING = "\n".join(
    [
        " > padded vocab (size: 28996) with 188 dummy tokens (new size: 29184)",
        "time (ms) | model-and-optimizer-setup: 900.00 | train/valid/test-data-iterators-setup: 4.00",
        iteration(10, 900.0, skipped=9),
        *(
            f"[Rank {rank}] (after 10 iterations) memory (MB) | allocated: 1.0 | reserved: 7.0 | max reserved: {most}"
            for rank, most in ((0, 9.5), (4, 7.5))
        ),
        "time (ms) | forward-compute: 500.00 | optimizer: 1.00",
        *(
            f"{iteration(number, ms)}\ntime (ms) | forward-compute: {forward:.2f} | optimizer: 9.00"
            for number, ms, forward in ((20, 240.0, 50.0), (30, 232.0, 60.0), (40, 224.0, 55.0))
        ),
        "time (ms) | save-checkpoint: 3000.00",
    ]
)  # fmt: skip


def test_notes_with_several_runs():
    text = notes("Single node", "over 100 iterations = 3200 samples", "7.25") + notes(
        "Two nodes", "over 100 iterations = 1,280 samples", "2.95", data_parallel_size=4, world_size=16,
        global_batch_size=64,
    )  # fmt: skip
    text = text.replace("~83%", "83~%", 1)
    first, second = parse_log(text, "notes.txt")
    assert first == ScalingRun(
        "Single node", 2, 2, 2, 4, 32, 7.25, TIMERS, 4, 64, 128, 29_184, "full", 100, 3200, 83.0, (5624, 6176), 40_537,
        None, False, "notes.txt",
    )  # fmt: skip
    assert (second.name, second.world, second.micro_batches, second.samples) == ("Two nodes", 16, 4, 1280)
    assert (second.ms_per_sample, second.gpu_util) == (2.95, 83.0)


def test_a_training_log_is_the_median_of_its_windows_without_skipped_steps():
    (run,) = parse_log(f"{block(vocab_file=None)}\n{TRAINING}", "train.log")
    assert run.ms_per_sample == 232.0 / 32
    assert run.timers == {"forward-compute": 55.0, "optimizer": 9.0}
    assert (run.iterations, run.samples, run.vocab_size, run.gpu_memory) == (30, 960, 29_184, (7.5, 9.5))
    (skipped,) = parse_log(f"{block()}\n{iteration(10, 64.0, skipped=1)}\n{LINE}")
    assert (skipped.ms_per_sample, skipped.iterations, skipped.timers) == (2.0, None, TIMERS)


def test_a_batch_that_was_ramped_up_counts_with_its_last_size():
    log = "\n".join(f"{iteration(n, ms, batch=batch)}\n{LINE}" for n, ms, batch in ((10, 90.0, 16), (20, 96.0, 32)))
    (run,) = parse_log(f"{block()}\n{log}")
    assert (run.global_batch_size, run.ms_per_sample) == (32, 3.0)


def test_times_over_ranks_count_the_most():
    log = [block(checkpoint_activations=None, recompute_granularity="selective"), iteration(10, 232.0)]
    log += ["(min, max) time across ranks (ms):", f"    {'forward-compute ':.<48}: (41.0, 43.42)", "done"]
    (run,) = parse_log("\n".join(log))
    assert (run.timers, run.over_ranks, run.recompute) == ({"forward-compute": 43.42}, True, "selective")
    (most,) = parse_log(f"{log[0]}\n{log[1]}\nmax time across ranks (ms):\n    {'forward-compute ':.<48}: 43.42\n")
    assert most.timers == {"forward-compute": 43.42}


@pytest.mark.parametrize("width", [30, 37, 61, 80, 97])
def test_wrapped_lines_are_put_together(width):
    """A terminal cuts anywhere, in names and numbers, and at some widths right between two fields."""
    texts = [notes("x", "over 100 iterations = 3200 samples", "7.25")]
    # A piece of an iteration's line is known by the bar in it, and names are long.
    texts += [f"{block()}\n{iteration(10, 64)}\n{LINE}"] * (width > 60)
    for text in texts:
        cut = [
            line[i : i + width] if line.startswith(("time", " iteration")) else line
            for line in text.splitlines()
            for i in (range(0, len(line), width) if line.startswith(("time", " iteration")) else (0,))
        ]
        assert len(cut) > len(text.splitlines())
        assert parse_log("\n".join(cut)) == parse_log(text)


def test_lines_after_a_whole_one_are_left_alone():
    (run,) = parse_log(notes("x", "over 100 iterations = 3200 samples", "7.25") + "12: 99\nforward-recv 1.00\n")
    assert run.timers == TIMERS


@pytest.mark.parametrize("other", [{"ffn_hidden_size": 170}, {"swiglu": True}, {"num_experts": 8}])
def test_flops_of_other_models_stay_unknown(other):
    (run,) = parse_log(notes("x", "over 100 iterations = 3200 samples", "7.25", **other))
    assert run.num_layers is None


def test_the_vocabulary_is_what_the_log_says_or_the_named_file_padded():
    def size(**changes) -> int | None:
        return parse_log(notes("x", "over 100 iterations = 3200 samples", "7.25", **changes))[0].vocab_size

    assert size(tensor_model_parallel_size=1, data_parallel_size=4) == 29_056
    assert size(padded_vocab_size=30_000) == 30_000
    assert size(vocab_file="own.txt") is None


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
    (run,) = parse_log(notes("x", "over 100 iterations = 3200 samples", "7.25"))
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"source": "here", "common": {"seq_length": 128}, "runs": [asdict(run)]}))
    log = tmp_path / "a.log"
    log.write_text(notes("x", "over 100 iterations = 3200 samples", "7.25"))
    back, parsed = read_runs([path, log])
    assert back == replace(run, gpu_memory=list(run.gpu_memory))
    assert parsed.source == "a.log"
    with pytest.raises(UserError, match=r"runs\.json has no run"):
        parse_published('{"source": "", "runs": []}', "runs.json")
    for broken in (
        "{",
        "[]",
        '{"runs": [{}]}',
        '{"source": "", "runs": [{"name": "x"}]}',
        '{"source": "", "runs": [3]}',
    ):
        with pytest.raises(UserError, match=r"runs\.json does not hold runs"):
            parse_published(broken, "runs.json")
    with pytest.raises(UserError, match="unexpected keyword argument 'speed'"):
        parse_published('{"source": "", "runs": [{"speed": 1}]}', "runs.json")
    with pytest.raises(UserError, match="cannot read"):
        read_runs([tmp_path / "none.log"])
