"""Training, run as a user runs it."""

import json
import math
from pathlib import Path

import pytest
import torch

from cs336_systems import train as training
from cs336_systems.comm import distributed
from cs336_systems.console import run_command
from cs336_systems.evaluate import sample_text
from cs336_systems.model import TransformerLM
from cs336_systems.presets import model_preset
from cs336_systems.train import Recipe, Trainer, train
from tests import ranks
from tests.tolerances import bound

SHORT = ("--device", "cpu", "--batch-size", "8", "--context", "32", "--warmup-steps", "5")


def run(*arguments: str) -> int:
    return run_command(training.main, [*SHORT, *arguments])


def test_text_is_learned(in_tmp, capsys):
    assert run("--steps", "60", "--lr", "3e-3", "--sample-bytes", "40", "--log-file", "logs/run.jsonl") == 0
    header, *steps, final = [json.loads(line) for line in (in_tmp / "logs/run.jsonl").read_text().splitlines()]
    assert header["recipe"]["steps"] == 60
    assert len(header["sha256"]) == 64
    assert header["environment"]["torch"] == torch.__version__
    assert [line["step"] for line in steps] == [10, 20, 30, 40, 50, 60]
    assert set(steps[0]) == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu"}
    losses = [line["loss"] for line in steps]
    assert losses[0] > losses[2] > losses[-1]
    assert losses[-1] < 3.6
    assert final["validation_loss"] < 3.8
    shown = capsys.readouterr().out
    assert final["sample"] in shown
    assert final["sample"].startswith("def ")
    assert "(guessing: 5.545)" in shown


def test_random_bytes_are_not(in_tmp):
    with distributed() as group:
        final = train(Recipe(data=("random",), steps=60, batch_size=8, context=32, device="cpu"), group)
    # Fresh random bytes cost ln 256 under the uniform guess and more under any other. The mean over 8 x 8 x 32 tokens
    # of a guess that is nearly uniform has a deviation of less than 0.3 / sqrt(2048) = 0.007.
    assert math.log(256) - 0.04 < final["validation_loss"] < 1.01 * math.log(256)
    assert "sample" not in final


def test_training_is_a_function_of_the_seed():
    def weights(seed):
        recipe = Recipe(data=("random",), batch_size=4, context=16, seed=seed, device="cpu")
        with distributed() as group:
            trainer = Trainer(recipe, group)
            for step in range(3):
                trainer.step(step)
            return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_the_horizon_belongs_to_the_schedule(in_tmp):
    rates = {}
    for steps in (12, 24):
        run("--data", "random", "--steps", str(steps), "--decay-steps", "20", "--log-every", "1", "--log-file", "log")
        lines = (in_tmp / "log").read_text().splitlines()[1:-1]
        rates[steps] = [json.loads(line)["lr"] for line in lines]
    assert rates[24][:12] == rates[12]
    assert rates[24][20:] == [2e-4] * 4


def test_own_text(in_tmp, capsys):
    (in_tmp / "a.txt").write_text("to be or not to be, " * 50)
    (in_tmp / "b.txt").write_text("that is the question; " * 50)
    assert run("--data", "a.txt", "b.txt", "--steps", "3", "--prompt", "\udcff", "--log-file", "log") == 0
    assert run("--data", "a.txt", "--steps", "3", "--precision", "bf16", "--log-file", "log") == 0
    assert "a.txt, b.txt" in capsys.readouterr().out


def test_a_sample_is_safe_to_print():
    model = TransformerLM(model_preset("tiny"))
    text = sample_text(model, 8, "\x1b[31m", 200, seed=0)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert text == sample_text(model, 8, "\x1b[31m", 200, seed=0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--data", "missing.txt"), "error: cannot read missing.txt: No such file or directory"),
        (
            ("--data", "short.txt"),
            "error: short.txt has 3 tokens; a context of 32 needs 33: use a longer text",
        ),
        (("--data", "just.txt"), "error: just.txt, training has 31 tokens; a context of 32 needs 33"),
        (("--size", "bert-345m"), "error: bert-345m is an encoder; this command trains decoders, such as --size tiny"),
        (("--size", "gpt3-175b"), "error: gpt3-175b with batch 8 x 32 needs 2.5 TiB for a step"),
        (("--zero", "4"), "error: Invalid value for '--zero': 4 is not in the range 0<=x<=3."),
        (("--backend", "nccl"), "error: --backend nccl moves tensors between GPUs, and there is none here"),
        (("--steps", "0"), "error: Invalid value for '--steps'"),
        (("stray.txt",), "error: unexpected argument 'stray.txt'; text is named with --data FILE ..."),
        (("--log-file", "short.txt/log", "--steps", "1"), "error: cannot write the log short.txt/log: "),
        (("--lr", "1e9", "--steps", "40", "--clip", "1e9"), "error: the loss or its gradient is nan after"),
        (("--lr", "-1"), "error: Invalid value for '--lr': -1.0 is not in the range x>=0."),
        (("--clip", "0"), "error: Invalid value for '--clip': 0.0 is not in the range x>0."),
        (("--decay-steps", "4"), "error: a warm-up of 5 steps ends after the decay, at step 4"),
        (("--data", "."), "error: cannot read .: Is a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, arguments, line, capsys):
    (in_tmp / "short.txt").write_text("abc")
    (in_tmp / "just.txt").write_text("x" * 34)
    assert run(*arguments) == 2
    errors = [error for error in capsys.readouterr().err.splitlines() if not error.startswith("training ")]
    assert len(errors) == 1
    assert errors[0].startswith(line)


def test_help_lists_every_setting(capsys):
    assert run_command(training.main, ["--help"]) == 0
    shown = capsys.readouterr().out
    for name in Recipe.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


def ranks_case(group, folder: str, stage: int) -> dict:
    recipe = Recipe(
        data=("random",),
        batch_size=8,
        context=16,
        device="cpu",
        zero=stage,
        steps=6,
        log_file=Path(folder, "log"),
        log_every=2,
    )
    final = train(recipe, group)
    return {"loss": final["validation_loss"], "rank": group.rank()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_learn_what_one_process_learns(tmp_path, stage):
    logs = []
    for world_size in (1, 2):
        ranks.run(ranks_case, world_size, folder=str(tmp_path), stage=stage if world_size > 1 else 0)
        header, *steps, _ = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert header["environment"]["world_size"] == world_size
        logs.append([(line["step"], line["loss"], line["grad_norm"]) for line in steps])
    for alone, together in zip(*logs, strict=True):
        # Six steps of some hundred roundings in a row, in sums of 128 terms whose roundings add like a random walk.
        assert together == pytest.approx(alone, rel=bound(torch.float32, stages=6 * 100, longest_sum=12))


def test_a_batch_that_does_not_divide_is_refused():
    error = ranks.run_failing(odd_case, 2)[0]
    assert error == ("UserError", "--batch-size 7 does not divide over 2 ranks")


def odd_case(group) -> None:
    Trainer(Recipe(data=("random",), batch_size=7, context=16, device="cpu"), group)
