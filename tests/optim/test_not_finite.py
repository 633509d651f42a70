"""A half-precision gradient that is inf or NaN on one rank only, in every stage of ZeRO: all ranks must see it."""

import math
from itertools import product

import torch
from torch import Tensor, nn

from cs336_systems.fsdp import FSDP
from cs336_systems.optim.master_weights import MasterAdamW
from cs336_systems.zero import zero
from tests.support import ranks

HYPER = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
HALF = [torch.float16, torch.bfloat16]


class Branches(nn.Module):
    """Two layers side by side; `poison` replaces one element of the gradient that `first` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(4, 5)

    def forward(self, x: Tensor, row: int, poison: float | None) -> Tensor:
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
