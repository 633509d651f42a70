"""ZeRO stages 0 to 3 train as one process does: weights, gradient norms, accumulation, clipping, whatever the ranks."""

import pytest
import torch

from cs336_systems.zero import zero
from tests.support import ranks
from tests.support.fault_cases import full_parameters
from tests.support.parallel_cases import loss_of, make, one_process, spread
from tests.support.tolerances import bound

STAGES = (0, 1, 2, 3)
TOLERANCE = bound(torch.float64, stages=3 * 64, longest_sum=48)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}


def training_case(group, stage: int, optimizer: str, micro: int = 1, clip: float | None = None) -> None:
    cls, options = OPTIMIZERS[optimizer]
    model, opt = zero(make(seed=group.rank()), cls, stage, **options)
    want, want_norms = one_process(3, cls, micro=micro, clip=clip, **options)
    for step in range(3):
        for i in range(micro):
            if i < micro - 1:
                with model.no_sync():
                    loss_of(model, step * micro + i, group.rank(), group.size()).backward()
            else:
                loss_of(model, step * micro + i, group.rank(), group.size()).backward()
        model.finish_gradient_synchronization()
        norm = model.clip_grad_norm(float("inf") if clip is None else clip)
        assert abs(norm.item() - want_norms[step]) <= TOLERANCE * max(1.0, want_norms[step])
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            loss_of(model, step)  # an evaluation in between leaves nothing behind
    got = full_parameters(model)
    assert got.keys() == want.keys()
    for name, parameter in got.items():
        torch.testing.assert_close(
            parameter, want[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert spread(group, list(got.values())) == 0


def every_stage_case(group, optimizer: str, **options) -> None:
    for stage in STAGES:
        try:
            training_case(group, stage, optimizer, **options)
        except AssertionError as error:
            error.add_note(f"in stage {stage}")
            raise


@pytest.mark.parametrize(("optimizer", "world_size"), [("sgd", 2), *(("adamw", each) for each in (1, 3, 4))])
def test_training_equals_one_process(optimizer, world_size):
    ranks.run(every_stage_case, world_size, optimizer=optimizer)


@pytest.mark.parametrize("world_size", [2])
def test_accumulated_and_clipped_training_equals_one_process(world_size):
    ranks.run(every_stage_case, world_size, optimizer="adamw", micro=3, clip=0.5)
