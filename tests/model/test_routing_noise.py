"""The random numbers of gating: their source, and the distributions of the policies that use them.

The inputs are fixed, so a statistic either lies within its bound or does not. Independent numbers would exceed each
bound in fewer than one of 10^9 worlds.
"""

import math

import pytest
import torch
from torch import Tensor

from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.routing import choose, draw_noise, gate
from cs336_systems.presets import Mixture

RARE = math.log(2e9)  # -log of half of 10^-9, for two tails


def some_noise(mixture: Mixture, logits: Tensor) -> Tensor:
    key = dropout_key(0, 1, torch.arange(1))
    return draw_noise(mixture, logits, (1, len(logits)), key, "router")


def test_the_second_expert_is_sampled_from_the_router_without_the_first():
    """Chi-square of 20 000 tokens with the same logits, whose bound is Laurent and Massart's (2000, lemma 1)."""
    row = torch.tensor([0.5, 2.0, -0.3, 1.0, 0.1])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = row.to(dtype).expand(20_000, 5)
        noise = some_noise(mixture := Mixture(second_policy="sampling"), logits)
        first, second = choose(logits, logits.softmax(-1), mixture, noise)
        assert (first == 1).all()
        others = row.to(dtype).double().index_fill(0, torch.tensor(1), -torch.inf).softmax(0) * 20_000
        off = (torch.bincount(second, minlength=5) - others)[[0, 2, 3, 4]]
        assert (off**2 / others[[0, 2, 3, 4]]).sum() <= 3 + 2 * math.sqrt(3 * RARE) + 2 * RARE
        assert off.abs().max() > 0


@pytest.mark.parametrize("normalize", ["after", "before"])
@pytest.mark.parametrize("logit", [0.0, -1.5, -30.0])
def test_an_improbable_second_expert_is_kept_with_twice_its_weight(logit, normalize):
    logits = torch.tensor([1.0, logit, -2.0], dtype=torch.float64).expand(20_000, 3)
    mixture = Mixture(second_policy="random", normalize=normalize)
    plan = gate(logits, mixture, None, None, some_noise(mixture, logits))
    gates = logits[0].softmax(0)
    second = gates.topk(2).values[1] / (gates.topk(2).values.sum() if normalize == "before" else 1)
    p = min(1.0, 2 * second.item())
    # Bernstein's inequality, solved for the distance.
    distance = RARE / 3 + math.sqrt(RARE**2 / 9 + 2 * RARE * 20_000 * p * (1 - p))
    assert plan.load.kept[0] == 20_000
    assert abs(plan.load.kept[1] - 20_000 * p) <= distance
    assert plan.load.kept[1] == plan.load.wanted[1].sum()


def test_torchs_noise_is_never_zero(monkeypatch):
    monkeypatch.setattr("torch.rand", lambda shape, **options: torch.zeros(shape, dtype=options["dtype"]))
    drawn = draw_noise(Mixture(second_policy="sampling"), torch.zeros(6, 5), (2, 3), None, "a")
    assert drawn.log().isfinite().all()


def test_noise_comes_from_the_key_or_from_torchs_generator_in_float32_at_least():
    logits = torch.zeros(6, 5, dtype=torch.bfloat16)
    for policy, shape in (("sampling", (6, 5)), ("random", (6,))):
        for key in (None, dropout_key(0, 0, torch.arange(2))):
            drawn = draw_noise(Mixture(second_policy=policy), logits, (2, 3), key, "a")
            assert (drawn.shape, drawn.dtype) == (shape, torch.float32)
            again = draw_noise(Mixture(second_policy=policy), logits, (2, 3), key, "a")
            assert torch.equal(again, drawn) == (key is not None)
            wide = draw_noise(Mixture(second_policy=policy), logits.double(), (2, 3), key, "a")
            assert wide.dtype == torch.float64
