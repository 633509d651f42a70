"""Every strategy's traffic against `comm.record()`: all that a rank sends in a step, and at the start, exactly."""

from collections import Counter

import pytest
import torch
from torch import nn

from cs336_systems.comm import record
from cs336_systems.cost.fsdp_traffic import Walk, count_walks, fsdp_traffic
from cs336_systems.cost.layout import TIED, Layout, rank_shapes
from cs336_systems.cost.layout_traffic import shard_traffic
from cs336_systems.cost.transfer import Parameter, Transfer
from cs336_systems.cost.wrapper_traffic import ddp_traffic, optimizer_traffic, zero_traffic
from cs336_systems.errors import UserError
from cs336_systems.fsdp import FSDP
from tests.layout_cases import write_text
from tests.parallel_cases import make
from tests.ranks import run
from tests.traffic_cases import (
    BERT,
    CALLS,
    GPT,
    LAYERS,
    LLAMA,
    SMALL,
    WRAPPERS,
    described,
    passes_of,
    settings,
    strategies_case,
)

MODELS, DEEP = [{}, LLAMA, BERT], {"num_layers": 4}
ON_TWO = [
    *((model, {"tp": 2, "sequence": sequence}) for model in MODELS for sequence in (False, True)),
    (BERT | {"recompute": "attention"}, {"tp": 2, "sequence": True}),
    *(
        (LLAMA | {"recompute": recompute, "recompute_every": every, "num_layers": layers}, {"tp": 2, "sequence": True})
        for recompute, every, layers in (("segments", 2, 3), ("nested", 1, 1), ("nested", 1, 5))
    ),
    (BERT | {"recompute": "nested", "num_layers": 3}, {"tp": 2, "sequence": True}),
    ({"recompute": "segments"}, {"tp": 2, "m": 2}),
    (DEEP | {"recompute": "nested", "dropout": 0.1}, {"tp": 2, "m": 2}),
    *((model, {"pp": 2, "m": 3}) for model in MODELS),
    (BERT, {"pp": 2, "schedule": "gpipe", "m": 3}),
    (LLAMA | DEEP, {"pp": 2, "chunks": 2}),
    *((BERT, {"zero": stage}) for stage in (2, 3)),
    *((LLAMA | {"recompute": recompute}, {"zero": 3}) for recompute in ("none", "segments")),
]
ON_FOUR = [
    (BERT, {"tp": 2, "pp": 2, "sequence": True, "m": 3}),
    (LLAMA | DEEP | {"recompute": "segments"}, {"tp": 2, "pp": 2, "chunks": 2, "sequence": True}),
    (BERT, {"tp": 2, "sequence": True, "zero": 2}),
    ({}, {"pp": 2, "zero": 2}),
    (BERT, {"pp": 2, "zero": 3, "schedule": "gpipe", "m": 3}),
    ({}, {"pp": 2, "zero": 3, "schedule": "gpipe", "m": 1}),
    (BERT | {"recompute": "nested"}, {"pp": 2, "zero": 3, "m": 2}),
    (BERT, {"tp": 2, "sequence": True, "zero": 3}),
    ({"dropout": 0.1}, {"tp": 4, "sequence": True}),
]


EXPERTS = {"num_experts": 4}
SHARED = GPT | EXPERTS | {"mixture": {"shared_expert": True, "expert_d_ff": 64, "aux_scope": "global"}}
EVERY = LLAMA | EXPERTS | {"expert_every": 1, "mixture": {"top_k": 1, "capacity_factor": 0.75}}
EINSUM = EXPERTS | {"mixture": {"dispatch": "einsum", "capacity_factor": 1.5, "aux_scope": "global"}}
SPARSE_ON_TWO = [
    *((model, {"ep": 2}) for model in (EXPERTS, SHARED, EVERY, EINSUM)),
    *((SHARED, {"zero": zero}) for zero in (1, 2, 3)),
    *((SHARED | DEEP | {"recompute": recompute}, {"ep": 2}) for recompute in ("attention", "segments", "nested")),
    *((EVERY, {"tp": 2, "sequence": sequence}) for sequence in (False, True)),
    *((GPT | EXPERTS | DEEP | {"recompute": each}, {"tp": 2, "sequence": True}) for each in ("segments", "nested")),
    (EXPERTS | DEEP | {"recompute": "segments", "recompute_every": 3}, {"tp": 2}),
    (EINSUM, {"tp": 2}),
    (SHARED | DEEP, {"pp": 2, "chunks": 2}),
    # A router that is the last in the list of layers.
    *((EXPERTS | {"expert_every": 1, "recompute": each}, {"zero": 3}) for each in ("none", "segments")),
]
SPARSE_ON_FOUR = [
    (SHARED, {"tp": 2, "ep": 2, "sequence": True}),
    *((SHARED, {"ep": 2, "zero": zero, "m": 1}) for zero in (1, 3)),
    (EVERY, {"ep": 4}),
    (EXPERTS | DEEP, {"pp": 2, "ep": 2, "zero": 1}),
    (EXPERTS | {"expert_every": 1}, {"pp": 2, "zero": 3, "schedule": "gpipe", "m": 2}),
    # The first stage has no experts.
    (EXPERTS, {"pp": 2, "ep": 2, "zero": 2}),
]


TRAINERS = [
    ("layout", "bf16", {"dp": 2, "model": "bert", "accumulate": True, "zero": 2}),
    ("layout", "fp32", {"tp": 2, "model": "bert", "sequence_parallel": True}),
    ("experts", "fp32", {"mixture": "shared", "ep": 2, "zero": 1}),
    ("experts", "bf16", {"dp": 2, "zero": 3}),
]
SOME = ("flat FB", "zero 1 FB", "zero 2 FB", "zero 3 FFBFBB", "sharded flat", "sharded whole")
STRATEGIES = {  # by ranks: layouts, wrappers, and recipes for the trainer
    2: (ON_TWO + SPARSE_ON_TWO, list(WRAPPERS), TRAINERS),
    4: (ON_FOUR + SPARSE_ON_FOUR, SOME, []),
}


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_a_step_sends_what_the_formula_says(ranks, tmp_path):
    write_text(tmp_path)
    layouts, wrappers, trainers = STRATEGIES[ranks]
    steps = [(changes, settings(ranks, **layout)) for changes, layout in layouts]
    wrong = run(strategies_case, ranks, layouts=steps, wrappers=wrappers, trainers=trainers, folder=str(tmp_path))
    assert wrong == [[]] * ranks


TWO = [Parameter("in.weight", (5, 3)), Parameter("in.bias", (5,)), Parameter("out.weight", (2, 5), 8)]


def test_a_small_module_by_hand():
    """Two matrices of 15 and 10 numbers, of four and eight bytes, and a bias of 5, over two ranks."""
    ballot = Transfer("all-reduce", "dp", "ballot", 4, 4)
    apart = [Transfer("all-reduce", "dp", "bucket", *size) for size in ((15, 4), (5, 4), (10, 8))]
    assert ddp_traffic(TWO, 2, 0.0) == {ballot: 1} | dict.fromkeys(apart, 1)
    one = [Transfer("all-reduce", "dp", "bucket", *size) for size in ((20, 4), (10, 8))]
    assert ddp_traffic(TWO, 2, None) == {ballot: 1} | dict.fromkeys(one, 1)
    # 80 bytes fill a bucket of 80 and not one of 79.
    assert ddp_traffic(TWO, 2, 80e-6) == ddp_traffic(TWO, 2, None)
    assert ddp_traffic(TWO, 2, 79e-6) == ddp_traffic(TWO, 2, 0.0)
    gathers = {Transfer("all-gather", "dp", "updated parameters", *size): 1 for size in ((21, 4), (12, 8))}
    scatters = {Transfer("reduce-scatter", "dp", "bucket", *size): 1 for size in ((21, 4), (12, 8))}
    assert zero_traffic(TWO, 3, 2) == {ballot: 1} | scatters | gathers  # 20 and 10 in three equal slices
    assert zero_traffic(TWO, 3, 1) == {ballot: 1} | dict.fromkeys(one, 1) | gathers
    # 5 rows of 3 are padded to 6, which two ranks share; each weight is gathered for each pass of two microbatches.
    weights = {Transfer("all-gather", "dp", "weight", *size): 4 for size in ((18, 4), (10, 8))}
    gradients = {Transfer("reduce-scatter", "dp", "weight, gradient", *size): 2 for size in ((18, 4), (10, 8))}
    rest = {ballot: 1, Transfer("all-reduce", "dp", "replicated", 5, 4): 1}
    assert zero_traffic(TWO, 2, 3, passes=["forward", "backward"] * 2) == weights | gradients | rest
    assert not zero_traffic(TWO, 1, 3)
    empty = Parameter("empty.weight", (0, 5))  # has no rows to share
    voted = Transfer("all-reduce", "dp", "ballot", 2, 4)
    assert zero_traffic([empty], 2, 3) == {voted: 1, Transfer("all-reduce", "dp", "replicated", 0, 4): 1}


def test_the_ladder_by_hand():
    """Ten tensors of 1, 77, 35, 25, 5, 5, 9, 3, 35 and 7 numbers of eight bytes, and a frozen one, from the last on."""
    parameters, _ = described(make())
    for size, by_hand in (
        (0.0, [7, 35, 3, 9, 5, 5, 25, 35, 77, 1]),
        (0.0005, [7 + 35 + 3 + 9 + 5, 5 + 25, 35, 77, 1]),  # 62 numbers at most, or one tensor
        (None, [202]),
    ):
        want = Counter(Transfer("all-reduce", "dp", "bucket", elements, 8) for elements in by_hand)
        assert ddp_traffic(parameters, 2, size) == want + Counter([Transfer("all-reduce", "dp", "ballot", 11, 4)])


def test_what_fsdp_gathers_by_hand():
    """Each weight twice; the tied one for the head as well, and the shared one for its second call."""
    walk = Walk(LAYERS, CALLS)
    walk.forward()
    walk.backward()
    walk.finish()
    by_hand = {"embedding": 3, "first": 2, "shared": 3, "unused": 2, "last": 2}
    assert walk.gathers == {f"{name}.weight": times for name, times in by_hand.items()}
    assert walk.reductions == dict.fromkeys(walk.gathers, 1)


class Lent(nn.Module):
    """A table that is read before the last of some layers, all of which are registered after it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(3, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[-1](self.layers[:-1](x) + self.table.weight)


def lent_case(group, layers):
    """How often each weight is gathered in a forward and a backward."""
    model = FSDP(Lent(layers))
    with record() as events:
        model(torch.ones(3, 4)).sum().backward()
        model.finish_gradient_synchronization()
    return Counter(event.label for event in events if event.verb == "all-gather")


@pytest.mark.parametrize(("layers", "table"), [(2, 2), (3, 4)])
def test_how_far_ahead_weights_are_gathered(layers, table):
    """The table that is read after one layer is gathered once each way. After two layers, the second has dropped it in
    forward; and backward, three layers after it, has not come to it yet, and gathers it when its gradient is complete,
    in vain: twice each way."""
    names = ["table.weight", *(f"layers.{n}.weight" for n in range(layers))]
    gathers, _ = count_walks(names, [*range(1, layers), names[0], layers], ["forward", "backward"])
    assert run(lent_case, 2, layers=layers) == [gathers] * 2
    assert gathers == dict.fromkeys(names, 2) | {names[0]: table}


def test_whole_parameters_are_dealt_by_hand():
    """9, 7, 6, 5 and 4 to two ranks: 9 and 5 to one; 7, 6 and 4 to the other."""
    tensors = [Parameter(f"{n}", (n,)) for n in (4, 9, 6, 7, 5)]
    want = {Transfer("broadcast", "dp", "updated parameters", load, 4): 1 for load in (14, 17)}
    assert optimizer_traffic([tensors], 2, "whole") == want
    assert optimizer_traffic([tensors[:1]], 2, "whole") == {Transfer("broadcast", "dp", "updated parameters", 4, 4): 1}


@pytest.mark.parametrize(
    ("name", "m", "gathers"), [("1f1b", 3, 12), ("gpipe", 5, 15), ("gpipe", 2, 6), ("gpipe", 1, 4)]
)
def test_an_embedding_that_the_last_stage_has_for_its_head_alone(name, m, gathers):
    """Twice forward. Backward twice if a forward was just before, else once, and not at all where the backward before
    has left it: 1F1B with three microbatches 3 x 2 + 3 x 2, GPipe with five 5 x 2 + 2 + 0 + 1 + 1 + 1."""
    layout = Layout(pp=2, dp=2, schedule=name, zero=3, global_batch=2 * m)
    rows, columns = rank_shapes(SMALL, layout, 1)[TIED]
    found = shard_traffic(SMALL, layout, 1)
    assert found[Transfer("all-gather", "dp", "weight", rows * columns, 4)] == gathers
    assert found[Transfer("reduce-scatter", "dp", "weight, gradient", rows * columns, 4)] == m


def test_long_runs_need_no_walk():
    """What is walked in part equals the whole walk."""
    for calls in (CALLS, [1, 2, 4, "embedding.weight"], [0, 1, "shared.weight", 4, 5]):
        for turns in ("FFFFFFFBBBBBBB", "FFFBFBFBFBBB", "FFFFFBBFBBFBB"):
            walk, passes = Walk(LAYERS, calls), passes_of(turns)
            for kind in passes:
                walk.forward() if kind == "forward" else walk.backward()
            walk.finish()
            assert count_walks(LAYERS, calls, passes) == (walk.gathers, walk.reductions)


def test_what_is_not_predicted_is_refused():
    frozen = [Parameter("a.weight", (2, 2), 4, False)]
    with pytest.raises(UserError, match=r"a\.weight is frozen: how often FSDP gathers it is not predicted"):
        fsdp_traffic(frozen, 2)
    with pytest.raises(UserError, match="ZeRO has stages 0 to 3, not 4"):
        zero_traffic(TWO, 2, 4)
