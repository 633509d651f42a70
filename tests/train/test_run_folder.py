"""A run's folder: its lock, the settings that must be equal to resume a run, and saves and logs on a full disk."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from cs336_systems.checkpoint.disk import list_checkpoints, locked
from cs336_systems.checkpoint.folder import export_plain, open_plain, to_text, weights_hash
from cs336_systems.comm import Place
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.host.machine import device_name
from cs336_systems.train import __main__ as training
from cs336_systems.train.__main__ import work
from cs336_systems.train.recipe import Recipe
from tests.support import ranks, resume_cases
from tests.support.layout_cases import write_text
from tests.support.machine import made_up
from tests.support.resume_cases import TINY, attempt, complete, family, figures, log_of, newest, tiny, train_case
from tests.support.state_cases import ranks_of, require_same, whole

SHORT = "--data random --num-layers 1 --batch-size 2 --context 8 --device cpu --eval-iters 1 --sample-bytes 4"
ONE = {"num_layers": 1, "steps": 3, "batch_size": 4, "context": 8}


def command(capsys, line: str) -> tuple[int, str, list[str]]:
    """The exit status, what was printed, and the error lines of a training command."""
    status = run_command(training.main, f"{SHORT} {line}".split())
    captured = capsys.readouterr()
    return status, captured.out, [line for line in captured.err.splitlines() if not line.startswith("training ")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--save-every 3", "--save-every needs a folder for the checkpoints: name one with --out DIR"),
        ("--resume", "--resume needs a folder for the checkpoints: name one with --out DIR"),
        ("--background-save", "--background-save needs a folder for the checkpoints: name one"),
        ("--keep 1 --out x", "Invalid value for '--keep': 1 is not in the range x>=2."),
        ("--save-every 0 --out x", "Invalid value for '--save-every': 0 is not in the range x>=1."),
        ("--out file", "cannot write to file: "),
        ("--out file/run", "cannot write to file/run: "),
        ("--weights none.safetensors", "cannot read none.safetensors: No such file or directory"),
        ("--weights file", "file "),
        ("--out a --log-file file/log", "cannot write the log file/log: "),
        ("--out a --log-file file", "file exists and is no log of a run: name another with"),
    ],
)
def test_what_cannot_be_is_one_line(in_tmp, capsys, quick_probe, arguments, line):
    (in_tmp / "file").write_text("x")
    status, _, errors = command(capsys, f"--steps 1 {arguments}")
    assert (status, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {line}")
    assert (in_tmp / "file").read_text() == "x"
    assert not list_checkpoints(in_tmp / "a" / "checkpoints")


def test_a_folder_with_checkpoints_is_used_again_only_when_asked(in_tmp, capsys, quick_probe):
    run = "--out run --save-every 2"
    status, shown, errors = command(capsys, f"{run} --steps 3 --resume")
    assert (status, errors) == (0, [])  # an empty folder: the run begins
    assert "3 steps in " in shown
    assert "resumed" not in shown
    status, _, (error,) = command(capsys, f"{run} --steps 5")
    assert status == 2
    assert error.startswith("error: run holds a run with a checkpoint step-00000003: go on from it with --resume, or")
    before = log_of(in_tmp / "run")
    status, shown, errors = command(capsys, f"{run} --steps 5 --resume --lr 3e-3 --on-nonfinite skip")
    assert (status, errors) == (0, [])
    said = "resumed run/checkpoints/step-00000003 after step 3, the state bit for bit; from here on with --lr 0.002 -> "
    assert f"{said}0.003, --on-nonfinite stop -> skip" in shown.splitlines()
    assert "2 steps after 3 in " in shown
    assert [path.name[-1] for path in list_checkpoints(in_tmp / "run" / "checkpoints")] == ["4", "5"]
    assert log_of(in_tmp / "run")[: len(before) - 1] == before[:-1]


def test_the_total_is_the_total(in_tmp, capsys, quick_probe, monkeypatch):
    run = "--decay-steps 50 --log-every 1"
    assert command(capsys, f"{run} --out run --steps 4")[0] == 0
    before = newest(in_tmp / "run")
    status, shown, errors = command(capsys, f"{run} --out run --steps 2 --resume")
    assert (status, errors) == (0, [])
    assert "nothing is left to train: 4 steps are done, and --steps 2 counts those, too" in shown
    assert "0 steps after 4 in " in shown
    assert log_of(in_tmp / "run")[-1]["steps"] == 4
    assert len(list_checkpoints(in_tmp / "run" / "checkpoints")) == 1
    require_same(newest(in_tmp / "run"), before)
    monkeypatch.setattr("cs336_systems.host.console.PLAIN_SECONDS", 0.0)
    assert run_command(training.main, f"{SHORT} {run} --out run --steps 6 --resume".split()) == 0
    progress = [line.split(",")[0].split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert progress == ["training 5/6", "training 6/6"]  # it counts from the resumed step
    assert command(capsys, f"{run} --out straight --steps 6")[0] == 0
    assert figures(in_tmp / "run") == figures(in_tmp / "straight")  # the rates, too


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A folder with text, two runs, and the weights of the second in a file."""
    folder = tmp_path_factory.mktemp("begun")
    write_text(folder)
    complete(1, family("bert", folder, out=str(folder / "run"), steps=1))
    complete(1, family("gpt", folder, out=str(folder / "lm"), steps=1))
    export_plain(newest(folder / "lm"), folder / "plain.safetensors")
    return folder


OTHER = (
    ({"seed": 7}, "--seed was 0 there and is 7 now"),
    ({"batch_size": 6}, "--batch-size was 12 there and is 6 now"),
    ({"context": 6, "max_context": 8}, "--context was 8 there and is 6 now"),
    ({"precision": "bf16"}, "--precision was fp32 there and is bf16 now"),
    ({"num_layers": 3}, "the model's num_layers was 1 there and is 3 now"),
    ({"dropout": 0.5}, "the model's dropout was 0.1 there and is 0.5 now"),
    ({"data": ["other"]}, "the text's SHA-256 was .* there and is .* now"),
    ({"data": ["cut"]}, "the SHA-256 of the text's sentences was .* there and is .* now"),
    ({"mask_prob": 0.3}, "--mask-prob was 0.15 there and is 0.3 now"),
)


def other_runs_case(group, folder: str) -> None:
    os.chdir(folder)
    recipe = family("bert", Path(folder), out=f"{folder}/run", steps=2, resume=True)
    for changes, said in OTHER:
        with pytest.raises(UserError, match=f"^{folder}/run holds another run: {said}; resume with what it began"):
            train_case(group, recipe | changes, [])


def test_another_run_is_refused_by_name(begun):
    text = (begun / "text").read_text()
    (begun / "other").write_text(text.replace("model", "modal"))
    (begun / "cut").write_text(text.replace(".\nm", ".m\n"))  # the same letters, in other sentences
    ranks.run(other_runs_case, 2, folder=str(begun))
    assert len(list_checkpoints(begun / "run" / "checkpoints")) == 1  # none was set aside


@pytest.mark.parametrize(("option", "advice"), [("--loss-scale", ""), ("--initial-loss-scale", ", or take more steps")])
def test_the_advice_after_overflows_names_the_option_that_sets_the_scale(in_tmp, capsys, quick_probe, option, advice):
    status, shown, _ = command(capsys, f"--steps 2 --precision fp16 {option} 1e30")
    assert status == 0
    assert "2 of 2 steps were skipped: their gradients overflowed fp16, and the loss scale is now " in shown
    assert f"; lower {option}{advice}\n" in shown


def test_how_the_same_is_computed_may_change(begun):
    given = family("bert", begun, out=str(begun / "run"), steps=2, resume=True, recompute="segments")
    shown = complete(1, given | {"micro_batch_size": 4, "pad_vocabulary": 16}).shown
    changes = "--micro-batch-size 12 -> 4, --pad-vocabulary 8 -> 16, recompute none -> segments"
    assert f"after step 1, equal but for rounding ({changes})" in shown
    found = newest(begun / "run").state["computed"]
    assert (found["device"], found["backend"]) == (device_name(torch.device("cpu")), "gloo")


def test_a_run_with_experts_says_whether_other_rows_are_routed_together(tmp_path):
    """Over which rows the experts are balanced is no question of rounding, but of the microbatch."""
    first = tiny(tmp_path / "one", **ONE | {"num_experts": 2, "expert_every": 1, "micro_batch_size": 2, "steps": 2})
    complete(1, first, float64=True)
    losses, said = {}, {}
    for name in ("two", "whole"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    for name, world, micro in (("two", 2, 2), ("whole", 1, 4), ("one", 1, 2)):
        again = first | {"out": str(tmp_path / name), "steps": 5, "resume": True, "micro_batch_size": micro}
        shown = complete(world, again, float64=True).shown
        said[name] = next(line for line in shown.splitlines() if line.startswith("resumed"))
        losses[name] = figures(tmp_path / name)[-1][1]
    assert said["one"].endswith(" step 2, bit for bit")
    assert said["two"].endswith(" step 2, equal but for rounding (layout 1 rank -> dp 2)")
    changed = "rows routed together 2 -> 4 (kept by the same --micro-batch-size"
    assert f"the state equal but for rounding (--micro-batch-size 2 -> 4); from here on with {changed}" in said["whole"]
    assert abs(losses["two"] - losses["one"]) < 1e-9 < abs(losses["whole"] - losses["one"])
    refused = attempt(1, again | {"steps": 9, "capacity_factor": 1.0}, timeout=ranks.COLLECTIVE_TIMEOUT).line
    assert "holds another run: capacity_factor was 0.0 there and is 1.0 now; resume with" in refused


def test_a_constant_loss_scale_may_replace_one_found_by_trial(tmp_path):
    """What was found goes on, also from an earlier version, which counted overflows."""
    recipe = tiny(tmp_path, **ONE | {"precision": "fp16", "initial_loss_scale": 2.0**10, "steps": 2})
    complete(1, recipe)
    path = tmp_path / "checkpoints" / "step-00000002" / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    body["state"]["trainer"]["scaler"]["overflows"] = 3
    path.write_bytes(to_text(body))
    complete(1, recipe | {"steps": 3, "resume": True, "initial_loss_scale": 8.0})
    shown = complete(1, recipe | {"steps": 4, "resume": True, "loss_scale": 64.0}).shown
    assert "; from here on with --loss-scale None -> 64.0" in shown
    assert [row[6] for row in figures(tmp_path)] == [1024.0, 1024.0, 1024.0, 64.0]


def test_a_second_run_in_the_same_folder_is_refused_on_every_rank(tmp_path):
    with locked(tmp_path) as lock:
        print("process 4711", file=lock, flush=True)
        line = attempt(2, tiny(tmp_path, **ONE), timeout=ranks.COLLECTIVE_TIMEOUT).line
    assert line.startswith(f"{tmp_path} is in use by another run (process 4711); wait for its end, or name another ")


def test_a_folder_that_cannot_be_made_is_one_line_on_every_rank_before_anything_is_learned(tmp_path):
    (tmp_path / "checkpoints").write_text("no folder")
    line = attempt(2, tiny(tmp_path, **ONE), timeout=ranks.COLLECTIVE_TIMEOUT).line
    assert line == f"cannot use {tmp_path}/checkpoints: File exists; name another folder with --out DIR"
    assert not (tmp_path / "train.jsonl").exists()


@pytest.mark.parametrize("layout", ["gpt dp2 zero3", "gpt pp2"])
def test_a_run_begins_with_given_weights_in_any_layout(begun, tmp_path, layout):
    path = begun / "plain.safetensors"
    # Nothing is learned at a rate of 0: what is saved is what it began with.
    recipe = family(layout, begun, out=str(tmp_path), steps=1, lr=0.0, seed=5, weights=str(path))
    complete(ranks_of(layout), recipe)
    assert weights_hash(newest(tmp_path)) == weights_hash(open_plain(path))
    complete(ranks_of(layout), recipe | {"steps": 2, "resume": True, "weights": "nowhere"})  # it has begun already


def test_weights_of_another_model_are_refused_on_every_rank(begun):
    path = begun / "plain.safetensors"
    recipe = family("gpt pp2", begun, steps=1, log_file=str(begun / "log"), weights=str(path))
    said = attempt(2, recipe | {"num_layers": 4}, timeout=ranks.COLLECTIVE_TIMEOUT).line
    assert said.startswith(f"{path} does not fit the model: it has no blocks.2.")
    # Both stages have heard of what one alone has: the positions are the first one's.
    said = attempt(2, recipe | {"max_context": 16}, timeout=ranks.COLLECTIVE_TIMEOUT).line
    assert said.startswith(f"{path} does not fit the model: embedding.positions.weight (value) has shape [8, 16] there")


def test_a_restart_by_torchrun_goes_on_without_being_told(in_tmp, monkeypatch):
    monkeypatch.setattr(training, "probe", made_up)
    recipe = Recipe.of(**TINY | ONE | {"data": ("random",), "out": in_tmp / "run"})
    work(Place(), recipe)
    # A launcher that was refused, and tries again, has another number than the one that began the run.
    for place, parent in ((Place(), os.getppid()), (Place(attempt="1"), 1)):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "getppid", lambda parent=parent: parent)
            with pytest.raises(UserError, match="go on from it with --resume"):
                work(place, recipe)
    work(Place(attempt="1"), recipe)
    assert [line["resumed"] for line in log_of(in_tmp / "run") if "resumed" in line] == [3]


def test_torchrun_restarts_a_killed_run_which_ends_with_the_same_weights(tmp_path):
    options = TINY | {"num_layers": 1, "steps": 7, "save_every": 4, "data": "random"}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    ranks.run_alone(resume_cases.torchrun_case, 1, words=[*words, "--out", str(tmp_path / "run")])
    assert [line["resumed"] for line in log_of(tmp_path / "run") if "resumed" in line] == [4]
    complete(2, options | {"data": ["random"], "out": str(tmp_path / "undisturbed")})
    mine, wanted = newest(tmp_path / "run"), newest(tmp_path / "undisturbed")
    assert mine.step == 7
    assert weights_hash(mine) == weights_hash(wanted)
    for name in wanted.scalars:
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(mine, name, kind), whole(wanted, name, kind))
    assert figures(tmp_path / "run") == figures(tmp_path / "undisturbed")


def saved(out: Path) -> list[int]:
    """The steps that the log says are saved."""
    assert all(line["save_seconds"] > 0 for line in log_of(out) if "saved" in line)
    return [line["step"] for line in log_of(out) if "saved" in line]


@pytest.mark.parametrize(
    ("rank", "background", "every", "steps", "saves"), [(0, False, 2, 6, [4, 6]), (1, True, 3, 4, [4])]
)
def test_a_save_that_fails_is_said_and_training_goes_on(tmp_path, rank, background, every, steps, saves):
    """Beside training it is found out when the next save begins, even the last one."""
    recipe = tiny(tmp_path, num_layers=1, steps=steps, save_every=every, background_save=background)
    outcome = complete(2, recipe, {"rank": rank, "step": every, "what": "full", "when": "write"})
    (said,) = [line for line in outcome.shown.splitlines() if "not saved" in line]
    folder = tmp_path / "checkpoints"
    assert said.startswith(f"step {every}: {folder}/step-0000000{every} was not saved: rank {rank}: No space left on ")
    assert said.endswith("; earlier checkpoints are as they were")
    (failed,) = [line for line in log_of(tmp_path) if "save_failed" in line]
    assert f"step {failed['step']}: {failed['save_failed']}" == said
    assert saved(tmp_path) == saves
    lines = log_of(tmp_path)
    assert (lines.index(failed) > [line.get("loss") and line["step"] for line in lines].index(4)) == background
    assert sorted(path.name for path in folder.iterdir()) == [f"step-0000000{step}" for step in saves]
    assert [row[0] for row in figures(tmp_path)] == list(range(1, steps + 1))


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_must_not_fail(tmp_path, background):
    recipe = tiny(tmp_path, num_layers=1, steps=4, save_every=2, background_save=background)
    outcome = attempt(2, recipe, {"rank": 1, "step": 4, "what": "full", "when": "write"}, timeout=20.0)
    assert outcome.line.startswith(f"{tmp_path}/checkpoints/step-00000004 was not saved: rank 1: No space left")
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    assert log_of(tmp_path)[-1] == {"step": 4, "save_failed": outcome.line}
    assert saved(tmp_path) == [2]


def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(tmp_path):
    outcome = complete(2, tiny(tmp_path, **ONE, log_file="/dev/full"))
    assert set(outcome.results[0]["warnings"]) == {"the log cannot be written: No space left on device"}
    assert newest(tmp_path).step == 3
