"""Gating by one sort against the one-hot formulation, and both against a loop over tokens in plain Python.

The loop is fairseq's order of operations (branch moe, top2gate.py): softmax, first choice, noise, second choice,
normalise before, drop improbable seconds, padding, places, capacity, normalise after.
"""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.model.dropout import dropout_key
from cs336_systems.model.one_hot import one_hot_gate
from cs336_systems.model.routing import Routing, choose, draw_noise, gate
from cs336_systems.presets import Mixture
from tests.support.tolerances import bound

TOKENS, EXPERTS = 13, 5
ROUNDING = bound(torch.float64, stages=20, longest_sum=TOKENS * EXPERTS)
CAPACITIES = (None, 0, 1, 3, 8)
ROUTES = [
    *product([1], ["all"], ["after"], [False, True]),
    *product([2], ["all", "sampling", "random"], ["after", "before"], [False, True]),
]


def some_logits(seed: int, tokens: int = TOKENS, experts: int = EXPERTS) -> Tensor:
    """float64, with ties inside rows, rows that are equal, and so tokens that are as sure."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[::3, 1] = logits[::3, 3] = logits[::3].max(dim=1).values
    logits[1::4] = logits[1]
    return logits


def some_noise(mixture: Mixture, logits: Tensor, seed: int = 0) -> Tensor | None:
    key = dropout_key(seed, 1, torch.arange(1))
    return draw_noise(mixture, logits, (1, len(logits)), key, "router") if mixture.is_random else None


def by_hand(
    logits: Tensor, mixture: Mixture, capacity: int | None, real: Tensor | None, noise: Tensor | None
) -> tuple[dict, float, list, list]:
    """({(expert, slot): (token, weight)}, the balancing loss, for each choice what every expert is wanted by and how
    many tokens are kept), a token at a time."""
    gates, chosen, weights = [], [], []
    for token, row in enumerate(logits.tolist()):
        powers = [math.exp(each) for each in row]
        gates.append([power / sum(powers) for power in powers])
        first = gates[-1].index(max(gates[-1]))
        chosen.append([first])
        if mixture.top_k == 2:
            if noise is not None and mixture.second_policy == "sampling":
                row = [z - math.log(-math.log(u)) for z, u in zip(row, noise[token].tolist(), strict=True)]
            row[first] = -math.inf
            chosen[-1].append(row.index(max(row)))
        weights.append([gates[-1][expert] for expert in chosen[-1]])
        if mixture.top_k == 2 and mixture.normalize == "before":
            weights[-1] = [weight / sum(weights[-1]) for weight in weights[-1]]
        if mixture.second_policy == "random" and noise is not None and noise[token] >= 2 * weights[-1][1]:
            chosen[-1][1] = None
        if real is not None and not real[token]:
            chosen[-1] = [None] * mixture.top_k

    queue = sorted(range(len(gates)), key=lambda token: -max(gates[token]) if mixture.prioritized else 0)
    next_slot, kept = [0] * logits.shape[1], {}
    for choice in range(mixture.top_k):
        for token in queue:
            expert = chosen[token][choice]
            if expert is not None:
                if capacity is None or next_slot[expert] < capacity:
                    kept[token, choice] = expert, next_slot[expert]
                next_slot[expert] += 1  # by those that are dropped, too

    plan = {}
    for (token, choice), place in kept.items():
        weight = weights[token][choice]
        if mixture.top_k == 2 and mixture.normalize == "after":
            weight /= sum(weights[token][other] for other in range(2) if (token, other) in kept)
        plan[place] = token, weight
    firsts = [first for first, *_ in chosen if first is not None]
    balance = sum(row[first] for row in gates for first in firsts) * logits.shape[1] / len(gates) ** 2
    choices = range(mixture.top_k)
    wanted = [[sum(each[choice] == e for each in chosen) for e in range(logits.shape[1])] for choice in choices]
    return plan, balance, wanted, [sum(choice == each for _, each in kept) for choice in choices]


def of_plan(plan: Routing) -> dict:
    experts = torch.arange(len(plan.counts)).repeat_interleave(plan.counts).tolist()
    places = zip(experts, plan.slots.tolist(), strict=True)
    return dict(zip(places, zip(plan.tokens.tolist(), plan.weights.tolist(), strict=True), strict=True))


def of_one_hot(combine: Tensor) -> dict:
    return {(e, c): (t, combine[t, e, c].item()) for t, e, c in combine.nonzero().tolist()}


def same(got: dict, want: dict) -> bool:
    return got.keys() == want.keys() and all(
        got[place][0] == want[place][0] and abs(got[place][1] - want[place][1]) < ROUNDING for place in want
    )


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_sort_one_hot_and_the_loop_agree(route, padded):
    top_k, policy, normalize, prioritized = route
    mixture = Mixture(top_k, second_policy=policy, normalize=normalize, prioritized=prioritized)
    real = torch.arange(TOKENS) % 5 != 2 if padded else None
    for capacity, seed in product(CAPACITIES, (0, 1)):
        logits = some_logits(seed)
        noise = some_noise(mixture, logits, seed)
        want, balance, wanted, kept = by_hand(logits, mixture, capacity, real, noise)
        plan = gate(logits, mixture, capacity, real, noise)
        combine, other_balance = one_hot_gate(logits, mixture, capacity, real, noise)
        assert same(of_plan(plan), want)
        assert same(of_one_hot(combine), want)
        assert (plan.load.wanted.tolist(), plan.load.kept.tolist()) == (wanted, kept)
        assert abs(plan.balance.item() - balance) < ROUNDING * balance
        assert abs(other_balance.item() - balance) < ROUNDING * balance


def test_equal_probabilities_are_settled_by_the_number_even_where_the_logits_differ():
    """Rounding makes probabilities equal whose logits are not; fairseq looks for the first among the former."""
    low, one = torch.tensor([0.1, 1.0])
    logits = torch.stack((-one, low, low.nextafter(one)))[None]
    gates = logits.softmax(dim=-1)
    assert gates[0, 1] == gates[0, 2]
    assert choose(logits, gates, Mixture(), None).tolist() == [[1], [2]]
    assert one_hot_gate(logits, Mixture(), 2)[0].nonzero().tolist() == [[0, 1, 0], [0, 2, 0]]


@pytest.mark.parametrize("normalize", ["after", "before"])
def test_a_weight_that_underflows_and_more_tokens_than_bfloat16_can_count(normalize):
    logits = torch.zeros(300, 3, dtype=torch.bfloat16)
    logits[:, 1:] = -1000.0
    mixture = Mixture(normalize=normalize, gating_fp32=False)
    plan = gate(logits, mixture)
    assert plan.counts.tolist() == [300, 300, 0]
    assert plan.weights.tolist() == [1.0] * 300 + [0.0] * 300
    assert of_one_hot(one_hot_gate(logits, mixture)[0]) == {(0, slot): (slot, 1.0) for slot in range(300)}


def test_a_weight_too_small_to_be_normalized_stays_small():
    """Both want expert 0 first, which takes one; the other's second choice is divided by eps, more than its weight."""
    logits = torch.tensor([[0.0, -60.0, -40.0], [0.0, -40.0, -60.0]], dtype=torch.float64)
    tiny = math.exp(-40)
    want = {(0, 0): (0, 1.0), (1, 0): (1, tiny / torch.finfo(torch.float64).eps), (2, 0): (0, tiny)}
    assert same(of_plan(gate(logits, Mixture(), 1)), want)
    assert same(of_one_hot(one_hot_gate(logits, Mixture(), 1)[0]), want)


def test_no_tokens():
    for capacity in (None, 0, 2):
        logits = torch.zeros(0, 3, requires_grad=True)
        plan = gate(logits, Mixture(), capacity)
        combine, balance = one_hot_gate(logits, Mixture(), capacity)
        assert plan.counts.tolist() == [0, 0, 0]
        assert combine.numel() == 0
        assert plan.balance == balance == 0
        plan.balance.backward()


class Waits(TorchDispatchMode):
    """Counts the operators that would make the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        self.count += name in ("nonzero", "_local_scalar_dense", "masked_select", "bincount", "unique")
        self.count += sum(each is not None and each.dtype == torch.bool for each in masks)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("policy", ["all", "sampling", "random"])
def test_the_host_waits_once_where_something_may_be_dropped_and_else_never(policy):
    logits = some_logits(0)
    noise = some_noise(mixture := Mixture(second_policy=policy, prioritized=True), logits)
    for capacity, real in product((None, 2), (None, torch.ones(TOKENS, dtype=torch.bool))):
        with Waits() as waits:
            gate(logits, mixture, capacity, real, noise)
        assert waits.count == int(policy == "random" or capacity is not None or real is not None)


# Of numbers drawn with fixed keys. Independent ones would exceed a bound in fewer than one of 10^9 worlds.
RARE = math.log(2e9)  # -log of half of 10^-9, for two tails


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
