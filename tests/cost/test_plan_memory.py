"""Memory of a plan: the published closed forms and figures exactly, schedules played through, ZeRO by hand."""

import json
from itertools import accumulate, product
from random import Random

import pytest
from click.testing import CliRunner

from cs336_systems.cost.commands.memory import command
from cs336_systems.cost.machines import changed, system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plan_memory import fits, live_passes, peak_bytes, rank_bytes, unit, usable_memory
from cs336_systems.cost.rank import Rank
from cs336_systems.cost.step_time import fullest_stages, group_weights, stage_weights
from cs336_systems.errors import UserError
from cs336_systems.presets import Mixture, ModelConfig
from cs336_systems.schedule import schedule, simulate
from tests.support.cost_cases import block_activations

GIB = 2**30
# Korthikanti et al., arXiv:2205.05198, table 3: width, heads, layers, tp, pp, chunks, microbatch.
SIZES = {
    "22B": (6144, 64, 48, 8, 1, 1, 4),
    "175B": (12288, 96, 96, 8, 8, 3, 1),
    "530B": (20480, 128, 105, 8, 35, 3, 1),
    "1T": (25600, 160, 128, 8, 64, 1, 1),
}
# GiB of weights and optimizer, activations, activations with sequence parallelism and selective recomputation: figure 1
# as the tool Calculon lists it (github.com/calculon-ai/calculon, calculon/llm/validation.py).
FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
SEQ = 2048


def gpt(h: int, a: int, layers: int, **changes: object) -> ModelConfig:
    """A model of the paper: dropout, LayerNorm, GELU, scores in memory."""
    config = ModelConfig(
        vocab_size=51_200, context_length=SEQ, d_model=h, d_ff=4 * h, num_layers=layers, num_heads=a, dropout=0.1,
        norm="layernorm",
    )  # fmt: skip
    return config.override(**changes)


def kept(h: int, a: int, b: int, t: int, sequence: bool, recompute: str) -> float:
    """Bytes of one block of a model of the paper."""
    plan = Plan(tp=t, sequence=sequence, micro_batch=b, global_batch=b)
    return unit(gpt(h, a, 1, recompute=recompute), plan.alone(), SEQ, "dense").kept


@pytest.mark.parametrize(("h", "a", "b", "t"), [(6144, 64, 4, 1), (6144, 64, 4, 8), (12288, 96, 1, 8), (512, 8, 3, 2)])
def test_blocks_keep_the_five_published_forms(h, a, b, t):
    for sequence, recompute in product((False, True), ("none", "attention", "segments")):
        found = kept(h, a, b, t, sequence, recompute)
        assert found == block_activations(SEQ, b, h, a, t, sequence, recompute), (sequence, recompute)


@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 3)])
def test_first_stage_keeps_the_published_total(p, v):
    """Section 4.2.3, and the embedding's and the head's terms of section 4.3."""
    h, a, layers, b, t = 1024, 16, 24, 2, 4
    config = gpt(h, a, layers)
    plan = Plan(tp=t, pp=p, chunks=v, sequence=True, micro_batch=b, global_batch=b * 5 * p)
    blocks = SEQ * b * h * layers / t * (34 + 5 * a * SEQ / h) * (1 + ((p - 1) / (p * v) if v > 1 else 0))
    # The dropout mask of each pass under way; interleaved, as many as 2 p of the first chunk.
    masks = SEQ * b * h / t * (p if v == 1 else 2 * p)
    head = SEQ * b * h / t * 4 * (1 + config.vocab_size / h) if p == 1 else 0
    assert rank_bytes(config, plan, SEQ, 0)["activations"] == pytest.approx(blocks + masks + head, rel=1e-12)


@pytest.mark.parametrize("name", SIZES)
def test_published_figures(name):
    h, a, layers, t, p, v, b = SIZES[name]
    state, plain, selective = FIGURE_1[name]
    weights, *_ = group_weights(Rank(gpt(h, a, layers), Plan(tp=t), SEQ), "dense")
    assert 18 * (weights - 2 * h) * layers / p == state * GIB  # without norms
    passes = max(map(sum, live_passes(0, p, 4 * p, v)))
    for sequence, recompute, wanted in ((False, "none", plain), (True, "attention", selective)):
        found = kept(h, a, b, t, sequence, recompute) * passes / v * layers / p
        assert found == pytest.approx(wanted * GIB, rel=1e-12)


@pytest.mark.parametrize(
    ("p", "v", "m"), [(4, 1, 2), (4, 1, 9), (2, 2, 2), (2, 3, 8), (4, 2, 8), (4, 3, 20), (3, 4, 9)]
)
def test_passes_under_way_are_those_of_the_schedule(p, v, m):
    random = Random(0)
    played = schedule("interleaved" if v > 1 else "1f1b", p, m, v)
    for stage in range(p):
        live = live_passes(stage, p, m, v)
        assert {sum(moment) for moment in live} == {simulate(played).peak_live[stage]}
        for _ in range(8):
            sizes = [random.randrange(1, 100) for _ in range(v)]
            steps = ((1 if each.kind == "forward" else -1) * sizes[each.chunk] for each in played[stage])
            wanted = max(accumulate(steps))
            assert max(sum(n * size for n, size in zip(each, sizes, strict=True)) for each in live) == wanted


def test_many_microbatches_need_what_some_do():
    config = gpt(256, 4, 16)
    for stage in (0, 3):
        plans = (Plan(pp=4, chunks=2, global_batch=m) for m in (16, 20, 64))
        assert len({rank_bytes(config, plan, 128, stage)["activations"] for plan in plans}) == 1


def test_ends_of_an_interleaved_pipeline():
    config, plan = gpt(256, 4, 7), Plan(pp=2, chunks=2, global_batch=8)
    assert plan.stage_chunks(7) == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 7)]]
    block, head = (unit(config, plan.alone(), 128, group) for group in ("dense", "head"))
    # Stage 1 runs two forwards of chunk 0 first, and then each of chunk 1, with the head, right before its backward.
    assert max(live_passes(1, 2, 8, 2)) == (3, 0)
    assert set(live_passes(1, 2, 8, 2)) == {(2, 1), (3, 0)}
    moments = (2 * 2 * block.kept + block.kept + head.kept, 3 * 2 * block.kept)
    parts = rank_bytes(config, plan, 128, 1)
    assert parts["activations"] == max(moments)
    # Of the loss only its 16-bit logits are beside what is kept; blocks work when that is gone.
    assert parts["workspace"] == max(head.inside, block.inside - head.kept)
    assert head.inside == 2 * 128 * 51_200 + 2 * 2 * 128 * 256


def test_state_by_zero_stage():
    config = gpt(64, 4, 2, tied_head=False, vocab_size=256)
    n, owned = stage_weights(config, Plan(), 128, 0)[:2]
    assert owned == 0

    def of(zero: int, batch: int = 4, width: int = 2) -> list[float]:
        parts = rank_bytes(config, Plan(dp=2, cp=2, zero=zero, global_batch=batch, width=width), 128, 0)
        return [parts[name] for name in ("weights", "gradients", "optimizer")]

    assert of(0) == [2 * n, 4 * n, 12 * n]
    assert of(1) == [2 * n, 4 * n, 3 * n]
    assert of(2) == of(1), "two microbatches' gradients add up whole"
    assert of(2, batch=2) == [2 * n, n, 3 * n]
    assert of(3) == [n / 2, n, 3 * n]
    assert of(0, width=4) == [4 * n, 4 * n, 8 * n]


def test_zero_gathers_two_neighbours_and_a_gradient():
    config, plan = gpt(64, 4, 4, vocab_size=128, positions="rotary"), Plan(dp=2, global_batch=4)
    block, end = (group_weights(Rank(config, plan, 128), group)[0] for group in ("dense", "embedding"))
    work = {zero: rank_bytes(config, plan.override(zero=zero), 128, 0)["workspace"] for zero in range(4)}
    assert block > end
    assert work[3] - work[0] == 2 * 2 * block + 4 * block
    assert work[0] == work[1] == work[2]
    once = {z: rank_bytes(config, Plan(dp=2, zero=z, global_batch=2), 128, 0)["workspace"] for z in (0, 2)}
    assert once[2] - once[0] == 4 * block


def test_experts_are_counted_layer_by_layer():
    config = gpt(64, 4, 6, tied_head=False, num_experts=4, expert_every=2, vocab_size=256, mixture=Mixture())
    one = stage_weights(config, Plan(), 128, 0)[:2]
    plan = Plan(pp=2, global_batch=2)
    found = [stage_weights(config, plan, 128, stage)[:2] for stage in range(2)]
    assert [sum(each) for each in zip(*found, strict=True)] == list(one)
    assert found[1][1] == 2 * found[0][1], "layers 1, 3 and 5 of 0 to 5 have experts"
    # Their state is split over the replicas that have the same ones.
    split = Plan(dp=2, ep=2, zero=1, global_batch=4)
    shared, owned = stage_weights(config, split, 128, 0)[:2]
    assert owned == one[1] / 2
    assert rank_bytes(config, split, 128, 0)["optimizer"] == 12 * (shared / 4 + owned / 2)


def test_stages_differ():
    config, plan = gpt(256, 4, 10), Plan(pp=4, global_batch=8)
    assert [len(each[0]) for each in plan.stage_chunks(10)] == [2, 3, 3, 2]
    assert fullest_stages(config, plan) == (0, 1, 3)
    # Layers as somebody says, those of the last stage for its head.
    uneven = plan.override(layers=(3, 3, 3, 1))
    assert [len(each[0]) for each in uneven.stage_chunks(10)] == [3, 3, 3, 1]
    assert rank_bytes(config, uneven, 128, 3)["weights"] < rank_bytes(config, plan, 128, 3)["weights"]
    with pytest.raises(UserError, match="stage 4 does not exist"):
        rank_bytes(config, plan, 128, 4)
    with pytest.raises(UserError, match="layers 5 5: 2 numbers, 10 in all, but pp 4 x chunks 1 = 4 parts"):
        peak_bytes(config, plan.override(layers=(5, 5)), 128)
    each = [rank_bytes(config, plan, 128, stage) for stage in range(4)]
    stage, parts = peak_bytes(config, plan, 128)
    assert sum(parts.values()) == max(sum(one.values()) for one in each)
    assert parts == each[stage]
    block, words = unit(config, plan.alone(), 128, "dense"), 51_200 * 256
    weights, *_ = group_weights(Rank(config, plan, 128), "dense")
    assert each[1]["activations"] == 3 * 3 * block.kept
    assert each[2]["activations"] == 2 * 3 * block.kept
    # The tied head's copy of the embedding, and the logits in 32 bits.
    assert each[3]["weights"] == 2 * (2 * weights + words + 256)
    assert each[3]["activations"] == 2 * block.kept + 128 * (4 * 256 + 4 * 51_200)


def test_segments_keep_an_input_and_run_again_together():
    config, plan = gpt(64, 4, 6, recompute="segments", vocab_size=64), Plan()
    few = gpt(64, 4, 6, recompute="segments", recompute_every=3, vocab_size=64)
    one, three = rank_bytes(config, plan, 128, 0), rank_bytes(few, plan, 128, 0)
    stream = 2 * 128 * 64
    assert one["activations"] - three["activations"] == 4 * stream
    whole = unit(gpt(64, 4, 6), plan.alone(), 128, "dense").kept
    assert three["workspace"] - one["workspace"] == 2 * whole
    block, head = (unit(config, plan.alone(), 128, group) for group in ("dense", "head"))
    assert one["workspace"] == block.again + block.inside - head.kept, "the head's are gone by then"


def test_context_parallelism_splits_what_is_kept():
    config = gpt(256, 4, 4, attention="sdpa", dropout=0.0)
    plans = [Plan(cp=cp).alone() for cp in (1, 2)]
    whole, half = (unit(config, plan, 256, "dense") for plan in plans)
    assert half.kept == whole.kept / 2
    assert len({group_weights(Rank(config, plan, 256), "dense") for plan in plans}) == 1
    assert half.inside == whole.inside / 2 + 4 * 2 * 256 * 256  # keys and values of all tokens, and their gradients


def test_what_fits_leaves_the_reserve():
    system = system_preset("A100-80GB")
    assert usable_memory(system) == system.memory * (1 - 0.06)
    assert usable_memory(changed(system, reserve=0.0)) == system.memory
    h, a, layers, t, p, v, b = SIZES["175B"]
    plan = Plan(tp=t, pp=p, chunks=v, sequence=True, micro_batch=b, global_batch=64)
    assert fits(gpt(h, a, layers, recompute="attention"), plan, SEQ, system)
    assert not fits(gpt(h, a, layers, recompute="none"), plan, SEQ, system)


def test_command():
    arguments = ["--size", "llama-8b", "--system", "H100", "--pp", "4", "--dp", "2", "--recompute", "full"]
    shown = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    for title in ("stage 0 (first)", "stage 1 (between)", "stage 3 (last)"):
        assert title in shown
    record = json.loads(CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False).output)
    assert record["peak_bytes"] == max(sum(each.values()) for each in record["stages"].values())
    assert record["fits"] == (record["peak_bytes"] <= record["room_bytes"])
    assert len(record["choices"]) == 12
