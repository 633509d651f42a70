"""AdamW with fp32 masters: against fp32 AdamW on the same gradients, as state, and sharded; and gradients in half
precision that are inf or NaN on one rank only, which all ranks must see."""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from cs336_systems.optim.adamw import AdamW
from cs336_systems.optim.master_weights import MasterAdamW
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.zero import zero
from tests.support import ranks

HYPER = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
SHAPES = [(5, 3), (7,), (), (4, 6)]
HALF = [torch.float16, torch.bfloat16]
half = pytest.mark.parametrize("dtype", HALF, ids=str)


def make(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def mixed() -> list[nn.Parameter]:
    """In fp16, bf16 and fp32."""
    return [p for seed, dtype in enumerate((*HALF, torch.float32)) for p in make(dtype, seed)]


def widened(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().float()) for p in parameters]


def give(parameters: list[nn.Parameter], step: int, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Gradients of a step, rounded to `dtype`; the second parameter has none in even steps."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(parameters):
        gradient = (torch.randn(p.shape, generator=generator) * scale).to(dtype).to(p.dtype)
        p.grad = None if i == 1 and step % 2 == 0 else gradient


def train(parameters, optimizer, steps, dtype, **kwargs) -> None:
    for step in steps:
        give(parameters, step, dtype)
        optimizer.step(**kwargs)


def assert_same(ours: list, theirs: list) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@half
def test_the_master_is_fp32_adamw_on_the_same_gradients_bitwise(dtype):
    ours = make(dtype)
    truth = widened(ours)
    optimizer, oracle = MasterAdamW(ours, **HYPER), AdamW(truth, **HYPER)
    for step in range(6):
        for parameters, each in ((ours, optimizer), (truth, oracle)):
            train(parameters, each, [step], dtype)
        used = [i for i in range(len(ours)) if step or i != 1]
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same([optimizer.state[ours[i]][name] for i in used], [oracle.state[truth[i]][name] for i in used])
        assert_same([optimizer.state[ours[i]]["master"] for i in used], [truth[i] for i in used])
        assert_same(ours, [p.to(dtype) for p in truth])


@pytest.mark.parametrize("multiplier", [None, 1.0, torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)], ids=str)
def test_wide_parameters_are_their_own_masters_and_the_step_is_adamws(multiplier):
    for dtype in (torch.float32, torch.float64):
        ours, truth = make(dtype), make(dtype)
        optimizer = MasterAdamW(ours, **HYPER)
        train(ours, optimizer, range(5), dtype, multiplier=multiplier)
        train(truth, AdamW(truth, **HYPER), range(5), dtype)
        assert_same(ours, truth)
        assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_multiplier_undoes_the_loss_scale_after_the_gradient_is_widened(dtype):
    """Gradients of 2^-20 times a normal variable are mostly subnormal in fp16; scaled by 2^14 they are not. A power of
    two is exact, so the scaled run is that of the unscaled gradients in fp32."""
    ours, truth = make(dtype), widened(make(dtype))
    optimizer, oracle = MasterAdamW(ours, **HYPER), AdamW(truth, **HYPER)
    multiplier = torch.tensor(2.0**-14) if dtype == torch.float16 else 2.0**-14
    for step in range(4):
        give(ours, step, dtype, scale=2.0**-6)
        for p, q in zip(ours, truth, strict=True):
            q.grad = None if p.grad is None else p.grad.float() * 2.0**-14
        before = [p.grad if p.grad is None else p.grad.clone() for p in ours]
        same = [p.grad for p in ours]
        optimizer.step(multiplier=multiplier)
        oracle.step()
        assert all(p.grad is g for p, g in zip(ours, same, strict=True))
        assert_same([g for g in before if g is not None], [p.grad for p in ours if p.grad is not None])
    assert_same(ours, [q.to(dtype) for q in truth])


def test_phases_are_timed_in_order_and_main_gradients_are_gone_after_the_step():
    parameters = [*make(torch.float16), *make(torch.float32)]
    optimizer, seen = MasterAdamW(parameters, **HYPER), []
    optimizer.timer = lambda name: seen.append(name) or nullcontext()
    train(parameters, optimizer, [1], torch.float16, multiplier=0.5)
    phases = ("copy-to-main-grad", "clip-main-grad", "inner-step", "copy-main-to-model-params")
    assert seen == [f"optimizer-{phase}" for phase in phases]
    assert set(optimizer.state) == set(parameters)
    assert all(state["master"].grad is None for state in optimizer.state.values() if "master" in state)
    assert all(p.grad.dtype == p.dtype for p in parameters)


@half
def test_a_state_round_trip_is_exact_and_a_copy(dtype):
    ours = make(dtype)
    optimizer = MasterAdamW(ours, **HYPER)
    train(ours, optimizer, range(3), dtype)
    twins = [nn.Parameter(p.detach().clone()) for p in ours]
    resumed = MasterAdamW(twins, lr=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    for p, q in zip(ours, twins, strict=True):
        assert all(resumed.state[q][name] is not value for name, value in optimizer.state[p].items() if name != "step")
    train(ours, optimizer, range(3, 6), dtype)
    train(twins, resumed, range(3, 6), dtype)
    assert_same(ours, twins)
    assert_same([s["master"] for s in resumed.state.values()], [s["master"] for s in optimizer.state.values()])


def test_states_of_plain_adamw_and_of_another_precision_load():
    """Without a master the parameter is taken as it is; for a parameter in fp32 the master is dropped."""
    wide, narrow = make(torch.float32), make(torch.float16)
    plain, ours = AdamW(wide, **HYPER), MasterAdamW(narrow)
    train(wide, plain, range(3), torch.float16)
    ours.load_state_dict(plain.state_dict())
    assert_same([ours.state[p]["exp_avg"] for p in narrow], [plain.state[p]["exp_avg"] for p in wide])
    truth = widened(narrow)
    oracle = AdamW(truth)
    oracle.load_state_dict(plain.state_dict())
    train(narrow, ours, [3], torch.float16)
    train(truth, oracle, [3], torch.float16)
    assert_same([ours.state[p]["master"] for p in narrow], truth)

    back = MasterAdamW(truth)
    back.load_state_dict(ours.state_dict())
    train(truth, back, [5], torch.float16)
    assert set(back.state[truth[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_closure_is_run_first_with_gradients_enabled():
    p = nn.Parameter(torch.ones(3).half())
    optimizer = MasterAdamW([p], lr=0.125)

    def closure() -> float:
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure, multiplier=0.5) == 3.0
    assert (p < 1).all()
    before = p.detach().clone()
    with pytest.raises(UserError, match=r"one number, not of shape \(2,\)"):
        optimizer.step(multiplier=torch.ones(2))
    assert torch.equal(p, before)


def save_case(group, folder: str, layout: str) -> None:
    """Two steps sharded; the state is what a plain optimizer would have saved, masters and all."""
    parameters, plain = mixed(), mixed()
    optimizer = ShardedOptimizer(parameters, MasterAdamW, layout=layout, **HYPER)
    reference = MasterAdamW(plain, **HYPER)
    train(parameters, optimizer, range(2), torch.bfloat16, multiplier=torch.tensor(0.5))
    train(plain, reference, range(2), torch.bfloat16, multiplier=0.5)
    assert_same(parameters, plain)
    whole, expected = optimizer.state_dict(), reference.state_dict()["state"]
    torch.testing.assert_close(whole["state"], expected, rtol=0, atol=0)
    assert sum("master" in values for values in expected.values()) == 2 * 4
    if group.rank() == 0:
        torch.save([parameters, whole], f"{folder}/state.pt")


def resume_case(group, folder: str, layout: str) -> None:
    parameters, state = torch.load(f"{folder}/state.pt", weights_only=True)
    optimizer = ShardedOptimizer(parameters, MasterAdamW, layout=layout, lr=0.9)
    optimizer.load_state_dict(state)
    plain = mixed()
    reference = MasterAdamW(plain, **HYPER)
    train(plain, reference, range(2), torch.bfloat16, multiplier=0.5)
    train(parameters, optimizer, range(2, 5), torch.bfloat16)
    train(plain, reference, range(2, 5), torch.bfloat16)
    assert_same(parameters, plain)
    torch.testing.assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize(("saved", "resumed", "world_size"), [("whole", "flat", 3), ("flat", "whole", 1)])
def test_a_sharded_run_saves_and_resumes_bitwise_at_any_number_of_ranks(tmp_path, saved, resumed, world_size):
    ranks.run(save_case, 2, folder=str(tmp_path), layout=saved)
    ranks.run(resume_case, world_size, folder=str(tmp_path), layout=resumed)


class Branches(nn.Module):
    """Two layers side by side; `poison` replaces one element of the gradient that `first` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, row: int, poison: float | None) -> torch.Tensor:
        y, z = self.first(x), self.second(x)
        if poison is not None:
            where = torch.zeros(y.shape, dtype=torch.bool)
            where[0, row] = True
            y.register_hook(lambda gradient: gradient.masked_fill(where, poison))
        return (y.sum() + z.sum()) / 8


def poison_case(group) -> list:
    return [[poison_one(group, stage, dtype) for dtype in HALF] for stage in range(4)]


def poison_one(group, stage: int, dtype: torch.dtype) -> list:
    """Of every case the norm, and whether a gradient of this rank's own is bad; norm and parameters of a clean step."""
    torch.manual_seed(0)
    model, optimizer = zero(Branches().to(dtype), MasterAdamW, stage, **HYPER)
    x = torch.linspace(0.5, 1, 12).view(3, 4).to(dtype) + group.rank()
    seen = []
    for bad_rank, row, poison in product((0, 1), (0, 5), (math.inf, -math.inf, math.nan)):
        model(x, row, poison if group.rank() == bad_rank else None).backward()
        model.finish_gradient_synchronization()
        norm = model.clip_grad_norm(1e9)
        kept = [each.gradient for each in model.kept_gradients()] if stage == 2 else []
        gradients = kept or [p.grad for p in model.parameters()]
        seen.append([str(norm.item()), any(not g.isfinite().all() for g in gradients if g is not None)])
        model.zero_grad()
    model(x, 0, None).backward()
    model.finish_gradient_synchronization()
    norm = model.clip_grad_norm(1e9)
    optimizer.step(multiplier=torch.tensor(0.25))
    full = model.gather_full_params() if isinstance(model, FSDP) else model.module.state_dict()
    return [seen, norm.item(), {name: value.tolist() for name, value in full.items()}]


def test_a_gradient_that_is_not_finite_on_one_rank_makes_the_norm_so_on_all():
    """And on every rank a gradient of its own, so that a look at those alone would see it, too."""
    by_rank = ranks.run(poison_case, 2)
    for stage, dtype in product(range(4), range(len(HALF))):
        first, second = (found[stage][dtype] for found in by_rank)
        for seen, norm, parameters in (first, second):
            assert len(seen) == 12
            assert all(text in ("inf", "nan") and bad for text, bad in seen), (stage, seen)
            assert math.isfinite(norm)
            assert parameters == by_rank[0][0][dtype][2]  # two terms, whose sum has one order
        assert first[1:] == second[1:]
