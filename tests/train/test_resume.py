"""A killed run resumes as if it had never stopped: with the same bits in the same layout, within rounding in another
one, and with every step in the log once."""

import json
import random
import re
import shutil

import pytest

from benchmarks.lib.scaling_logs import parse_train_log
from cs336_systems.checkpoint.disk import list_checkpoints
from cs336_systems.train.batches import make_batches
from tests.support import expert_cases, ranks
from tests.support.layout_cases import WIGGLE, amplification, errors, one_process, rounding, wide, write_text
from tests.support.resume_cases import (
    attempt,
    chain_case,
    complete,
    family,
    figures,
    log_of,
    newest,
    require_same_end,
    tiny,
)
from tests.support.state_cases import ranks_of, recipe_of, whole

EVERY = 2  # steps between two checkpoints
MOMENTS = ("step", "backward", "update", "write", "fsync", "rename")


def kills(seed: int, moments: tuple[str, ...] = MOMENTS) -> list[dict]:
    """Three kills, each of a random rank at a random moment of a random step after those before."""
    draw, found = random.Random(seed), []
    for part, when in enumerate(draw.sample(moments, 3)):
        saving = when in ("write", "fsync", "rename")
        step = EVERY * part + (EVERY if saving else draw.randint(1, EVERY))
        rank = 0 if when == "rename" else draw.randint(0, 1)  # which rank 0 alone does
        found.append({"rank": rank, "step": step, "what": "kill", "when": when})
    return found


def killed_and_resumed(recipe: dict, faults: list[dict]) -> list[str]:
    """The messages on the step at which the last attempt, which is not killed, resumes."""
    for fault in faults:
        outcome = attempt(2, recipe, fault)
        # The other one ends by itself: it was not killed for having outlived the case.
        assert outcome.codes[fault["rank"]] == -9
        assert outcome.codes[1 - fault["rank"]] == 1
        assert outcome.errors[1 - fault["rank"]][0] == "CommError"
        recipe = recipe | {"resume": True}
    return [line for line in complete(2, recipe).shown.splitlines() if line.startswith("resumed")]


def test_three_kills_leave_the_same_bits(tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    recipe = {"steps": 7, "save_every": EVERY, "num_layers": 1}
    complete(2, tiny(undisturbed, **recipe))
    killed_and_resumed(tiny(disturbed, **recipe), kills(0))
    require_same_end(undisturbed, disturbed)
    assert [line["step"] for line in log_of(disturbed) if "loss" in line] == list(range(1, 8))


@pytest.mark.parametrize(("layout", "changes"), [("gpt dp2 zero3", {}), ("gpt dp2 zero2", {"background_save": True})])
def test_so_they_do_when_the_state_is_sharded_or_saved_beside_training(tmp_path, layout, changes):
    write_text(tmp_path)
    undisturbed, disturbed = (
        family(layout, tmp_path, out=str(tmp_path / name), steps=7, save_every=EVERY, **changes) for name in "ab"
    )
    complete(2, undisturbed)
    (said,) = killed_and_resumed(disturbed, kills(1 + len(changes)))
    assert re.search(r" after step \d+, bit for bit$", said)
    require_same_end(tmp_path / "a", tmp_path / "b")


KINDS = {  # of data, of what is drawn, and of state
    "text": ("gpt dp2 zero1", {}),
    "dropout": ("bert dp2 zero2", {}),
    "routing": ("experts ep2", expert_cases.MIXTURES["random"] | {"capacity_factor": 1.0}),
    "overflows": (
        "fp16 dp2 zero2",
        {"loss_scale": None, "initial_loss_scale": 2.0**40, "hysteresis": 3, "loss_scale_window": 2},
    ),
    "bytes": ("gpt", {"data": ["random"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_two_parts_are_steps_in_one(tmp_path, kind):
    write_text(tmp_path)
    (layout, changes), out = KINDS[kind], tmp_path / "parts"
    first, total = (4, 6) if kind == "overflows" else (2, 3)
    whole_run = family(layout, tmp_path, out=str(tmp_path / "straight"), steps=total, **changes)
    recipes = [whole_run, whole_run | {"out": str(out), "steps": first}, whole_run | {"out": str(out), "resume": True}]
    drawn = ranks.run(chain_case, ranks_of(layout), recipes=recipes)
    assert len({straight[0][0] for straight, *_ in drawn}) == len(drawn)
    for straight, before, after in drawn:
        assert before + after == straight
    require_same_end(tmp_path / "straight", out)
    if kind == "overflows":
        assert len({line["loss_scale"] for line in log_of(out) if "loss" in line}) > 2
        assert newest(out).state["trainer"]["skipped"] == 6


OTHERS = ("gpt dp3 zero2", "gpt tp2 dp2 zero3")  # test_run_state.py has all, without a command


def amplification_case(group, folder: str, steps: int) -> float:
    """How much more what is learned changes than the weights it begins with."""
    wide()
    recipe = recipe_of("gpt", folder, steps=steps)
    feed = make_batches(recipe, recipe.data.batch_size, group)
    return amplification(one_process(recipe, feed), one_process(recipe, feed, WIGGLE))


def test_other_layouts_and_numbers_of_ranks_go_on_within_rounding(tmp_path):
    """In float64, within the bound derived in tests/support/state_cases.py from the roundings of a gradient."""
    write_text(tmp_path)
    steps, source = 5, tmp_path / "source"
    recipe = family("gpt dp2", tmp_path, steps=steps, save_every=3)
    complete(2, recipe | {"out": str(source)}, float64=True)
    allowed = ranks.run(amplification_case, 1, folder=str(tmp_path), steps=steps)[0] * rounding(recipe["num_layers"])
    assert allowed < 1e-8
    wanted = newest(source)
    for layout in OTHERS:
        out = tmp_path / layout
        shutil.copytree(source, out)
        shutil.rmtree(list_checkpoints(out / "checkpoints")[-1])
        given = family(layout, tmp_path, steps=steps, save_every=3, out=str(out), resume=True)
        shown = complete(ranks_of(layout), given, float64=True).shown
        assert "after step 3, equal but for rounding (" in shown, shown
        found = newest(out)
        assert (found.step, found.scalars) == (steps, wanted.scalars)
        for kind, share in (("value", 1), ("exp_avg", 1), ("exp_avg_sq", 2)):
            mine, theirs = ({name: whole(each, name, kind) for name in wanted.scalars} for each in (found, wanted))
            for name, error in errors(mine, theirs).items():
                assert error <= share * allowed, (layout, kind, name, error / allowed)
        numbers = [(row[0], row[1], row[4], row[5]) for row in figures(out)]
        assert [row[0] for row in numbers] == [1, 2, 3, 4, 5]
        for row, like in zip(numbers, figures(source), strict=True):
            assert row == pytest.approx((like[0], like[1], like[4], like[5]), rel=allowed)


def test_a_log_tells_of_every_step_once_whatever_was_lost(tmp_path):
    """Lines of steps that are taken again go, and half a line; a line ends at each checkpoint, so that none tells of
    steps on both sides of a resumption."""
    out = tmp_path / "run"
    recipe = tiny(out, steps=7, save_every=3, log_every=2, num_layers=1, timers="max")
    complete(1, recipe)
    wanted = figures(out)
    assert [row[0] for row in wanted] == [2, 3, 4, 6, 7]
    shutil.rmtree(out / "checkpoints" / "step-00000007")
    with (out / "train.jsonl").open("a") as log:
        log.write('{"step": 8, "loss": 1.5}\n{"resumed": 7, "recipe": {}}\nnull\n[1]\n{"step": "1"}\n{"step": 9, "lo')
    again = complete(1, recipe | {"steps": 9, "resume": True})
    assert figures(out)[:4] == wanted[:4]
    assert [row[0] for row in figures(out)] == [2, 3, 4, 6, 8, 9]
    lines = log_of(out)
    assert [line["resumed"] for line in lines if "resumed" in line] == [6]
    assert [line["steps"] for line in lines if "steps" in line] == [9]
    assert lines[-1] == again.results[0]["final"]
    (run,) = parse_train_log((out / "train.jsonl").read_text(), "train.jsonl")
    assert (run.global_batch_size, run.dp) == (8, 1)
    # A run of a log is what it went on as: times of another layout are no times of this one.
    header, line = lines[0], {"step": 1, "step_ms": 80.0, "timers_ms": {"optimizer": [1.0]}}
    other = header | {"resumed": 1, "mesh": header["mesh"] | {"dp": 2}, "micro_batch_size": 4}
    text = [header, line, header | {"resumed": 1}, line | {"step_ms": 40.0}]
    for more, wanted in (([], (7.5, 1, 8)), ([other, line | {"step_ms": 8.0}], (1.0, 2, 4))):
        (run,) = parse_train_log("\n".join(map(json.dumps, [*text, *more])), "log")
        assert (run.ms_per_sample, run.dp, run.micro_batch_size) == wanted
