"""Half precision over layouts: all ranks agree to take or skip a step, and its result has the bits of one process."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cs336_systems.fsdp import FSDP
from cs336_systems.train.trainer import MOST_OVERFLOWS
from tests.support import ranks
from tests.support.half_cases import DTYPES, half_case
from tests.support.layout_cases import Watched, assemble, load, write_text
from tests.support.layout_table import Layout
from tests.support.tolerances import bound

LAYOUTS = (
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, accumulate=True, schedule="interleaved"),
    Layout(dp=2, zero=1),
    Layout(tp=2, dp=2, zero=2, recompute="nested"),
    Layout(pp=2, dp=2, zero=3, accumulate=True),
    Layout(tp=2, pp=2, accumulate=True, recompute="attention", sequence_parallel=True),
)
EQUAL = (
    Layout(accumulate=True),
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(dp=4, zero=2),  # added in the order of the ranks
    Layout(pp=2, accumulate=True, schedule="interleaved"),
    *LAYOUTS[3:5],
)
ALONE = {"num_layers": 4}  # as the interleaved one needs


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


def test_without_a_loss_scale_an_infinity_reaches_every_rank(folder):
    found = run(folder, Layout(tp=2, pp=2, accumulate=True), 1, (0,), precision="bf16")
    assert not found[0]["finite"]
    assert not found[0]["skipped"]


def test_gradients_are_divided_by_the_scale_that_they_have(folder):
    """A clean step may double the scale, for the next one."""
    layout, found = Layout(dp=2, zero=1), []
    for window in (1, 1000):
        changes = {"precision": "fp16", "initial_loss_scale": 256.0, "loss_scale_window": window}
        (step,) = run(folder, layout, 1, **changes)
        assert (step["scale"], step["moved"]) == (512.0 if window == 1 else 256.0, True)
        found.append(weights(folder, layout))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def gave_up_case(group, folder: str, layout: dict, changes: dict) -> None:
    mixed_case(group, folder, layout, changes, 20, list(range(20)))


def test_a_run_that_overflows_for_ever_is_given_up(folder):
    changes = {**ALONE, "precision": "fp16", "initial_loss_scale": 2.0**5, "min_loss_scale": 8.0}
    layout = Layout(dp=2, zero=2)
    errors = ranks.run_failing(gave_up_case, 2, folder=str(folder), layout=asdict(layout), changes=changes)
    line = f"the gradients were inf or NaN {MOST_OVERFLOWS} times in a row at a loss scale of 8; lower --lr (now 0.01)"
    assert errors == [("UserError", line)] * 2


def test_the_lowest_loss_scale_is_tried(folder):
    """To fall there takes more overflows in a row than are borne there."""
    found = run(folder, Layout(dp=2), 22, tuple(range(20)), precision="fp16", min_loss_scale=2.0**16)
    assert [step["skipped"] for step in found] == [True] * 20 + [False] * 2
    assert [step["scale"] for step in found] == [2.0 ** max(32 - number, 16) for number in range(20)] + [2.0**16] * 2


@pytest.mark.parametrize("layout", EQUAL, ids=str)
def test_steps_in_half_precision_are_those_of_one_process_to_the_bit(folder, layout):
    """Losses, gradients and weights of two steps, whose sums one process takes in the same order; and the norm of the
    gradients, which the ranks add in another order, in float32."""
    changes = {"initial_loss_scale": 256.0}
    ranks.run(half_case, layout.ranks, folder=str(folder), layout=asdict(layout), changes=changes)
    for precision, dtype in DTYPES.items():
        records = [load(folder / f"{layout} {precision}.{rank}") for rank in range(layout.ranks)]
        for steps in zip(*records, strict=True):
            want = steps[0]["want"]
            shapes = {name: each.shape for name, each in want["parameters"].items()}
            for kind in ("gradients", "parameters"):
                found = assemble(steps, lambda step, kind=kind: step[kind], shapes)
                assert found.keys() == want[kind].keys()
                assert {each.dtype for each in found.values()} == {dtype}
                assert not [name for name in found if not torch.equal(found[name], want[kind][name])], kind
            flat = torch.cat([each.flatten() for each in want["gradients"].values()]).double()
            norm = flat.norm() / (256.0 if precision == "fp16" else 1.0)
            for step in steps:
                assert torch.equal(step["losses"], want["losses"])
                assert abs(step["norm"] / norm - 1) < bound(torch.float32, 1, len(flat))


def weights(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    records = [load(folder / f"weights.{rank}") for rank in range(layout.ranks)]
    shapes = {name: each[0].shape for name, each in records[0]["parameters"].items()}
    return assemble(records, lambda record: record["parameters"], shapes)
