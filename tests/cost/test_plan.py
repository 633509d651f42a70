"""Plans: the ranks of each axis in a node, the layers of each stage, and refusals of what does not divide."""

import random
from collections import Counter
from itertools import chain

import pytest

from cs336_systems.cost.plan import ORDER, Plan
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule.lists import blocks_of

MODEL = ModelConfig(vocab_size=64, context_length=32, d_model=48, d_ff=96, num_layers=12, num_heads=12)


def layers_of(plan: Plan, layers: int) -> list[int]:
    """How many each stage has."""
    return [sum(map(len, chunks)) for chunks in plan.stage_chunks(layers)]


def fewest_together(plan: Plan, axes: tuple[str, ...], node: int) -> int:
    """By counting: ranks in the plan's order fill nodes; the fewest of a group that any of its nodes has."""
    found: Counter[tuple[object, int]] = Counter()
    for rank in range(plan.ranks):
        rest, place = rank, {}
        for axis in plan.order:
            rest, place[axis] = divmod(rest, getattr(plan, axis))
        found[tuple(place[axis] for axis in ORDER if axis not in axes), rank // node] += 1
    return min(found.values())


def random_plan(draw: random.Random, sizes: tuple[int, ...]) -> Plan:
    degrees = {axis: draw.choice(sizes) for axis in ORDER}
    order = tuple(draw.sample(ORDER, len(ORDER)))
    return Plan(**degrees, order=order, global_batch=degrees["dp"] * degrees["ep"])


def test_an_axis_shares_nodes_as_counting_ranks_says():
    draw = random.Random(0)
    for _ in range(40):
        plan, node = random_plan(draw, (1, 2, 4)), draw.choice((1, 2, 4, 8, 16))
        for axes in (("tp",), ("dp",), ("pp",), ("cp", "ep", "dp")):
            assert plan.local(*axes, node=node) == fewest_together(plan, axes, node), (plan, axes, node)
        plan, node = random_plan(draw, (1, 2, 3, 5)), draw.choice((4, 8))  # degrees that do not fill nodes
        for axis in ORDER:
            assert plan.local(axis, node=node) <= fewest_together(plan, (axis,), node), (plan, axis, node)


def test_llama_405b_has_a_layer_less_at_both_ends():
    plan = Plan(pp=4, chunks=3, global_batch=4)  # layers that divide lie as the schedule lays them
    assert plan.stage_chunks(24) == [[blocks_of(stage, chunk, 4, 3, 24) for chunk in range(3)] for stage in range(4)]
    plan = Plan(pp=16, chunks=8, global_batch=16)
    assert layers_of(plan, 126) == [7, *[8] * 14, 7]
    assert plan.stage_chunks(126)[0][0] == range(0)
    assert len(plan.stage_chunks(126)[15][7]) == 0
    assert layers_of(plan, 127) == [*[8] * 15, 7]  # the head is more work than the embedding


def test_uneven_layers_are_all_somewhere_once_in_order_with_the_fewest_at_the_ends():
    draw = random.Random(2)
    for _ in range(200):
        pp = draw.randint(2, 8)
        plan, layers = Plan(pp=pp, chunks=draw.randint(1, 4), global_batch=pp), draw.randint(32, 90)
        stages = plan.stage_chunks(layers)
        places = [stages[stage][chunk] for chunk in range(plan.chunks) for stage in range(pp)]
        assert list(chain.from_iterable(places)) == list(range(layers))
        sizes = [len(place) for place in places]
        assert max(sizes) - min(sizes) <= 1
        small = [place for place, size in enumerate(sizes) if size < max(sizes)]
        ahead = len(small) // 2  # and the others at the end, which has one more if they are odd
        assert small == [*range(ahead), *range(len(sizes) - len(small) + ahead, len(sizes))]


BAD_PLANS = [
    ({"tp": 0}, "tp must be at least 1, not 0"),
    ({"zero": 4}, "ZeRO has stages 0 to 3, not 4"),
    ({"overlap": "some"}, "choose from none, data, all"),
    ({"stack": "some"}, "stack 'some' does not exist; choose from megatron, fsdp"),
    ({"width": 3}, "width 3 does not exist; choose from 2, 4"),
    ({"pp": 2, "global_batch": 2, "layers": (-1, 13)}, "layers -1 13: a stage cannot have fewer than 0"),
    ({"zero": 1, "shard": -1}, "shard must be at least 0, not -1"),
    ({"order": ("tp", "dp")}, "must name each"),
    ({"dp": 3, "global_batch": 8, "micro_batch": 2}, "micro-batch 2 x dp 3 = 6: use 6 or 12"),
    ({"dp": 2, "ep": 2, "global_batch": 6}, "x dp 2 x ep 2 = 4: use 4 or 8"),
    ({"chunks": 2}, "set chunks to 1, or pp above 1"),
    ({"pp": 4, "chunks": 2, "global_batch": 6}, "microbatches 6 is not a multiple of stages 4"),
]


@pytest.mark.parametrize(("changes", "says"), BAD_PLANS)
def test_a_plan_that_cannot_be_says_why(changes, says):
    with pytest.raises(UserError, match=says):
        Plan(**changes)


BAD_FITS = [
    ({"tp": 5}, {}, "12 heads do not divide over tp 5"),
    ({"tp": 4}, {"d_ff": 98}, "98 of d_ff do not divide over tp 4"),
    ({"tp": 4}, {"num_kv_heads": 6}, "6 key/value heads do not divide over tp 4"),
    ({"tp": 4}, {"num_experts": 2, "d_ff": 96}, None),
    ({"ep": 4, "global_batch": 4}, {"num_experts": 6}, "6 experts do not divide over ep 4"),
    ({"ep": 2, "global_batch": 2}, {}, "the model has none"),
    ({"cp": 3}, {}, "a sequence of 32 tokens does not divide over cp 3: "),
    ({"cp": 4, "tp": 12, "sequence": True}, {}, "over cp 4 x tp 12, as sequence parallelism needs"),
    ({"recompute_modules": ("moe",)}, {}, "no block of this model has moe to recompute"),
    ({"recompute_modules": ("moe_act",)}, {}, "no block of this model has moe_act to recompute"),
    ({"recompute_modules": ("mlp",)}, {"num_experts": 2, "expert_every": 1}, "no block of this model has mlp to"),
    ({"tp": 12}, {"num_kv_heads": 4}, None),  # a head of keys for three ranks
    ({"pp": 14, "global_batch": 14}, {}, None),  # the ends go without a layer
    ({"pp": 15, "global_batch": 15}, {}, "12 layers are too few for pp 15"),
    ({}, {"num_layers": 10**8}, "100000000 layers are more than the 100000 that are counted"),  # at once
]


@pytest.mark.parametrize(("degrees", "changes", "says"), BAD_FITS)
def test_a_model_that_does_not_divide_says_so_with_the_numbers(degrees, changes, says):
    plan, config = Plan(**degrees), MODEL.override(**changes)
    if says is None:
        plan.check(config, 32)
        return
    with pytest.raises(UserError, match=says):
        plan.check(config, 32)
