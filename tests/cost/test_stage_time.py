"""Time of a stage for a microbatch, on machines where only one kind of work takes time."""

from dataclasses import replace

import pytest

from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.flops import forward_flops
from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.rank import Rank
from cs336_systems.cost.step_time import Seconds, stage_groups, stage_seconds
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig
from cs336_systems.train.observation import observe_traffic
from cs336_systems.train.recipe import Recipe
from tests.support.cost_cases import COMPUTES, GPT, IDEAL, LLAMA, MOE, MOVES, SENDS, SEQ, machine

ROWS = 5


def spent(config: ModelConfig, system, plan: Plan | None = None, stage: int = 0) -> Seconds:
    plan = plan or Plan(micro_batch=ROWS, global_batch=ROWS)
    return stage_seconds(config, plan, SEQ, stage, system)


def plan_of(m: int = 1, **degrees) -> Plan:
    ranks = degrees.get("dp", 1) * degrees.get("ep", 1)
    return Plan(**degrees, micro_batch=ROWS, global_batch=m * ROWS * ranks)


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


def test_bytes_that_are_moved_are_those_of_the_operators():
    found, rank = spent(LLAMA, MOVES), Rank(LLAMA, plan_of(), SEQ)
    groups = [(each, times) for group, times in stage_groups(LLAMA, plan_of(), 0) for each in operators_of(rank, group)]
    assert found.forward == pytest.approx(sum(times * one.nbytes for each, times in groups for one in each.forward))
    assert found.backward == pytest.approx(sum(times * one.nbytes for each, times in groups for one in each.backward))


def test_the_device_waits_for_the_host_where_kernels_are_short():
    kernels = [0, 0]
    rank = Rank(GPT, plan_of(), SEQ)
    for group, times in stage_groups(GPT, plan_of(), 0):
        for each in operators_of(rank, group):
            kernels[0] += int(times) * sum(work.kernels for work in each.forward)
            kernels[1] += int(times) * sum(work.kernels for work in each.backward)
    slow = spent(GPT, machine(host=2.0))
    assert (slow.forward, slow.forward_wait, slow.backward_wait) == (0, 2.0 * kernels[0], 2.0 * kernels[1])
    # Each kernel that takes half as long as the host needs hides half of that.
    half = spent(GPT, machine(host=2.0, start=1.0))
    assert half == Seconds(*kernels, 0, *kernels)
    assert spent(GPT, machine(host=1.0, start=1.0)) == Seconds(*kernels)


def test_messages_are_those_of_the_projects_own_stages():
    """A stage in the middle sends and receives at once, so it waits for what it sends."""
    degrees = {"tp": 2, "pp": 3, "chunks": 2, "sequence": True}
    plan = plan_of(m=3, **degrees)
    layout = Layout(**degrees, schedule="interleaved", micro_batch=ROWS, global_batch=3 * ROWS)
    traffic = observe_traffic(Recipe.of(context=SEQ, precision="bf16"), GPT, layout, 2).items()
    nbytes = sum(times * each.nbytes for each, times in traffic if each.verb == "send")
    assert plan.microbatches * spent(GPT, SENDS, plan, 1).messages == nbytes > 0
    # Each has its part of the sequence.
    assert plan.microbatches * spent(GPT, SENDS, plan.override(cp=2), 1).messages == nbytes / 2


def test_messages_cross_nodes_as_soon_as_one_does():
    system = replace(machine(), inside=Link(1.0, 1e30), between=Link(10.0, 1e30))
    assert spent(GPT, system, plan_of(pp=4, m=4)).messages == pytest.approx(2 * 1.0)
    assert spent(GPT, system, plan_of(tp=4, pp=4, m=4)).messages == pytest.approx(2 * 10.0)
    chunks = plan_of(tp=4, pp=2, chunks=3, m=4)
    assert spent(GPT, system, chunks).messages == pytest.approx(2 * 3 * 1.0)
    hidden = spent(GPT, replace(system, constants=replace(IDEAL, hidden=0.25)), chunks.override(overlap="all"))
    assert hidden.messages == pytest.approx(0.25 * 2 * 3)


def test_context_parallelism_divides_computing_and_gathers_whole_sequences():
    one, split = spent(LLAMA, COMPUTES), spent(LLAMA, COMPUTES, plan_of(cp=4))
    assert split.forward == one.forward / 4
    assert split.backward == one.backward / 4
    # Keys and values, gathered forward and backward, and their gradients scattered: by hand, for 4 heads of 4 numbers.
    each = 2 * 2 * ROWS * SEQ * 16 * 3 / 4
    for recompute in ("none", "attention"):
        found = spent(replace(LLAMA, recompute=recompute), SENDS, plan_of(cp=4))
        assert found.cp == pytest.approx(LLAMA.num_layers * 3 * each)
    # Which do not shrink with more ranks, while tensor parallelism's part does.
    eight = spent(LLAMA, SENDS, plan_of(cp=8, tp=2))
    assert eight.cp == pytest.approx(LLAMA.num_layers * 3 * 2 * 2 * ROWS * SEQ * 8 * 7 / 8)
    assert eight.tp == pytest.approx(spent(LLAMA, SENDS, plan_of(cp=4, tp=2)).tp / 2)


def test_more_experts_cost_no_time_but_their_routers():
    few, many = (replace(MOE, num_experts=count) for count in (4, 8))
    tokens = ROWS * SEQ
    router = 2 * tokens * MOE.d_model * MOE.expert_layers
    assert spent(many, COMPUTES).forward - spent(few, COMPUTES).forward == router * 4
    one = replace(MOE, mixture=replace(MOE.mixture, top_k=1))
    expert = 2 * tokens * 2 * MOE.d_model * MOE.expert_d_ff * MOE.expert_layers
    assert spent(MOE, COMPUTES).forward - spent(one, COMPUTES).forward == expert
    # And none on more ranks, each of which has fewer experts, with as many rows more for each.
    assert spent(many, COMPUTES, plan_of(ep=4)).forward == spent(many, COMPUTES).forward
