"""Counts of expert layers by hand: those of a published evaluation, what fits one GPU, and a dry run. Their parameters
and FLOPs are compared with the running model in test_cost.py."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cs336_systems.cost import count_parameters, forward_flops
from cs336_systems.cost import experts as closed
from cs336_systems.cost.capacity import require_layout_fits
from cs336_systems.errors import UserError
from cs336_systems.layout import Layout
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.train.observation import dry_run, fullest
from cs336_systems.train.recipe import Recipe

FAIRSEQ = model_preset("fairseq-moe-15b")


def test_a_stage_without_expert_layers_has_none():
    config = ModelConfig(44, 8, 48, 112, num_layers=3, num_heads=4, num_experts=4, expert_every=4)
    assert count_parameters(config)["experts"] == 0
    assert forward_flops(config, 1, 8) == forward_flops(replace(config, num_experts=0), 1, 8)


def test_the_numbers_of_fairseqs_evaluation():
    # 2048 tokens a GPU, a capacity of 5% of them, half precision: what the profile of the 15B model shows, by hand.
    config = FAIRSEQ
    assert closed.slots(config, 2048, training=False) == 103
    assert closed.padded_rows(config, 2048, training=False) == 512 * 103 == 52_736
    assert closed.kept_rows(config, 2048, training=False) == 4096
    padded, kept = (count(config, 2048, False) for count in (closed.padded_rows, closed.kept_rows))
    sent, useful = (closed.row_bytes(config, rows) for rows in (padded, kept))
    assert sent / useful == 12.875
    assert round(sent / 1e6, 1) == 81.0
    assert round(useful / 1e6, 1) == 6.3
    assert [round(closed.expert_flops(config, rows) / 1e9, 1) for rows in (padded, kept)] == [497.7, 38.7]
    assert round(closed.dispatch_flops(config, 2048, training=False) / 1e9) == 332
    # In training a factor of 2 on 4 tokens an expert.
    assert closed.slots(config, 2048) == 8
    assert closed.padded_rows(config, 2048) == closed.kept_rows(config, 2048)
    one_hot = replace(config, mixture=replace(config.mixture, dispatch="einsum"))
    parts, ours = (forward_flops(each, 1, 2048, training=False) for each in (one_hot, config))
    assert parts["experts"] == 6 * closed.expert_flops(config, 52_736) == 12.875 * ours["experts"]
    assert parts["one-hot products"] == 6 * (closed.dispatch_flops(config, 2048, False) + 2 * 2 * 2048 * 52_736)
    assert "one-hot products" not in ours


def test_the_experts_of_15_billion_parameters_do_not_fit_one_gpu():
    layout = Layout(global_batch=8, micro_batch=1, ep=8)
    parts = fullest(Recipe.of(context=2048), FAIRSEQ, layout)
    needed = sum(parts.values())
    assert needed > 4 * 4 * 14.51e9 / 8
    with pytest.raises(UserError) as refused:
        require_layout_fits("fairseq-moe-15b", FAIRSEQ, layout, 2048, parts, needed - 1)
    assert "at tp 1 x pp 1 x dp 1 x ep 8 needs" in str(refused.value)
    assert "raise --ep, --tp, --pp or --zero" in str(refused.value)
    require_layout_fits("fairseq-moe-15b", FAIRSEQ, layout, 2048, parts, needed)


def test_a_dry_run_counts_experts_and_their_messages():
    recipe = Recipe.of(
        num_layers=2, d_model=32, num_heads=4, d_ff=64, context=16, batch_size=8, num_experts=4, ep=2, tp=2
    )  # fmt: skip
    console = Console(width=160, record=True, file=StringIO())
    console.print(dry_run(recipe, 4))
    said = " ".join(console.export_text().split())
    assert "tp 2 x pp 1 x dp 1 x ep 2, ZeRO stage 0" in said
    assert "2 of 4 experts a rank, in 1 layer; balanced." in said
    assert "ep │ all-to-all │ 5 │" in said
    assert "data: dp, ep and cp together." in said
