"""Times of kernels and collectives: never less than the roofline, and equal to the textbook's forms without losses."""

from dataclasses import replace
from itertools import pairwise
from math import inf, log2

import pytest

from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.machines import CONSTANTS, SYSTEMS, system_preset
from cs336_systems.cost.operator_time import (
    collective_seconds,
    group_seconds,
    kernel_time,
    message_seconds,
    product_rate,
    timed_part,
)
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.rank import Collective, Kernel, Rank, sweep
from cs336_systems.cost.step_time import stage_seconds
from tests.support.cost_cases import GPT, IDEAL, LLAMA, machine

RANK = Rank(GPT, Plan(), 32)
A100 = system_preset("A100-80GB")


def product(rows: int, inner: int, columns: int, count: int = 1) -> Kernel:
    return RANK.product(rows, inner, columns, count)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_products_gain_with_size_and_stay_below_what_is_attainable(system):
    for grow in (
        lambda n: product(n, 512, 512),
        lambda n: product(512, n, 512),
        lambda n: product(512, 512, n),
        lambda n: product(64, 64, 64, n),
        lambda n: product(n, 128, n)._replace(fused=True),
    ):
        rates = [product_rate(grow(2**power), system) for power in range(4, 18)]
        assert all(one < more for one, more in pairwise(rates))
        assert rates[-1] < system.matmul_flops * system.attainable


def test_a_product_takes_the_slower_of_computing_and_moving():
    slow, narrow = machine(flops=2.0), machine(memory=3.0)
    work = product(8, 16, 32)
    flops, nbytes = 2 * 8 * 16 * 32, 2 * (8 * 16 + 16 * 32 + 8 * 32)
    assert (work.flops, work.nbytes) == (flops, nbytes)
    assert kernel_time(work, slow).busy == flops / 2
    assert kernel_time(work, narrow).busy == nbytes / 3
    both = replace(slow, bandwidth=3.0)
    assert kernel_time(work, both).busy == max(flops / 2, nbytes / 3)
    # Where both are equal, neither waits for the other.
    assert kernel_time(work, replace(slow, bandwidth=2 * nbytes / flops)).busy == flops / 2
    # Narrow numbers and wide ones have rates of their own, as has fused attention, whatever its inner dimension.
    system = replace(machine(), matmul_flops=8.0, wide_flops=2.0, attainable=0.5)
    assert [kernel_time(work._replace(width=width), system).busy for width in (2, 4)] == [flops / 4, flops]
    system, work = machine(flops=1.0, fused=0.5, ramp=64.0), product(128, 64, 128)
    assert [product_rate(work._replace(fused=fused), system) for fused in (False, True)] == [64 / (64 + 64), 0.5]
    # Element-wise work moves bytes and starts kernels.
    system = replace(machine(memory=10.0), constants=replace(IDEAL, memory=0.5, start=0.25))
    assert kernel_time(sweep(40.0, 3), system).busy == 3 * 0.25 + 40 / 5


@pytest.mark.parametrize(("verb", "rounds"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)])
def test_rings_within_a_node_between_nodes_and_on_rails(verb, rounds):
    system = machine(link=30.0, far=10.0)

    def seconds(ranks: int, local: int) -> float:
        return group_seconds(verb, 960.0, ranks, local, system)

    assert seconds(1, 1) == 0
    assert seconds(8, 8) == pytest.approx(rounds * 960 * 7 / 8 / 30)
    assert seconds(8, 1) == pytest.approx(rounds * 960 * 7 / 8 / 10)
    # Two to a node have two ports; four have as much as 40, but no more than links within the node carry.
    assert seconds(8, 2) == pytest.approx(rounds * 960 * 7 / 8 / 20)
    assert seconds(8, 4) == pytest.approx(rounds * 960 * 7 / 8 / 30)


def test_an_all_to_all_sends_near_and_far_side_by_side():
    system = machine(link=30.0, far=10.0)
    assert group_seconds("all-to-all", 960.0, 8, 8, system) == pytest.approx(960 * 7 / 8 / 30)
    assert group_seconds("all-to-all", 960.0, 8, 1, system) == pytest.approx(960 * 7 / 8 / 10)
    assert group_seconds("all-to-all", 960.0, 8, 4, system) == pytest.approx(960 * 4 / 8 / 10)
    near = machine(link=1.0, far=1e9)
    assert group_seconds("all-to-all", 960.0, 8, 4, near) == pytest.approx(960 * 3 / 8)
    assert group_seconds("all-to-all", 960.0, 1, 1, system) == 0


def test_latency_adds_up_along_a_ring_and_along_a_tree_between_nodes():
    system = replace(machine(call=0.5), inside=Link(1.0, inf), between=Link(100.0, inf))

    def seconds(verb: str, calls: int = 1) -> float:
        return group_seconds(verb, 64.0, 16, 4, system, calls)

    # Sixteen in a circle have fifteen steps, of which three leave a node.
    assert seconds("all-gather") == seconds("reduce-scatter") == 0.5 + 12 * 1 + 3 * 100
    assert seconds("all-reduce") == 0.5 + 2 * (3 * 1 + log2(4) * 100)
    assert seconds("all-gather", 5) == 5 * seconds("all-gather")
    assert group_seconds("all-gather", 64.0, 4, 4, system) == 0.5 + 3


def test_a_collective_goes_along_its_axis_where_the_plan_put_that():
    system = machine(link=30.0, far=10.0)
    plan = Plan(tp=4, dp=8, global_batch=8, overlap="data")
    each = Collective("all-gather", "tp", 960.0)
    assert collective_seconds(each, plan, system) == pytest.approx(960 * 3 / 4 / 30)
    apart = plan.override(order=("dp", "tp", "cp", "ep", "pp"))
    assert collective_seconds(each, apart, system) == pytest.approx(960 * 3 / 4 / 10)
    assert collective_seconds(each._replace(axis="cp"), plan, system) == 0


def test_overlap_leaves_one_part_of_a_gather_and_what_the_others_take_from_products():
    system = machine(link=30.0, hidden=0.25)
    plan = Plan(tp=4, overlap="data")
    for verb in ("all-gather", "reduce-scatter"):
        each = Collective(verb, "tp", 960.0)
        alone = collective_seconds(each, plan, system)
        behind = collective_seconds(each, plan.override(overlap="all"), system)
        assert behind == pytest.approx(alone / 4 + 0.25 * alone * 3 / 4)
    # A sum has no parts that a product could wait for one by one; keys and values are needed at once.
    for verb, axis in (("all-reduce", "tp"), ("all-gather", "cp")):
        each, split = Collective(verb, axis, 960.0), Plan(**{axis: 4})
        alone, behind = (collective_seconds(each, split.override(overlap=how), system) for how in ("data", "all"))
        assert 0 < alone == pytest.approx(behind)


def test_a_message_takes_the_link_that_it_travels():
    system = replace(machine(inside=0.5, between=0.25), inside=Link(1.0, 30.0), between=Link(5.0, 10.0))
    assert message_seconds(60.0, True, system) == 1 + 60 / 15
    assert message_seconds(60.0, False, system) == 5 + 60 / 2.5


def test_new_memory_counts_alone_as_in_a_stage():
    config, plan, seq = replace(LLAMA, context_length=2**20, num_layers=1), Plan(), 2**20
    for touch in (0.0, 1e-9):
        system = replace(system_preset("A100-80GB"), touch=touch, constants=replace(CONSTANTS, host=0.0))
        parts = [timed_part(config, plan, seq, group, system) for group in ("dense", "embedding", "head")]
        alone = [sum(getattr(part, way).busy for part in parts) for way in ("forward", "backward")]
        found = stage_seconds(config, plan, seq, 0, system)
        assert alone == pytest.approx([found.forward, found.backward], rel=1e-12)
