"""Traffic of every strategy: ranks send what one rank observes alone under the fake group, and by hand."""

from collections import Counter

import pytest
import torch
from torch import nn

from cs336_systems.comm import fake_ranks, record
from cs336_systems.fsdp import FSDP
from cs336_systems.layout import Layout
from cs336_systems.train.observation import observe, observe_traffic
from cs336_systems.train.recipe import Recipe
from cs336_systems.zero import zero
from tests.support.ranks import run
from tests.support.traffic_cases import (
    BERT,
    GPT,
    LLAMA,
    SEQ,
    SMALL,
    WRAPPERS,
    awkward,
    observed,
    run_turns,
    settings,
    strategies_case,
    wrapper_case,
)

DEEP = {"num_layers": 4}
EXPERTS = {"num_experts": 4}
SHARED = GPT | EXPERTS | {"mixture": {"shared_expert": True, "expert_d_ff": 64, "aux_scope": "global"}}
EVERY = LLAMA | EXPERTS | {"expert_every": 1, "mixture": {"top_k": 1, "capacity_factor": 0.75}}
EINSUM = EXPERTS | {"mixture": {"dispatch": "einsum", "capacity_factor": 1.5, "aux_scope": "global"}}
ON_TWO = [
    ({}, {"tp": 2}),
    (LLAMA, {"tp": 2, "sequence": True}),
    (BERT | {"recompute": "attention"}, {"tp": 2, "sequence": True}),
    (LLAMA | {"recompute": "segments", "recompute_every": 2, "num_layers": 3}, {"tp": 2, "sequence": True}),
    (LLAMA | {"recompute": "nested", "num_layers": 5}, {"tp": 2, "sequence": True}),
    ({}, {"pp": 2, "m": 3}),
    (BERT, {"zero": 3}),
    (LLAMA | {"recompute": "segments"}, {"zero": 3}),
    (LLAMA | {"recompute": "attention"}, {"cp": 2}),
    ({"dropout": 0.1}, {"cp": 2, "cp_type": "gather", "zero": 2}),
    (LLAMA, {"cp": 2, "cp_type": "ulysses"}),
    *((model, {"ep": 2}) for model in (EVERY, EINSUM)),
    (SHARED, {"zero": 3}),
    *((SHARED | DEEP | {"recompute": recompute}, {"ep": 2}) for recompute in ("segments", "nested")),
    (EVERY, {"tp": 2, "sequence": True}),
    (EXPERTS | DEEP | {"recompute": "segments", "recompute_every": 3}, {"tp": 2}),
    # A router that is the last in the list of layers.
    (EXPERTS | {"expert_every": 1, "recompute": "segments"}, {"zero": 3}),
]
ON_FOUR = [
    (BERT, {"tp": 2, "pp": 2, "sequence": True, "m": 3}),
    (LLAMA | DEEP | {"recompute": "segments"}, {"tp": 2, "pp": 2, "chunks": 2, "sequence": True}),
    (BERT, {"tp": 2, "sequence": True, "zero": 2}),
    (BERT, {"pp": 2, "zero": 3, "schedule": "gpipe", "m": 3}),
    (BERT | {"recompute": "nested"}, {"pp": 2, "zero": 3, "m": 2}),
    (LLAMA, {"tp": 2, "cp": 2, "sequence": True}),
    (LLAMA, {"pp": 2, "cp": 2, "zero": 1, "m": 2}),
    (SHARED, {"tp": 2, "ep": 2, "sequence": True}),
    (SHARED, {"ep": 2, "zero": 3, "m": 1}),
    # The first stage has no experts.
    (EXPERTS, {"pp": 2, "ep": 2, "zero": 2}),
]
SOME = ("flat FB", "zero 1 FB", "zero 2 FB", "zero 3 FFBFBB", "sharded flat", "sharded whole")
STRATEGIES = {2: (ON_TWO, list(WRAPPERS)), 4: (ON_FOUR, SOME)}  # by ranks


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_ranks_send_what_one_observes_alone(ranks):
    """Every transfer of a step, by phase, axis, verb, purpose, size and ranks, on each rank: without shards
    ranks of a stage send the same, which its first one observes."""
    layouts, wrappers = STRATEGIES[ranks]
    steps = [(changes, settings(ranks, **degrees)) for changes, degrees in layouts]
    seen: dict[tuple[int, int], list] = {}
    for rank, (layouts_sent, wrappers_sent) in enumerate(run(strategies_case, ranks, layouts=steps, wrappers=wrappers)):
        for number, (step, sent) in enumerate(zip(steps, layouts_sent, strict=True)):
            of_stage = 1 if step[1].get("zero") else ranks // step[1].get("pp", 1)
            first = rank // of_stage * of_stage
            if (number, first) not in seen:
                seen[number, first] = observed(*step, first)
            assert sent == seen[number, first], (rank, step)
        with fake_ranks(rank, ranks) as group:
            for name, sent, wanted in zip(wrappers, wrappers_sent, wrapper_case(group, wrappers), strict=True):
                assert sent == wanted, (rank, name)


def test_an_axis_that_is_not_split_sends_nothing():
    """BERT's heads gather the sequence over tp, and ulysses exchanges heads over cp: each has its own axis."""
    bert = observed(BERT, settings(2, tp=2, sequence=True), 0)
    assert ("all-gather", "heads") in {(verb, what) for _, axis, verb, what, *_ in bert if axis == "tp"}
    assert "cp" not in {axis for _, axis, *_ in bert}
    split = observed(LLAMA, settings(2, cp=2, cp_type="ulysses"), 0)
    assert {what for _, axis, _, what, *_ in split if axis == "cp"} == {"heads", "heads back"}


def sent_by(stage: int, ranks: int) -> Counter:
    """(verb, elements, bytes an element) of a step of a stage of ZeRO, votes apart, on the first of some ranks: of a
    module of 15 and 10 numbers, of four and eight bytes, and a bias of 5."""
    with fake_ranks(0, ranks):
        layers = (nn.Linear(3, 5), Widen(), nn.Linear(5, 2, bias=False, dtype=torch.float64))
        model, optimizer = zero(nn.Sequential(*layers), torch.optim.AdamW, stage)
        with record() as events:
            model(torch.ones(1, 3)).sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
    return Counter((e.verb, e.numel, e.dtype.itemsize) for e in events if e.label != "used parameters")


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def test_a_small_module_by_hand():
    reduced = {("all-reduce", *size): 1 for size in ((20, 4), (10, 8))}
    gathers = {("all-gather", *size): 1 for size in ((21, 4), (12, 8))}
    scatters = {("reduce-scatter", *size): 1 for size in ((21, 4), (12, 8))}  # 20 and 10 in three equal slices
    assert sent_by(1, 3) == reduced | gathers
    assert sent_by(2, 3) == scatters | gathers
    # 5 rows of 3 are padded to 6, which two ranks share; each weight is gathered for each pass.
    weights = {("all-gather", *size): 2 for size in ((18, 4), (10, 8))}
    gradients = {("reduce-scatter", *size): 1 for size in ((18, 4), (10, 8))}
    assert sent_by(3, 2) == weights | gradients | {("all-reduce", 5, 4): 1}


def test_what_fsdp_gathers_by_hand():
    """Each weight twice; the tied one for the head as well, and the shared one for its second call."""
    with fake_ranks(0, 2) as group, record() as events:
        run_turns(FSDP(awkward()), "FB", group)
    by_hand = {"embedding": 3, "first": 2, "shared": 3, "unused": 2, "last": 2}
    found = Counter(event.label for event in events if event.verb == "all-gather")
    assert found == {f"{name}.weight": times for name, times in by_hand.items()}


@pytest.mark.parametrize(
    ("name", "m", "gathers"), [("1f1b", 3, 12), ("gpipe", 5, 15), ("gpipe", 2, 6), ("gpipe", 1, 4)]
)
def test_an_embedding_that_the_last_stage_has_for_its_head_alone(name, m, gathers):
    """Twice forward. Backward twice if a forward was just before, else once, and not at all where the backward before
    has left it: 1F1B with three microbatches 3 x 2 + 3 x 2, GPipe with five 5 x 2 + 2 + 0 + 1 + 1 + 1."""
    layout = Layout(pp=2, dp=2, schedule=name, zero=3, global_batch=2 * m)
    found: Counter = Counter()
    for each, times in observe_traffic(Recipe.of(context=SEQ), SMALL, layout, 2).items():
        found[each.verb, each.what, each.nbytes] += times
    table = 4 * SMALL.vocab_size * SMALL.d_model
    assert found["all-gather", "weight", table] == gathers
    assert found["reduce-scatter", "weight, gradient", table] == m


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_of_many_microbatches_some_are_enough(schedule):
    layout = Layout(pp=2, dp=2, schedule=schedule, zero=3, global_batch=2 * 8)
    some, every = (observe(Recipe.of(context=SEQ), SMALL, layout, 2, most=most) for most in (3, 4))
    assert some == every
