"""Closed forms of papers against what the library is observed to send and keep.

Tensor parallelism of a block, forward and backward, over N ranks: 8 A (N-1)/N bytes, with A those of one activation
(batch seq d_model) (arXiv:1909.08053, section 3). Activations that a block keeps: arXiv:2205.05198, table 2. Expert
layers by hand: a published evaluation, what fits one GPU, and a dry run.
"""

from dataclasses import replace

import pytest

from cs336_systems.cost import count_parameters, forward_flops
from cs336_systems.cost import flops as closed
from cs336_systems.cost.capacity import require_layout_fits
from cs336_systems.cost.closed_forms import zero_memory
from cs336_systems.errors import UserError
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.traffic import sent
from cs336_systems.train.observation import fullest, microbatch_flops, observe, observe_traffic, observed_rank
from cs336_systems.train.recipe import Recipe
from tests.support.cost_cases import block_activations

SEQ = 8
# Every matrix's rows and all elements divide over four ranks: no padding.
SMALL = ModelConfig(vocab_size=32, context_length=SEQ, d_model=16, d_ff=32, num_layers=2, num_heads=4)
BERT_345M = model_preset("bert-345m")


@pytest.mark.parametrize(("stage", "precision"), [*((stage, "fp32") for stage in range(4)), (1, "bf16"), (3, "bf16")])
def test_state_of_every_zero_stage(stage, precision):
    """Of a weight, its gradient and AdamW's state: 4 + 4 + 8 bytes in float32, 2 + 2 + 12 with a float32 master in half
    precision (arXiv:1910.02054, section 3.1)."""
    seen = observe(Recipe.of(context=SEQ, precision=precision), SMALL, Layout(dp=4, zero=stage, global_batch=4))
    found = zero_memory(seen.parameters, SMALL.d_model * (2 * SMALL.num_layers + 1), 4, stage)
    wide, half = (4, 4, 8), (2, 2, 12)
    for part, was, now in zip(found, wide, half if precision == "bf16" else wide, strict=True):
        kind = {"optimizer": "optimizer state"}.get(part, part)
        assert seen.state[kind] == now * found[part] / was, part


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallelism_sends_8_activations_a_block(sequence):
    ranks = 4
    layout = Layout(tp=ranks, sequence=sequence, micro_batch=2, global_batch=2)

    def total(layers: int) -> float:
        found = observe_traffic(Recipe.of(context=SEQ), replace(SMALL, num_layers=layers), layout).items()
        wanted = ((each, n) for each, n in found if each.axis == "tp" and not each.what.endswith(("again", "norms")))
        return sum(n * each.nbytes * sent(each.verb, each.ranks) for each, n in wanted)

    # Four all-reduces. Under sequence parallelism four all-gathers and four reduce-scatters; two more all-gathers of
    # inputs that are not kept (arXiv:2205.05198, section 4.2.2) are not counted here.
    activation = 2 * SEQ * SMALL.d_model * 4
    assert total(3) - total(2) == 8 * activation * (ranks - 1) / ranks


def kept(recipe: Recipe, config: ModelConfig, layout: Layout) -> int:
    """Bytes of activations after the forward of one step, which the step of `observe` follows."""
    with observed_rank(recipe, config, layout, 0) as step:
        step.run(1)
        return step.kept[0] - step.rest


@pytest.mark.parametrize(("recompute", "tp"), [("none", 1), ("none", 4), ("attention", 4), ("segments", 4)])
def test_a_block_keeps_what_the_paper_says(recompute, tp):
    """But for torch's softmax in float32, two bytes a score more, and LayerNorm's mean and 1/std."""
    config = replace(BERT_345M, recompute=recompute)
    s, b, h, a = 64, 2, config.d_model, config.num_heads
    recipe = Recipe.of(size="bert-345m", precision="fp16", context=s, recompute=recompute)
    for sequence in (False, True)[: 1 + (tp > 1)]:
        layout = Layout(tp=tp, micro_batch=b, global_batch=b, sequence=sequence, vocabulary_multiple=128 * tp)
        # One block's: what a second adds to one.
        deep, shallow = (kept(recipe, replace(config, num_layers=layers), layout) for layers in (2, 1))
        seen = deep - shallow
        paper = block_activations(s, b, h, a, tp, sequence, recompute)
        softmax = 2 * a * s * s * b / tp if recompute == "none" else 0
        # Two numbers a token, twice; the meta device has LayerNorm's in the stream's precision or in float32.
        norms = 0 if recompute == "segments" else 16 * s * b / (tp if sequence else 1)
        assert paper + softmax <= seen <= paper + softmax + norms, (sequence, seen - paper - softmax)


def test_flops_of_a_sample_are_the_papers():
    """96 s l h^2 (1 + s / 6h + V / 16lh) with recompute, 72 and 12 without (arXiv:2104.04473)."""
    s, n, h, v = 128, 4, 1024, 29_056
    recipe = Recipe.of(size="bert-345m", context=s)
    bert = 2 * s * h * h + 2 * h * h + 2 * h * 2  # transform, pooler and pair, which it leaves out
    model, hardware = microbatch_flops(recipe, replace(BERT_345M, num_layers=n), 1)
    assert model - 3 * bert == round(72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))
    assert hardware == model


FAIRSEQ = model_preset("fairseq-moe-15b")


def test_the_numbers_of_fairseqs_evaluation():
    # 2048 tokens a GPU, a capacity of 5% of them, half precision: what the profile of the 15B model shows, by hand.
    config = FAIRSEQ
    padded, kept = (count(config, 2048, False) for count in (closed.padded_rows, closed.kept_rows))
    assert (padded, kept) == (512 * 103, 4096)
    assert [round(closed.row_bytes(config, rows) / 1e6, 1) for rows in (padded, kept)] == [81.0, 6.3]
    assert [round(closed.expert_flops(config, rows) / 1e9, 1) for rows in (padded, kept)] == [497.7, 38.7]
    assert round(closed.dispatch_flops(config, 2048, training=False) / 1e9) == 332
    # In training a factor of 2 on 4 tokens an expert.
    assert closed.padded_rows(config, 2048) == closed.kept_rows(config, 2048)
    one_hot = replace(config, mixture=replace(config.mixture, dispatch="einsum"))
    parts, ours = (forward_flops(each, 1, 2048, training=False) for each in (one_hot, config))
    assert parts["experts"] == 6 * closed.expert_flops(config, 52_736) == 12.875 * ours["experts"]
    assert parts["one-hot products"] == 6 * (closed.dispatch_flops(config, 2048, False) + 2 * 2 * 2048 * 52_736)
    assert "one-hot products" not in ours


def test_experts_that_do_not_fit_one_gpu_are_refused():
    layout, config = Layout(global_batch=8, micro_batch=1, ep=8), replace(FAIRSEQ, num_layers=4)
    parts = fullest(Recipe.of(context=2048), config, layout)
    needed = sum(parts.values())
    assert needed > 4 * 4 * count_parameters(config)["experts"] / 8 > 2e9
    with pytest.raises(UserError) as refused:
        require_layout_fits("fairseq-moe-15b", config, layout, 2048, parts, needed - 1)
    assert "at tp 1 x pp 1 x dp 1 x ep 8 needs" in str(refused.value)
    assert "raise --ep, --tp, --pp or --zero" in str(refused.value)
    require_layout_fits("fairseq-moe-15b", config, layout, 2048, parts, needed)
