"""Half precision over layouts: every rank takes the same decision about a step, and the result is fp32's, rounded."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cs336_systems.fsdp import FSDP
from cs336_systems.train.trainer import MOST_OVERFLOWS
from tests.support import ranks
from tests.support.layout_cases import Watched, assemble, load, write_text
from tests.support.layout_table import Layout
from tests.support.tolerances import UNIT_ROUNDOFF, bound

LAYOUTS = (
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, accumulate=True, schedule="interleaved"),
    Layout(dp=2, zero=1),
    Layout(tp=2, dp=2, zero=2, recompute="nested"),
    Layout(pp=2, dp=2, zero=3, accumulate=True),
    Layout(tp=2, pp=2, accumulate=True, recompute="attention", sequence_parallel=True),
)
ALONE = {"num_layers": 4}  # as the interleaved one needs
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def mixed_case(group, folder: str, layout: dict, changes: dict, steps: int, poisoned: list[int]) -> list[dict]:
    """Decision of each step. In poisoned steps one rank, the last one, has an infinity in one gradient."""
    torch.set_default_dtype(torch.float32)
    layout = Layout(**layout)
    trainer = Watched(layout.recipe(folder, **changes))
    poison = group.rank() == group.size() - 1
    name = next(n for n, _ in trainer.stage.model.named_parameters() if n.endswith("query.weight"))
    target = trainer.stage.model.get_parameter(name)
    if isinstance(wrapper := trainer.part.wrappers[0], FSDP):
        target = next(unit.full for unit in wrapper.sharded if unit.name.endswith(name))
    now = [0]
    target.register_hook(lambda gradient: gradient / 0.0 if poison and now[0] in poisoned else gradient)
    found = []
    for now[0] in range(steps):
        before = {key: each[0] for key, each in trainer.weights().items()}
        step = trainer.step(now[0])
        after = trainer.weights()
        found.append(
            {
                "skipped": step.skipped,
                "scale": trainer.scaler.scale,
                "finite": math.isfinite(step.norm),
                "rate": step.rate,
                "moved": any(not torch.equal(before[key], after[key][0]) for key in before),
                "loss": trainer.mean_losses([step])[0],
                "norm": step.norm.item() if math.isfinite(step.norm) else None,
            }
        )
    torch.save({"place": trainer.mesh.place, "parameters": trainer.weights()}, Path(folder, f"weights.{group.rank()}"))
    return found


def run(folder: Path, layout: Layout, steps: int, poisoned: tuple[int, ...] = (), **changes) -> list[dict]:
    """The decisions, which are the same on every rank."""
    arguments = {"layout": asdict(layout), "changes": ALONE | changes, "steps": steps, "poisoned": list(poisoned)}
    first, *others = ranks.run(mixed_case, layout.ranks, folder=str(folder), **arguments)
    same = ("skipped", "scale", "finite", "rate", "loss", "norm")
    for other in others:
        assert [[step[key] for key in same] for step in other] == [[step[key] for key in same] for step in first]
        assert [step["moved"] for step in other] == [step["moved"] for step in first]
    return first


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def wide(folder):
    """One step of one process in fp32, and the weights after it."""
    (step,) = run(folder, Layout(), 1)
    return step, weights(folder, Layout(), None)


@pytest.mark.parametrize("layout", [LAYOUTS[1], *LAYOUTS[3:5]], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(folder, layout):
    found = run(
        folder, layout, 7, (1, 2, 3), precision="fp16", initial_loss_scale=256.0, loss_scale_window=3, warmup_steps=8
    )
    assert [step["skipped"] for step in found] == [False, True, True, True, False, False, False]
    # The first overflow is tolerated, each further one halves; three clean steps double.
    assert [step["scale"] for step in found] == [256, 256, 128, 64, 64, 64, 128]
    assert [step["moved"] for step in found] == [not step["skipped"] for step in found]
    assert [step["finite"] for step in found] == [not step["skipped"] for step in found]
    # A skipped step does not use up the warm-up.
    assert [round(step["rate"] * 800) for step in found] == [1, 2, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_without_a_loss_scale_an_infinity_reaches_every_rank(folder, precision):
    found = run(folder, Layout(tp=2, pp=2, accumulate=True), 1, (0,), precision=precision)
    assert not found[0]["finite"]
    assert not found[0]["skipped"]


def test_the_loss_scale_is_found_alike_by_every_layout(folder):
    steps, changes = 6, {"precision": "fp16", "initial_loss_scale": 2.0**21}
    alone = run(folder, Layout(), steps, **changes)
    falls = [step["skipped"] for step in alone].index(False)
    assert falls > 2
    assert [step["scale"] for step in alone[:falls]] == [2.0 ** (21 - number) for number in range(falls)]
    for layout in (LAYOUTS[2], LAYOUTS[5]):
        found = run(folder, layout, steps, **changes)
        # Gloo adds the gradients of dp ranks before it divides by dp: in half precision the sum may be too large at a
        # scale at which the mean is not.
        longer = [step["skipped"] for step in found].index(False) - falls
        assert 0 <= longer <= math.log2(layout.dp), layout
        if not longer:
            decided = [[(s["skipped"], s["scale"], s["rate"]) for s in each[: falls + 1]] for each in (found, alone)]
            assert decided[0] == decided[1], layout


def test_gradients_are_divided_by_the_scale_that_they_have(folder):
    """A clean step may double the scale, for the next one."""
    layout, found = Layout(dp=2, zero=1), []
    for window in (1, 1000):
        changes = {"precision": "fp16", "initial_loss_scale": 256.0, "loss_scale_window": window}
        (step,) = run(folder, layout, 1, **changes)
        assert (step["scale"], step["moved"]) == (512.0 if window == 1 else 256.0, True)
        found.append(weights(folder, layout, None))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_overflow_at_a_constant_scale_skips_the_step(folder):
    found = run(folder, LAYOUTS[0], 2, (0,), precision="fp16", loss_scale=128.0)
    assert [(step["skipped"], step["moved"], step["scale"]) for step in found] == [
        (True, False, 128.0),
        (False, True, 128.0),
    ]


def gave_up_case(group, folder: str, layout: dict, changes: dict) -> None:
    mixed_case(group, folder, layout, changes, 30, list(range(30)))


def test_a_run_that_overflows_for_ever_is_given_up(folder):
    changes = {**ALONE, "precision": "fp16", "initial_loss_scale": 2.0**15, "min_loss_scale": 8.0}
    layout = Layout(dp=2, zero=2)
    errors = ranks.run_failing(gave_up_case, 2, folder=str(folder), layout=asdict(layout), changes=changes)
    line = f"the gradients were inf or NaN {MOST_OVERFLOWS} times in a row at a loss scale of 8; lower --lr (now 0.01)"
    assert errors == [("UserError", line)] * 2


def test_the_lowest_loss_scale_is_tried(folder):
    """To fall there takes more overflows in a row than are borne there."""
    found = run(folder, Layout(dp=2), 22, tuple(range(20)), precision="fp16", min_loss_scale=2.0**16)
    assert [step["skipped"] for step in found] == [True] * 20 + [False] * 2
    assert [step["scale"] for step in found] == [2.0 ** max(32 - number, 16) for number in range(20)] + [2.0**16] * 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS[2:5]], ids=str)
def test_a_step_is_that_of_fp32_but_for_rounding(folder, wide, layout, precision):
    step, want = wide
    (half,) = run(folder, layout, 1, precision=precision, initial_loss_scale=256.0)
    got = weights(folder, layout, want)
    layers, dtype = ALONE["num_layers"], DTYPES[precision]
    # Products and sums are kept in fp32 and rounded once: the longest sum does not count. See `rounding`.
    forward, whole = bound(dtype, stages=16 * (layers + 1)), bound(dtype, stages=3 * 16 * (layers + 1))
    # A loss moves by no more than twice what a logit moves: a normalised vector, of length 4, by a word's weights.
    longest = want["embedding.tokens.weight"].norm(dim=1).max().item() + 0.1
    assert abs(half["loss"] - step["loss"]) < 2 * forward * 4 * longest
    assert abs(half["norm"] / step["norm"] - 1) < whole
    # An update is no steeper than rate / epsilon in the clipped gradient, whose norm is 0.25 and errs by its own share
    # and the norm's; and the weights are rounded.
    for name, parameter in want.items():
        allowed = half["rate"] / 1e-2 * 2 * whole * 0.25 + 2 * UNIT_ROUNDOFF[dtype] * parameter.norm().item()
        assert (got[name] - parameter).norm().item() < allowed, name


def weights(folder: Path, layout: Layout, like: dict | None) -> dict[str, torch.Tensor]:
    records = [load(folder / f"weights.{rank}") for rank in range(layout.ranks)]
    shapes = {name: each[0].shape for name, each in records[0]["parameters"].items()} if like is None else None
    shapes = shapes or {name: each.shape for name, each in like.items()}
    whole = assemble(records, lambda record: record["parameters"], shapes)
    return {name: each.float() for name, each in whole.items()}
