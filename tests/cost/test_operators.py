"""FLOPs, bytes and traffic of operators, against closed forms of whole models, papers and the project's own code.

Weights leave out biases of linear layers, and BERT's classifier of pairs with the norm of its transform; FLOPs leave
out that classifier.
"""

from collections import Counter
from dataclasses import replace

import pytest

from cs336_systems.cost import count_parameters
from cs336_systems.cost.flops import backward_flops, forward_flops, least_forward_flops
from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.rank import Operator, Rank
from cs336_systems.cost.step_time import stage_groups, stage_weights
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig
from cs336_systems.train.observation import observe_traffic
from cs336_systems.train.recipe import Recipe
from tests.support.cost_cases import GPT, KINDS, LLAMA, MOE, SEQ, SHAPES, SHARED

ROWS = 5


def all_operators(config: ModelConfig, plan: Plan) -> list[tuple[Operator, float]]:
    """Those of one microbatch on a rank, and how often, of a plan without a pipeline."""
    rank = Rank(config, plan.alone(), SEQ)
    groups = stage_groups(config, plan, 0)
    return [(each, times) for group, times in groups for each in operators_of(rank, group)]


def flops(config: ModelConfig, plan: Plan, of: str = "") -> tuple[float, float]:
    found = [
        ([sum(one.flops for one in way) for way in (each.forward, each.backward)], times)
        for each, times in all_operators(config, plan)
        if of in each.name
    ]
    return sum(times * each[0] for each, times in found), sum(times * each[1] for each, times in found)


def left_out(config: ModelConfig) -> int:
    """FLOPs forward of BERT's pooler and classifier of pairs, which see one token of a sequence."""
    return 2 * ROWS * config.d_model * (config.d_model + 2) if config.bert_heads else 0


@pytest.mark.parametrize("name", [*KINDS, *SHAPES])
def test_operators_compute_what_the_whole_model_does(name):
    config = (KINDS | SHAPES)[name]
    ahead, back = flops(config, Plan(micro_batch=ROWS, global_batch=ROWS))
    assert ahead == sum(forward_flops(config, ROWS, SEQ).values()) - left_out(config)
    assert back == backward_flops(config, ROWS, SEQ) - 2 * left_out(config)


def test_fewer_heads_of_keys_than_ranks_are_computed_by_several():
    two, plan = replace(LLAMA, num_kv_heads=2), Plan(4, micro_batch=ROWS, global_batch=ROWS)
    # Four ranks hold a head each, as if there were four.
    assert flops(two, plan, "query") == flops(LLAMA, plan, "query")
    assert flops(two, Plan(2, micro_batch=ROWS, global_batch=ROWS), "query")[0] == pytest.approx(
        2 * ROWS * SEQ * 48 * (48 + 2 * 2 * 4) / 2 * LLAMA.num_layers, rel=1e-12
    )


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_skips_hidden_scores_and_computes_them_again(causal):
    config = replace(GPT, attention="sdpa", causal=causal, dropout=0.0)
    plan = Plan(micro_batch=ROWS, global_batch=ROWS)
    assert flops(config, plan)[0] == least_forward_flops(config, ROWS, SEQ)
    # Five products in place of four: scores once more.
    core = 4 * ROWS * SEQ * SEQ * config.d_model * config.num_layers / (2 if causal else 1)
    rest = backward_flops(config, ROWS, SEQ) - 2 * forward_flops(config, ROWS, SEQ)["scores"]
    assert flops(config, plan)[1] == rest + 2.5 * core


def biases(config: ModelConfig) -> int:
    """Of linear layers."""
    if not config.bias:
        return 0
    d, experts, layers = config.d_model, config.expert_layers, config.num_layers
    found = layers * 4 * d + (layers - experts) * (config.d_ff + d)
    found += experts * config.num_experts * (config.expert_d_ff + d)
    # Transform and vocabulary; the transform's norm, the pooler and the classifier of pairs.
    return found + (d + config.vocab_size + 2 * d + (d * d + d) + (2 * d + 2) if config.bert_heads else 0)


@pytest.mark.parametrize("name", [*KINDS, *SHAPES])
def test_weights_are_the_models_parameters_but_biases(name):
    config = (KINDS | SHAPES)[name]
    shared, owned, _ = stage_weights(config, Plan(), SEQ, 0)
    assert shared + owned == sum(count_parameters(config).values()) - biases(config)
    each = config.d_model * config.expert_d_ff * (3 if config.feed_forward == "swiglu" else 2)
    assert owned == config.expert_layers * config.num_experts * each
    if config.num_experts:
        assert stage_weights(config, Plan(ep=2, global_batch=2), SEQ, 0)[:2] == (shared, owned / 2)


@pytest.mark.parametrize("config", [GPT, LLAMA])
def test_stages_and_ranks_hold_the_model_between_them(config):
    tp, pp = 2, 3
    plan = Plan(tp=tp, pp=pp, global_batch=pp)
    held = sum(stage_weights(config, plan, SEQ, stage)[0] for stage in range(pp))
    d, norms = (
        config.d_model,
        2 * 2 * config.num_layers + 2 if config.norm == "layernorm" else 2 * config.num_layers + 1,
    )
    whole = norms * d + (config.context_length * d if config.positions == "learned" else 0)
    twice = config.vocab_size * d if config.tied_head else 0  # the last stage has a copy
    split = sum(count_parameters(config).values()) - biases(config) - whole + twice
    assert held == whole + split / tp


def sent(operators: list[Operator], axis: str, way: str) -> Counter[tuple[str, float]]:
    """(verb, bytes of the whole tensor) of what a list of operators sends."""
    found = [collective for each in operators for collective in getattr(each, way)]
    return Counter((each.verb, each.nbytes) for each in found if each.axis == axis)


def block(config: ModelConfig, sparse: bool = False, **degrees) -> list[Operator]:
    plan = Plan(**degrees, micro_batch=ROWS, global_batch=ROWS * degrees.get("ep", 1))
    return list(operators_of(Rank(config, plan, SEQ), "sparse" if sparse else "dense"))


def test_split_sequences_of_experts_are_gathered_once_and_scattered_once():
    stream = 2.0 * ROWS * SEQ * 48
    found = block(MOE, True, tp=2, ep=2, sequence=True)
    attention, experts = stream, 2 * stream  # two rows for each token
    assert sent(found, "tp", "sent") == {
        (verb, nbytes): 1 for verb in ("all-gather", "reduce-scatter") for nbytes in (attention, experts)
    }
    assert sent(found, "tp", "returned") == {
        ("all-gather", attention): 2,  # kept split, so gathered again
        ("all-gather", experts): 1,
        ("reduce-scatter", attention): 1,
        ("reduce-scatter", experts): 1,
    }
    for way in ("sent", "returned"):  # a rank routes its own part
        assert sent(found, "ep", way) == {("all-to-all", experts / 2): 2}
    shared = block(SHARED, True, tp=2, ep=2, sequence=True)  # one row for each token, and the shared expert's own
    assert sent(shared, "tp", "sent") == {("all-gather", stream): 3, ("reduce-scatter", stream): 3}


def own_bytes(config: ModelConfig, layout: Layout, verbs: tuple[str, ...], axis: str) -> int:
    """Bytes that the project's own code sends in 16 bits, without gradients of weights and counts of rows."""
    found = observe_traffic(Recipe.of(context=SEQ, precision="bf16"), config, layout).items()
    skipped = ("norms", "expert counts")
    return sum(
        times * each.nbytes
        for each, times in found
        if each.axis == axis and each.verb in verbs and each.what not in skipped
    )


def model_bytes(config: ModelConfig, plan: Plan, verbs: tuple[str, ...], axis: str) -> float:
    total = 0.0
    for each, times in all_operators(config, plan):
        again = 2 if config.recompute == "segments" and not {"embedding", "logits", "loss"} & {each.name} else 1
        for collectives, often in ((each.sent, again), (each.returned, 1)):
            total += sum(often * times * one.nbytes for one in collectives if one.axis == axis and one.verb in verbs)
    return plan.microbatches * total


SAME = [
    (SHARED, {"ep": 4}),
    (GPT, {"tp": 2, "dp": 2}),
    (LLAMA, {"tp": 4}),
    (replace(GPT, recompute="segments"), {"tp": 2}),
    (replace(GPT, recompute="attention"), {"tp": 2}),
    (MOE, {"tp": 2, "ep": 2}),
    (replace(MOE, mixture=replace(MOE.mixture, capacity_factor=1.0)), {"ep": 4}),
]


@pytest.mark.parametrize(("config", "degrees"), SAME)
def test_traffic_is_that_of_the_projects_own_code(config, degrees):
    config = replace(config, num_layers=2)
    batch = {"micro_batch": ROWS, "global_batch": 2 * ROWS * degrees.get("dp", 1) * degrees.get("ep", 1)}
    plan, layout = Plan(**degrees, **batch), Layout(**degrees, **batch)
    for axis, verb in (("tp", "all-reduce"), ("ep", "all-to-all")):
        if degrees.get(axis, 1) > 1:
            want = own_bytes(config, layout, (verb,), axis)
            assert model_bytes(config, plan, (verb,), axis) == want > 0


def test_under_sequence_parallelism_traffic_differs_at_the_ends_alone():
    """Our embedding sums and then splits, where Megatron's scatters; our head keeps its gathered input, where
    Megatron's gathers it again."""
    config, batch = replace(LLAMA, num_layers=2), {"micro_batch": ROWS, "global_batch": 2 * ROWS}
    plan, layout = Plan(tp=2, sequence=True, **batch), Layout(tp=2, sequence=True, **batch)
    once = 2 * 2 * ROWS * SEQ * LLAMA.d_model
    for verb, more in (("all-gather", once), ("reduce-scatter", once), ("all-reduce", -once)):
        assert model_bytes(config, plan, (verb,), "tp") == own_bytes(config, layout, (verb,), "tp") + more
