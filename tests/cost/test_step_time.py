"""A step: the pipeline against its simulation, replicas, ZeRO and stages by independent arithmetic, and published runs.

A pipeline is predicted to take m t + the sum of t' / v over all other stages, where the slowest of p stages, the i-th,
takes t for each of m microbatches. Played out, with forwards f and backwards b, 1F1B ends no sooner than predicted
less (p - 1 - i) f_i, nor less the times of the stages behind the i-th (interleaved, divided by v), and no later than if
all stages were as slow: (m + (p - 1) / v) (max f + max b). Where the last stage is the slowest, all meet.
"""

import random
from dataclasses import replace
from math import ceil
from statistics import mean

import pytest

from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.flops import forward_flops
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.rank import Rank
from cs336_systems.cost.runs import PUBLISHED, read_runs
from cs336_systems.cost.step_time import (
    Seconds,
    data_parallel_seconds,
    optimizer_seconds,
    stage_groups,
    stage_kinds,
    stage_seconds,
    stage_weights,
    step_time,
)
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule import schedule, simulate
from cs336_systems.train.observation import observe_traffic
from cs336_systems.train.recipe import Recipe
from tests.support.cost_cases import COMPUTES, GPT, IDEAL, KINDS, LLAMA, MOE, SENDS, SEQ, machine

IDLE = machine()  # on which nothing takes time but what a test says
A100 = system_preset("A100-80GB")
NOTHING = Seconds()
BIG = replace(LLAMA, d_model=1536, d_ff=4096, num_layers=16)  # of several buckets


def plan_of(m: int = 1, **degrees) -> Plan:
    return Plan(**degrees, global_batch=m * degrees.get("dp", 1) * degrees.get("ep", 1))


def predicted(monkeypatch, plan: Plan, forward: list[float], backward: list[float]) -> float:
    """The pipeline's time if stages take so long."""

    def stage_seconds(config, plan, seq, stage, system):
        return Seconds(forward=forward[stage], backward=backward[stage])

    monkeypatch.setitem(step_time.__globals__, "stage_seconds", stage_seconds)
    monkeypatch.setitem(step_time.__globals__, "stage_kinds", lambda config, plan: dict.fromkeys(range(plan.pp), 1))
    config = replace(GPT, num_layers=plan.pp * plan.chunks, tied_head=False)
    return step_time(config, plan, SEQ, IDLE).total


def played(plan: Plan, forward: list[float], backward: list[float]) -> float:
    return simulate(schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks), forward, backward).makespan


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (5, 1), (2, 3), (4, 2), (4, 5)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_even_stages_take_what_the_simulation_takes(monkeypatch, pp, chunks, rounds):
    plan = plan_of(m=rounds * pp, pp=pp, chunks=chunks)
    assert predicted(monkeypatch, plan, [1.0] * pp, [2.5] * pp) == pytest.approx(played(plan, [1.0] * pp, [2.5] * pp))


@pytest.mark.parametrize("slowest", ["last", "ends", "any"])
def test_uneven_stages_stay_within_the_bounds(monkeypatch, slowest):
    draw = random.Random(slowest)
    for _ in range(60):
        pp, chunks = draw.randint(2, 5), draw.choice((1, 1, 2, 3))
        plan = plan_of(m=pp * draw.randint(1, 4) if chunks > 1 else draw.randint(1, 12), pp=pp, chunks=chunks)
        ends = {"last": {pp - 1}, "ends": {0, pp - 1}, "any": set(range(pp))}[slowest]
        forward = [draw.uniform(1, 3) if stage in ends else 1.0 for stage in range(pp)]
        backward = [draw.uniform(2, 6) if stage in ends else 2.0 for stage in range(pp)]
        each = [a + b for a, b in zip(forward, backward, strict=True)]
        i, m = each.index(max(each)), plan.microbatches
        found, want = predicted(monkeypatch, plan, forward, backward), played(plan, forward, backward)
        early = sum(each[i + 1 :]) / chunks
        if chunks == 1:
            early = min(early, (pp - 1 - i) * forward[i])
        late = (m + (pp - 1) / chunks) * (max(forward) + max(backward)) - found
        assert -early - 1e-9 <= want - found <= late + 1e-9
        if slowest == "last":
            assert want == pytest.approx(found)


def test_stages_that_are_alike_are_counted_and_not_computed_anew():
    plan = plan_of(m=16, pp=16, chunks=8)
    kinds = stage_kinds(replace(GPT, num_layers=126), plan)
    assert kinds == {0: 1, 1: 14, 15: 1}
    assert stage_kinds(replace(GPT, num_layers=5), plan_of(m=4, pp=4)) == {0: 1, 1: 1, 2: 1, 3: 1}  # 1, 2, 1, 1 layers
    assert stage_kinds(GPT, plan_of()) == {0: 1}


def test_the_last_stage_has_the_head_and_the_others_wait_for_it():
    plan = plan_of(m=6, pp=3)
    found = step_time(GPT, plan, SEQ, COMPUTES)
    times = [sum(stage_seconds(GPT, plan, SEQ, stage, COMPUTES)) for stage in range(3)]
    assert found.stage == 2
    assert found.total == pytest.approx(6 * times[2] + times[0] + times[1])
    assert found.parts["bubble"] == pytest.approx(times[0] + times[1])


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"bert"}))
def test_a_machine_without_losses_is_used_in_full(name):
    for degrees in ({}, {"cp": 2}, {"m": 3, "dp": 2}):
        assert step_time(KINDS[name], plan_of(**degrees), SEQ, COMPUTES).mfu == pytest.approx(1)


def data_parallel(plan: Plan, spent: Seconds = NOTHING, config: ModelConfig = LLAMA, system=SENDS) -> float:
    return data_parallel_seconds(config, plan, SEQ, 0, spent, system)


def test_what_each_zero_stage_sends():
    """Of W weights: gradients of 4 bytes are summed, or scattered with weights of 2 gathered; in stage 3 all of it for
    every microbatch, and weights for backward once more (Rajbhandari et al., section 7)."""
    weights, part, m = stage_weights(LLAMA, plan_of(), SEQ, 0)[0], 3 / 4, 5
    for zero, nbytes in ((0, 2 * 4), (1, 4 + 2), (2, 4 + 2), (3, m * (2 + 2 + 4))):
        plan = plan_of(m=m, dp=4, zero=zero, overlap="none")
        assert data_parallel(plan) == pytest.approx(part * nbytes * weights), zero
    assert data_parallel(plan_of(m=5)) == 0
    # Stage 3 calls once for each matrix: gathered twice and scattered; the head besides.
    plan = plan_of(m=m, dp=4, zero=3, overlap="none")
    assert data_parallel(plan, system=machine(call=1.0)) == m * 3 * (4 * LLAMA.num_layers + 1)
    # Experts are summed over those that have the same.
    shared, owned, _ = stage_weights(MOE, plan_of(ep=2), SEQ, 0)
    found = data_parallel(plan_of(dp=2, ep=2, overlap="none"), config=MOE)
    assert found == pytest.approx(2 * 4 * (shared * 3 / 4 + owned * 1 / 2))
    # Parts of a sequence share gradients as replicas do.
    assert data_parallel(plan_of(cp=4, overlap="none")) == data_parallel(plan_of(dp=4, overlap="none"))


def test_a_tied_embedding_is_summed_within_a_node_or_between():
    config, plan = replace(LLAMA, tied_head=True), plan_of(m=2, pp=2)
    words = 4 * config.vocab_size * config.d_model
    for node, rate in ((2, 10.0), (1, 2.0)):
        system = machine(link=10.0, far=2.0, node=node)
        assert data_parallel_seconds(config, plan, SEQ, 0, NOTHING, system) == words / rate


def test_gradients_hide_behind_backward_but_for_the_last_bucket():
    weights = stage_weights(LLAMA, plan_of(), SEQ, 0)[0]
    # A small model has one bucket, and nothing hides.
    assert data_parallel(plan_of(dp=4), Seconds(backward=1e12)) == 2 * 4 * weights * 3 / 4
    weights = stage_weights(BIG, plan_of(), SEQ, 0)[0]
    alone, last = 2 * 4 * weights * 3 / 4, 40e6 / weights
    hidden = machine(link=1.0, hidden=0.25)
    cases = (1e12, 0.0, last * alone), (0.0, 1e12, last * alone), (alone / 2, alone / 4, alone / 4), (0.0, 0.0, alone)
    for backward, recompute, sticks_out in cases:
        spent = Seconds(forward=1e12, backward=backward, recompute=recompute)
        found = data_parallel(plan_of(dp=4), spent, BIG, hidden)
        assert found == pytest.approx(sticks_out + 0.25 * (alone - sticks_out))
    # Transfers go on while the device waits for the host: a kernel that ends sooner hides no less.
    waiting = Seconds(forward_wait=1e12, backward_wait=alone / 4, backward=alone / 2)
    assert data_parallel(plan_of(dp=4), waiting, BIG) == pytest.approx(alone / 4)
    # From ZeRO stage 1 on weights hide behind the first forward as well.
    spent = Seconds(forward=weights, backward=1e12)
    found = data_parallel(plan_of(dp=4, zero=1), spent, BIG)
    assert found == pytest.approx(last * 4 * weights * 3 / 4 + (2 * weights * 3 / 4 - weights))


def test_no_plan_takes_longer_on_a_machine_of_which_one_part_is_faster():
    draw, kinds = random.Random(0), [replace(kind, vocab_size=32_000) for kind in (LLAMA, BIG, MOE)]
    for _ in range(300):
        degrees = {axis: draw.choice((1, 2)) for axis in ("pp", "tp", "cp")} | {"dp": draw.choice((1, 2, 8, 64))}
        choices = {"overlap": draw.choice(("none", "data", "all")), "stack": draw.choice(("megatron", "fsdp"))}
        plan = plan_of(m=draw.choice((1, 2, 8)), **degrees, **choices, zero=draw.randrange(4))
        config = replace(draw.choice(kinds), recompute=draw.choice(("none", "segments")))
        system = system_preset(draw.choice(("A100-80GB", "H100", "B200")))
        took = step_time(config, plan, 512, system).total
        for part in ("matmul_flops", "bandwidth", "inside", "between"):
            old = getattr(system, part)
            new = 3 * old if isinstance(old, float) else replace(old, bandwidth=3 * old.bandwidth)
            faster = step_time(config, plan, 512, replace(system, **{part: new})).total
            assert faster <= took * (1 + 1e-12), (config, plan, system.name, part)


@pytest.mark.parametrize(("dp", "size"), [(4, 40e6), (64, 64e6)])
def test_buckets_grow_with_the_ranks_that_each_waits_for(dp, size):
    """Megatron-LM's default: 40 million gradients, or a million for each rank if that is more."""
    weights = stage_weights(BIG, plan_of(), SEQ, 0)[0]
    plan = plan_of(dp=dp)
    assert data_parallel_seconds(BIG, plan, SEQ, 0, NOTHING, machine(call=1.0)) == ceil(weights / size) > 2
    exposed = data_parallel(plan, Seconds(backward=1e12), BIG)
    assert exposed == pytest.approx(2 * 4 * size * (dp - 1) / dp)


def test_adamw_moves_38_bytes_a_weight_that_a_rank_steps():
    """The gradient is read for its norm; gradient, weight and moments for the step, which writes the last three and the
    weight in 16 bits; the gradient is set to zero."""
    each = 4 + 4 * 4 + 3 * 4 + 2 + 4
    machine_of_bytes = replace(IDLE, bandwidth=2.0, constants=replace(IDEAL, memory=0.5))
    shared, owned, _ = stage_weights(MOE, plan_of(ep=2), SEQ, 0)
    for zero, weights in ((0, shared + owned), (1, shared / 8 + owned / 4), (3, shared / 8 + owned / 4)):
        plan = plan_of(dp=2, ep=2, cp=2, zero=zero)
        found = optimizer_seconds(MOE, plan, SEQ, 0, machine_of_bytes)
        assert found == pytest.approx(each * weights)


@pytest.mark.parametrize(
    ("family", "count", "average", "most"),
    [("Korthikanti 2022, table 5", 8, 0.03, 0.06), ("Megatron-LM 2020, weak scaling", 12, 0.08, 0.13)],
)
def test_published_runs_are_predicted(family, count, average, most):
    errors = [abs(run.error) for run in read_runs(PUBLISHED) if run.given["family"] == family]
    assert len(errors) == count
    assert mean(errors) < average
    assert max(errors) < most


# Time of a stage for a microbatch, on machines where only one kind of work takes time.
ROWS = 5


def rows_of(m: int = 1, **degrees) -> Plan:
    return plan_of(m, **degrees).override(micro_batch=ROWS, global_batch=ROWS * m * degrees.get("dp", 1))


def spent(config: ModelConfig, system, plan: Plan | None = None, stage: int = 0) -> Seconds:
    return stage_seconds(config, plan or rows_of(), SEQ, stage, system)


def test_recomputation_computes_forward_once_more_of_what_is_not_kept():
    parts = forward_flops(GPT, ROWS, SEQ)
    for recompute, again in (
        ("none", 0),
        ("attention", parts["scores"]),
        ("segments", sum(parts.values()) - parts["head"]),
    ):
        found = spent(replace(GPT, recompute=recompute), COMPUTES)
        assert found.forward == sum(parts.values())
        assert found.recompute == again


def test_the_device_waits_for_the_host_where_kernels_are_short():
    groups, rank = stage_groups(GPT, rows_of(), 0), Rank(GPT, rows_of(), SEQ)
    operators = [(each, int(times)) for group, times in groups for each in operators_of(rank, group)]
    kernels = [
        sum(times * work.kernels for each, times in operators for work in getattr(each, way))
        for way in ("forward", "backward")
    ]
    slow = spent(GPT, machine(host=2.0))
    assert (slow.forward, slow.forward_wait, slow.backward_wait) == (0, 2.0 * kernels[0], 2.0 * kernels[1])
    # Each kernel that takes half as long as the host needs hides half of that.
    half = spent(GPT, machine(host=2.0, start=1.0))
    assert half == Seconds(*kernels, 0, *kernels)
    assert spent(GPT, machine(host=1.0, start=1.0)) == Seconds(*kernels)


def test_messages_are_those_of_the_projects_own_stages():
    """A stage in the middle sends and receives at once, so it waits for what it sends."""
    degrees = {"tp": 2, "pp": 3, "chunks": 2, "sequence": True}
    plan = rows_of(m=3, **degrees)
    layout = Layout(**degrees, schedule="interleaved", micro_batch=ROWS, global_batch=3 * ROWS)
    traffic = observe_traffic(Recipe.of(context=SEQ, precision="bf16"), GPT, layout, 2).items()
    nbytes = sum(times * each.nbytes for each, times in traffic if each.verb == "send")
    assert plan.microbatches * spent(GPT, SENDS, plan, 1).messages == nbytes > 0
    # Each has its part of the sequence.
    assert plan.microbatches * spent(GPT, SENDS, plan.override(cp=2), 1).messages == nbytes / 2


def test_messages_cross_nodes_as_soon_as_one_does():
    system = replace(machine(), inside=Link(1.0, 1e30), between=Link(10.0, 1e30))
    assert spent(GPT, system, rows_of(pp=4, m=4)).messages == pytest.approx(2 * 1.0)
    assert spent(GPT, system, rows_of(tp=4, pp=4, m=4)).messages == pytest.approx(2 * 10.0)
    chunks = rows_of(tp=4, pp=2, chunks=3, m=4)
    assert spent(GPT, system, chunks).messages == pytest.approx(2 * 3 * 1.0)
    hidden = spent(GPT, replace(system, constants=replace(IDEAL, hidden=0.25)), chunks.override(overlap="all"))
    assert hidden.messages == pytest.approx(0.25 * 2 * 3)


def test_context_parallelism_divides_computing_and_gathers_whole_sequences():
    one, split = spent(LLAMA, COMPUTES), spent(LLAMA, COMPUTES, rows_of(cp=4))
    assert split.forward == one.forward / 4
    assert split.backward == one.backward / 4
    # Keys and values, gathered forward and backward, and their gradients scattered: by hand, for 4 heads of 4 numbers.
    each = 2 * 2 * ROWS * SEQ * 16 * 3 / 4
    for recompute in ("none", "attention"):
        found = spent(replace(LLAMA, recompute=recompute), SENDS, rows_of(cp=4))
        assert found.cp == pytest.approx(LLAMA.num_layers * 3 * each)
    # Which do not shrink with more ranks, while tensor parallelism's part does.
    eight = spent(LLAMA, SENDS, rows_of(cp=8, tp=2))
    assert eight.cp == pytest.approx(LLAMA.num_layers * 3 * 2 * 2 * ROWS * SEQ * 8 * 7 / 8)
    assert eight.tp == pytest.approx(spent(LLAMA, SENDS, rows_of(cp=4, tp=2)).tp / 2)
