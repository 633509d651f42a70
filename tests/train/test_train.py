"""Training, run as a user runs it."""

import fcntl
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems.comm import Place, distributed
from cs336_systems.cost.flops import model_flops
from cs336_systems.host.console import run_command
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.presets import model_preset
from cs336_systems.train import __main__ as training
from cs336_systems.train.__main__ import train
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.run_log import sample_text
from cs336_systems.train.trainer import Trainer
from tests.support import ranks
from tests.support.layout_cases import write_text
from tests.support.machine import made_up
from tests.support.tolerances import bound

SHORT = "--device cpu --batch-size 8 --context 32 --warmup-steps 5"
ONE_STEP = "--steps 1 --num-layers 1 --eval-iters 1"


def run(*lines: str) -> int:
    """The exit code of a training command."""
    return run_command(training.main, " ".join((SHORT, *lines)).split())


def lines_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_text_is_learned(in_tmp, capsys):
    assert run("--steps 60 --lr 3e-3 --num-layers 2 --sample-bytes 40 --log-file logs/run.jsonl") == 0
    header, *steps, final = lines_of(in_tmp / "logs/run.jsonl")
    assert header["recipe"]["steps"] == 60
    assert len(header["sha256"]) == 64
    assert header["environment"]["torch"] == torch.__version__
    assert [line["step"] for line in steps] == [10, 20, 30, 40, 50, 60]
    assert set(steps[0]) == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_memory"}
    losses = [line["loss"] for line in steps]
    assert losses[0] > losses[2] > losses[-1]
    assert losses[-1] < 3.6
    assert final["validation_loss"] < 3.8
    shown = capsys.readouterr().out
    assert final["sample"] in shown
    assert final["sample"].startswith("def ")
    assert "(guessing: 5.545); peak resident memory of a rank " in shown


def test_training_is_a_function_of_the_seed():
    def weights(seed: int) -> torch.Tensor:
        trainer = Trainer(Recipe.of(data=("random",), num_layers=1, batch_size=4, context=16, seed=seed, device="cpu"))
        trainer.step(0)
        return torch.cat([p.detach().flatten() for p in trainer.stage.parameters()])

    with distributed():
        first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_own_text(in_tmp, capsys, quick_probe):
    (in_tmp / "a.txt").write_text("to be or not to be, " * 50)
    (in_tmp / "b.txt").write_text("that is the question; " * 50)
    quick = f"{ONE_STEP} --sample-bytes 8 --log-file log"
    assert run("--data a.txt b.txt --prompt \udcff", quick) == 0
    assert run("--data a.txt --precision bf16", quick) == 0
    assert "a.txt, b.txt" in capsys.readouterr().out


def test_a_sample_is_safe_to_print():
    text = sample_text(TransformerLM(model_preset("tiny")), torch.device("cpu"), 8, "\x1b[31m", 50, 0)
    assert all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--data short.txt", "short.txt has 3 tokens; a context of 32 needs 33: use a longer text"),
        ("--data just.txt", "just.txt, training has 31 tokens; a context of 32 needs 33"),
        ("--data short.txt --objective bert", "short.txt, training (1 of 1 documents, split 949,50,1): "),
        ("--size gpt3-175b", "gpt3-175b with batch 8 x 32 needs 2.5 TiB for a step"),
        ("--zero 4", "Invalid value for '--zero': 4 is not in the range 0<=x<=3."),
        ("--backend nccl", "--backend nccl moves tensors between GPUs, and there is none here"),
        ("--steps 0", "Invalid value for '--steps'"),
        (f"--steps {10**20}", f"Invalid value for '--steps': {10**20} is not in the range 1<=x<="),
        ("--num-layers 10001", "Invalid value for '--num-layers': 10001 is not in the range 1<=x<=10000."),
        ("--on-nonfinite hope", "Invalid value for '--on-nonfinite': 'hope' is not one of 'stop', 'skip'."),
        ("stray.txt", "unexpected argument 'stray.txt'; text is named with --data FILE ..."),
        ("--data short.txt --log-every 1 stray.txt", "unexpected argument 'stray.txt'; text is named with --data F"),
        ("--data=short.txt --adam-beta1 0.8 stray.txt", "unexpected argument 'stray.txt'; text is named with --data F"),
        ("--num-layers 1 --lr 1e9 --clip 1e9", "the gradient, unlike the loss, is not finite in step 2 (gradient no"),
        ("--lr -1", "Invalid value for '--lr': -1.0 is not in the range x>=0."),
        ("--clip 0", "Invalid value for '--clip': 0.0 is not in the range x>0."),
        ("--data .", "cannot read .: Is a directory"),
        ("--data random --data short.txt", "--data random goes with no other data: drop it, or"),
        ("--rotary-base 5e5", "--rotary-base is about rotary positions, and these are learned"),
        ("--timeout 1e-9", "Invalid value for '--timeout': 1e-09 is not in the range 0.001<=x<="),
        ("--no-such 1 --steps 1 --nor-this=2 --no-such", "no such options: --no-such, --nor-this; train --help lists"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, arguments, line, capsys, quick_probe):
    (in_tmp / "short.txt").write_text("abc")
    (in_tmp / "just.txt").write_text("x" * 34)
    assert run(arguments) == 2
    (error,) = [each for each in capsys.readouterr().err.splitlines() if not each.startswith("training ")]
    assert error.startswith(f"error: {line}")


@pytest.mark.parametrize(("ranks_here", "share"), [(1, 1.0), (2, 1.0), (4, 0.5)])
def test_ranks_of_one_machine_share_its_cores(in_tmp, quick_probe, monkeypatch, ranks_here, share):
    """The fastest step, by which the utilisation is measured, is that of the cores there are, not of all threads."""
    found = []

    class Watched(training.Loop):
        def __post_init__(self):
            super().__post_init__()
            found.append(self)

    monkeypatch.setattr(training, "Loop", Watched)
    monkeypatch.setattr(training.machine, "allowed_cores", lambda: 2 * torch.get_num_threads())
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks_here, "LOCAL_WORLD_SIZE": ranks_here}.items():
        monkeypatch.setenv(name, str(value))  # as torchrun sets them
    with distributed(place=Place()):
        train(Recipe.of(data=("random",), num_layers=1, steps=1, batch_size=2, context=8, eval_iters=1, device="cpu"))
    flops = model_flops(found[0].trainer.config, 1, 8) * 2
    assert found[0].least_seconds == pytest.approx(flops / (share * made_up().matmul_flops))


def other_options_case(group) -> None:
    train(Recipe.of(device="cpu", steps=3 + group.rank() // 2, out=Path(f"{group.rank()}")))


def test_ranks_with_different_options_are_refused_by_name():
    errors = ranks.run_failing(other_options_case, 3)
    assert errors[0][1].startswith("the ranks' options differ: rank ")
    assert errors[0][1].endswith(": rank 0 has --steps 3, rank 2 has --steps 4: start all ranks with the same")
    assert errors == [("UserError", errors[0][1])] * 3


# A BERT of two blocks on a few documents of this project's own words.
BERT = "--objective bert --num-layers 2 --d-model 32 --num-heads 2 --data text --split 8,1,1 --log-file log"


def bert(folder: Path, arguments: str) -> list[dict]:
    """The log of a short run."""
    write_text(folder)
    assert run(BERT, arguments) == 0
    return lines_of(folder / "log")


def test_bert_is_trained_evaluated_and_timed(in_tmp, capsys, quick_probe):
    _, *lines, final = bert(in_tmp, "--steps 6 --log-every 2 --eval-interval 3 --eval-iters 2")
    steps, evaluations = ([line for line in lines if key in line] for key in ("lm_loss", "validation_loss"))
    assert [line["step"] for line in steps] == [2, 4, 6]
    assert [line["step"] for line in evaluations] == [3, 6]
    assert set(steps[0]) == {
        *("step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_memory", "lm_loss", "sop_loss", "step_ms"),
        "timers_ms",
    }
    for line in steps:
        assert line["loss"] == line["lm_loss"] + line["sop_loss"]
        assert abs(line["sop_loss"] - math.log(2)) < 0.2
        assert {"forward-compute", "backward-compute", "optimizer", "batch-generator"} <= set(line["timers_ms"])
        assert all(len(of_each_rank) == 1 and of_each_rank[0] > 0 for of_each_rank in line["timers_ms"].values())
    # Nothing is learned after the last step, so the last evaluation is the final one.
    for key in ("validation_loss", "validation_sop_loss"):
        assert final[key] == evaluations[-1][key]
    assert evaluations[0] != evaluations[1]
    assert "sample" not in final
    shown = capsys.readouterr().out
    assert shown.count("time (ms) | batch-generator: ") == 3
    assert "iteration        6/       6 | consumed samples:           48 | " in shown
    assert "step 3: validation loss " in shown


def test_an_evaluation_changes_nothing_that_is_learned(in_tmp, quick_probe):
    losses = []
    for interval in ("1", "9"):
        lines = bert(in_tmp, f"--steps 3 --log-every 1 --dropout 0.2 --eval-interval {interval}")
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1]


def test_megatrons_names_train(in_tmp, capsys, quick_probe):
    write_text(in_tmp)
    line = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
    line += " --split 8,1,1 --data-path text --train-iters 2 --global-batch-size 4 --fp16 --checkpoint-activations"
    line += " --log-interval 1 --lr-decay-iters 9 --tokenizer-type BertWordPieceCase --save out --finetune"
    line += " --device cpu --vocab-size 400 --lr 1e-3 --log-file log"
    assert run_command(training.main, line.split()) == 0
    header, *lines, _ = lines_of(in_tmp / "log")
    assert (header["recipe"]["d_model"], header["recipe"]["objective"]) == (32, "bert")
    # From 2^32 down: the first overflow is borne, the second halves.
    found = [(line["loss_scale"], line["skipped"], line["grad_norm"]) for line in lines if "lr" in line]
    assert found == [(2.0**32, 1, None), (2.0**31, 1, None)]
    captured = capsys.readouterr()
    assert "note: ignored: --finetune (a checkpoint is written and read whole)" in captured.err
    assert [each.name for each in (in_tmp / "out/checkpoints").iterdir()] == ["step-00000002"]
    assert "| loss scale: 2147483648.0 | number of skipped iterations:   1" in captured.out


def test_a_run_shares_its_log_with_no_other(in_tmp, capsys, quick_probe):
    short = f"--data random {ONE_STEP}"
    Path("runs").mkdir()
    with Path("runs/train.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(of_another := '{"step": 1}\n')
        assert run(short) == 0
        assert "log: runs/train-2.jsonl\n" in capsys.readouterr().out
        Path("runs/train-2.jsonl").write_text("notes")
        assert run(short) == 2
        assert "runs/train-2.jsonl exists and is no log of a run" in capsys.readouterr().err
        assert Path("runs/train-2.jsonl").read_text() == "notes"
        assert run(short, "--log-file runs/train.jsonl") == 2
        line = "error: another run writes its log to runs/train.jsonl: name another with --log-file FILE\n"
        assert capsys.readouterr().err.endswith(line)
    assert Path("runs/train.jsonl").read_text() == of_another
    Path("runs/train.jsonl").write_text('{"recipe": {"pre')  # by a full disk
    assert run(short) == 0
    assert "log: runs/train.jsonl\n" in capsys.readouterr().out


def test_a_log_is_not_written_through_a_link_but_to_a_device(in_tmp, capsys, quick_probe):
    line = f"--data random {ONE_STEP} --out run"
    assert run(line) == 0
    (in_tmp / "other").write_text("of another")
    (in_tmp / "run/.train.jsonl").symlink_to(in_tmp / "other")
    assert run(line, "--steps 2 --resume") == 2
    assert "error: run/.train.jsonl is a symbolic link; delete it, or name another log" in capsys.readouterr().err
    assert (in_tmp / "other").read_text() == "of another"
    with Path("open").open("a+") as other:  # as with --log-file /dev/stdout > file
        print("before", file=other, flush=True)
        assert run(f"--data random {ONE_STEP} --log-file /dev/fd/{other.fileno()}") == 0
    assert Path("open").read_text().startswith('before\n{"recipe": ')


def test_a_terminal_that_is_not_utf_8_ends_no_training(in_tmp, quick_probe, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run(f"{ONE_STEP} --sample-bytes 2 --prompt ä→") == 0
    sys.stdout.flush()
    assert b"\n\\xe4\\u2192" in written.getvalue()


@pytest.mark.parametrize("kind", ["none", "minmax", "waits"])
def test_timers_are_shown_as_asked(in_tmp, capsys, quick_probe, kind):
    assert run(f"--data random {ONE_STEP} --timers {kind} --log-file log") == 0
    line = lines_of(in_tmp / "log")[1]
    text = capsys.readouterr().out
    assert ("timers_ms" in line) is ("time (ms) | " in text) is (kind != "none")
    assert ("forward-compute: (" in text) is (kind == "minmax")
    assert ("backward-params-all-reduce-wait" in text) is (kind == "waits")


def layout_case(group, folder: str, layout: dict) -> None:
    recipe = Recipe.of(data=(f"{folder}/text",), split="8,1,1", context=16, batch_size=8, steps=3, **layout)
    recipe = recipe.change(device="cpu", d_model=32, num_heads=4, dropout=0.0, log_file=Path(folder, "log"))
    training.probe = made_up
    train(recipe.change(log_every=1, eval_iters=2, eval_interval=2, sample_bytes=8))


LAYOUTS = {
    "lm": (4, {"dp": 2, "zero": 3}, {"pp": 2, "chunks": 2, "micro_batch_size": 2}),
    "bert": (2, {"tp": 2, "pp": 2, "micro_batch_size": 2}),
}


@pytest.mark.parametrize("objective", LAYOUTS)
def test_ranks_that_share_a_model_learn_what_one_process_learns(tmp_path, objective):
    write_text(tmp_path)
    (num_layers, *layouts), logs = LAYOUTS[objective], []
    for layout in ({}, *layouts):
        sizes = {axis: layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")}
        settings = layout | {"objective": objective, "num_layers": num_layers}
        ranks.run(layout_case, math.prod(sizes.values()), folder=str(tmp_path), layout=settings)
        header, *lines = lines_of(tmp_path / "log")
        assert header["mesh"] == {"ep": 1} | sizes
        # What a model would write no rank of a pipeline can say alone.
        assert ("sample" in lines[-1]) is (objective != "bert" and sizes["pp"] == 1)
        keys = ("step", "loss", "grad_norm", "validation_loss", "validation_sop_loss")
        logs.append([line[key] for line in lines for key in keys if key in line])
        assert len(logs[-1]) == 3 * 3 + (2 + 1) + 2 * (objective == "bert")
    for found in logs[1:]:
        # Three steps of some hundred roundings in a row, in sums of 128 terms whose roundings add like a random walk.
        assert found == pytest.approx(logs[0], rel=bound(torch.float32, stages=3 * 100, longest_sum=12))
