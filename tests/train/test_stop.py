"""SIGTERM, and losses that are no number: all ranks end after the same step, and what they leave is whole."""

import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from cs336_systems.checkpoint.disk import list_checkpoints
from cs336_systems.checkpoint.folder import open_checkpoint
from cs336_systems.comm import agree
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.comm.startup import die_with_parent
from cs336_systems.train import __main__ as training
from cs336_systems.train.loop import StopSignal
from tests.support import ranks
from tests.support.machine import made_up
from tests.support.resume_cases import attempt, complete, figures, log_of, newest, require_same_end, tiny
from tests.support.state_cases import whole

SMALL = {"num_layers": 1, "steps": 6, "save_every": 4}


def term(step: int, *told: int, when: str = "step") -> list[dict]:
    return [{"rank": rank, "step": step, "what": "term", "when": when} for rank in told]


@pytest.mark.parametrize(
    ("world", "told", "when", "layout", "stops"),
    [
        (1, (0,), "step", {}, 3),
        (2, (0, 1), "backward", {"zero": 3}, 4),
        # During a save after step 3: found after step 4.
        (2, (0,), "fsync", {"pp": 2, "num_layers": 2, "save_every": 3}, 5),
    ],
)
def test_all_ranks_stop_after_the_same_step_and_go_on_with_the_same_bits(tmp_path, world, told, when, layout, stops):
    out, whole_run = tmp_path / "run", tmp_path / "undisturbed"
    recipe = tiny(out, **SMALL | layout)
    outcome = complete(world, recipe, *term(3, *told, when=when))
    assert [result["final"] for result in outcome.results] == world * [{"stopped": "SIGTERM", "step": stops}]
    said = outcome.shown.splitlines()[-1]
    assert said == f"SIGTERM: stopped after {stops} of 6 steps, saved in {out}; go on with --resume"
    assert not any(result["shown"] for result in outcome.results[1:])
    assert newest(out).step == stops
    assert log_of(out)[-1] == {"stopped": "SIGTERM", "step": stops}
    complete(world, recipe | {"resume": True})
    complete(world, recipe | {"out": str(whole_run)})
    require_same_end(out, whole_run)


def test_one_that_is_told_before_the_first_step_takes_none(tmp_path):
    """Nor does any other rank; there is nothing to save then. After the last step there is nothing to stop."""
    recipe, early = tiny(tmp_path, **SMALL | {"steps": 2}), term(0, 1, when="build")
    for done in (0, 2):
        outcome = complete(2, recipe | {"steps": done + 1, "resume": True}, *early)
        assert [result["final"] for result in outcome.results] == [{"stopped": "SIGTERM", "step": done}] * 2
        said = f"SIGTERM: stopped after {done} of {done + 1} steps, before another one, with nothing new to save; "
        assert outcome.shown.splitlines()[-1] == said + "go on with --resume"
        assert log_of(tmp_path)[-1] == {"stopped": "SIGTERM", "step": done}
        assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"] * (done > 0)
        ended = complete(2, recipe | {"resume": True}, *([] if done else term(2, 1)))
        assert ended.results[0]["final"]["steps"] == 2
    assert [row[0] for row in figures(tmp_path)] == [1, 2]


def test_a_second_order_ends_at_once_and_an_echo_does_not(tmp_path):
    """Schedulers and launchers tell each rank, and each other, and so a rank may be told twice."""
    twice = [*term(3, 0), *term(3, 0, when="backward")]
    assert complete(1, tiny(tmp_path / "a", **SMALL), *twice).results[0]["final"]["step"] == 3
    assert attempt(1, tiny(tmp_path / "b", **SMALL), *twice, echo=0.0).codes == [-signal.SIGTERM]
    assert not list_checkpoints(tmp_path / "b" / "checkpoints")
    bare = tiny(tmp_path, **SMALL) | {"out": None, "save_every": None, "log_file": str(tmp_path / "log")}
    assert attempt(1, bare, *term(3, 0)).codes == [-signal.SIGTERM]  # without a folder it ends as ever


def stop_case(group, told: int, ahead: int) -> list[int]:
    """After which steps this rank is to stop, when one is told while the other is as far ahead of it as can be."""
    stop, behind = StopSignal(group, ahead), 2
    done = behind if group.rank() == told else behind + ahead
    for step in range(1, done):
        assert not stop.after(step)
    if group.rank() != told:
        assert not stop.after(done)
    agree("the other has looked", "", group)
    if group.rank() == told:
        stop.told = True
        assert not stop.after(done)
    agree("one was told", "", group)
    return [step for step in range(done + 1, 8) if stop.after(step)]


@pytest.mark.parametrize(("told", "ahead"), [(0, 0), (1, 2)])
def test_the_step_is_one_that_nobody_has_passed(told, ahead):
    assert ranks.run(stop_case, 2, told=told, ahead=ahead) == [list(range(3 + ahead, 8))] * 2


def terminated_case(rank: int, world: int, folder: str, out: str) -> tuple[int, str]:
    """A command of two ranks, told to stop after its third step: its exit code and what it printed."""
    short = "--data random --num-layers 1 --batch-size 4 --context 8 --device cpu --eval-iters 1 --log-every 1"
    training.probe = made_up  # in the processes of this case only
    shown, log = Path(folder, "shown"), Path(out, "train.jsonl")
    parent, code = os.getpid(), 99
    if not (command := os.fork()):
        die_with_parent(parent)
        os.setsid()
        for output in (1, 2):
            os.dup2(os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
        sys.argv = ["train", *short.split(), "--nproc", "2", "--steps", "100000", "--out", out]
        try:
            code = run_command_on_ranks(training.main)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + ranks.patience(ranks.TIMEOUT) - 10
    while not log.exists() or '"step": 3,' not in log.read_text():
        assert os.waitpid(command, os.WNOHANG) == (0, 0), shown.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(command, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with pytest.raises(ProcessLookupError):
        os.killpg(command, 0)
    return code, shown.read_text()


def test_a_terminated_command_saves_ends_with_0_and_leaves_nobody(tmp_path):
    out = tmp_path / "run"
    ((code, shown),) = ranks.run_alone(terminated_case, 1, out=str(out))
    assert code == 0, shown
    (said,) = [line for line in shown.splitlines() if line.startswith("SIGTERM: ")]
    step = newest(out).step
    assert said == f"SIGTERM: stopped after {step} of 100000 steps, saved in {out}; go on with --resume"
    assert figures(out)[-1][0] == step


def nan(rank: int, *steps: int, when: str = "loss") -> list[dict]:
    return [{"rank": rank, "step": step, "what": "nan", "when": when} for step in steps]


@pytest.mark.parametrize(
    ("layout", "rank", "when", "whose", "ahead"),
    [
        ({"zero": 3, "background_save": True}, 0, "loss", "the loss of rank 0 is", 0),
        ({"pp": 2, "num_layers": 2}, 1, "loss", "the loss of rank 1 is", 0),
        ({}, 1, "backward", "the gradient, unlike the loss, is", 2),  # as on a GPU, whose norms are looked at late
    ],
)
def test_what_is_no_number_ends_all_ranks_and_is_never_saved(tmp_path, layout, rank, when, whose, ahead):
    recipe = tiny(tmp_path, **SMALL | layout | {"save_every": 1})
    slow = {"rank": 1, "step": 2, "what": "slow", "when": "fsync"}  # a save beside training is still under way
    faults = [slow, *nan(rank, 3, when=when)]
    outcome = attempt(2, recipe, *faults, timeout=ranks.COLLECTIVE_TIMEOUT, ahead=ahead)
    assert outcome.codes == [1, 1]
    assert outcome.line == (
        f"{whose} not finite in step 3 (gradient norm nan); lower --lr (now 0.01), or leave such steps out with "
        "--on-nonfinite skip"
    )
    assert [line["step"] for line in log_of(tmp_path) if "saved" in line] == [1, 2]
    # What was saved beside training came to its end, and nothing lies about.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    for path in list_checkpoints(tmp_path / "checkpoints"):
        checkpoint = open_checkpoint(path)
        for name, kinds in checkpoint.tensors.items():
            for kind in kinds:
                assert torch.isfinite(whole(checkpoint, name, kind).double()).all()


@pytest.mark.parametrize(
    ("step", "when", "whose"), [(2, "loss", "the loss of rank 1"), (4, "backward", "the gradient, ")]
)
def test_a_host_that_is_ahead_looks_at_every_norm_before_a_log_line_and_at_the_end(tmp_path, step, when, whose):
    recipe = tiny(tmp_path, num_layers=1, steps=4, log_every=2) | {"out": None, "log_file": str(tmp_path / "log")}
    outcome = attempt(2, recipe, *nan(1, step, when=when), timeout=ranks.COLLECTIVE_TIMEOUT, ahead=2)
    assert outcome.line.startswith(whose)
    assert f" is not finite in step {step} (gradient norm nan); " in outcome.line


@pytest.mark.parametrize("layout", [{"zero": 2, "precision": "bf16"}, {"pp": 2, "num_layers": 2}])
def test_a_step_that_is_left_out_changes_nothing(tmp_path, layout):
    """Saved after every step: before and after the one that is left out the same bits, of optimizer, too."""
    recipe = tiny(tmp_path, **SMALL | layout | {"steps": 4, "save_every": 1, "keep": 4, "on_nonfinite": "skip"})
    outcome = complete(2, recipe, *nan(1, 3))
    assert "1 of 4 steps were skipped: their gradients were inf or NaN" in outcome.shown
    before, after, later = (open_checkpoint(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (2, 3, 4))
    assert before.scalars == after.scalars != later.scalars
    for name, kinds in before.tensors.items():
        for kind in kinds:
            assert torch.equal(whole(before, name, kind), whole(after, name, kind)), (name, kind)
    moved = [name for name in before.scalars if not torch.equal(whole(before, name), whole(later, name))]
    assert moved
    assert [each.state["trainer"]["skipped"] for each in (before, after, later)] == [0, 1, 1]
    lines = [line for line in log_of(tmp_path) if "loss" in line]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0]
    assert (lines[2]["loss"], lines[2]["grad_norm"]) == (None, None)
    assert lines[3]["lr"] == lines[2]["lr"]  # the schedule counts updates


def test_ten_in_a_row_give_up(tmp_path):
    recipe = tiny(tmp_path, num_layers=1, steps=20, save_every=1, on_nonfinite="skip")
    outcome = attempt(2, recipe, *nan(1, *range(3, 14)), timeout=ranks.COLLECTIVE_TIMEOUT)
    assert outcome.line == "the gradients were inf or NaN 10 times in a row; lower --lr (now 0.01)"
    assert [line["step"] for line in log_of(tmp_path) if "loss" in line] == list(range(1, 12))
    assert newest(tmp_path).step == 3, "ruined weights take no good ones' place"
    failed = {line["step"]: line["save_failed"] for line in log_of(tmp_path) if "save_failed" in line}
    assert list(failed) == list(range(4, 12))
    assert failed[5] == "the last 3 gradients were inf or NaN; earlier checkpoints are as they were"


def test_nine_in_a_row_are_borne_and_a_resumption_counts_anew(tmp_path):
    recipe = tiny(tmp_path, num_layers=1, steps=3, on_nonfinite="skip")
    complete(1, recipe, *nan(0, 3))
    complete(1, recipe | {"steps": 13, "resume": True}, *nan(0, *range(4, 13)))
    assert newest(tmp_path).state["trainer"]["skipped"] == 10
    assert math.isfinite(figures(tmp_path)[-1][1])
