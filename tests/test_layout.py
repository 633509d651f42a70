"""Layouts that are refused before anything is built."""

from dataclasses import replace

import pytest

from cs336_systems.errors import UserError
from cs336_systems.layout import Layout
from cs336_systems.presets import Mixture, ModelConfig

SMALL = ModelConfig(vocab_size=44, context_length=8, d_model=48, d_ff=112, num_layers=4, num_heads=4)


def layout_of(**changes) -> Layout:
    """With a batch that fits, of one microbatch for each stage."""
    chunks, micro = changes.get("chunks", 1), changes.pop("micro_batch", 1)
    m, dp = changes.pop("m", changes.get("pp", 1)), changes.get("dp", 1) * changes.get("ep", 1)
    changes.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    return Layout(micro_batch=micro, global_batch=micro * m * dp, **changes)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"tp": 3}, "4 heads do not divide over tp 3"),
        ({"num_kv_heads": 2}, {"tp": 4}, "2 key/value heads do not divide over tp 4"),
        ({"d_ff": 113}, {"tp": 2}, "113 of d_ff do not divide over tp 2"),
        (
            {"vocab_size": 45},
            {"tp": 2},
            "a vocabulary of 45, padded to 45 (a multiple of 1), does not divide over tp 2",
        ),
        ({}, {"pp": 3}, "num_layers 4 is not a multiple of stages 3 x chunks 1 = 3"),
        ({}, {"pp": 2, "chunks": 3}, "num_layers 4 is not a multiple of stages 2 x chunks 3 = 6"),
        ({"context_length": 9}, {"tp": 2, "sequence": True}, "a sequence of 9 tokens does not divide over tp 2"),
        ({}, {"ep": 2}, "ep 2 splits experts, and the model has none: set --num-experts, or leave --ep out"),
        ({"num_experts": 6}, {"ep": 4}, "6 experts do not divide over ep 4: choose an ep that divides 6"),
        (
            {"num_experts": 6, "mixture": Mixture(expert_d_ff=9)},
            {"tp": 2},
            "9 of the experts' d_ff do not divide over tp 2",
        ),
    ],
    ids=str,
)
def test_a_model_that_does_not_divide_is_refused_with_the_numbers(changes, settings, said):
    config, layout = replace(SMALL, **changes), layout_of(**settings)
    with pytest.raises(UserError) as refused:
        layout.check(config)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp": 2, "micro_batch": 4, "global_batch": 30}, "x dp 2 = 8: use 24 or 32"),
        (
            {"dp": 2, "micro_batch": 4, "global_batch": 7},
            "of 7 sequences is not a multiple of micro-batch 4 x dp 2 = 8",
        ),
        (
            {"dp": 2, "ep": 2, "micro_batch": 4, "global_batch": 30},
            "x dp 2 x ep 2 = 16: use 16 or 32",
        ),
        ({"tp": 0}, "tp must be at least 1, not 0"),
        ({"tp": 2.5}, "tp must be an integer, not 2.5"),
        ({"zero": 4}, "ZeRO has stages 0 to 3, not 4"),
        ({"schedule": "zigzag"}, "no schedule is called 'zigzag'"),
        ({"chunks": 2, "schedule": "interleaved"}, "2 chunks are of no use on one stage: set chunks to 1"),
        ({"chunks": 2, "schedule": "zbv"}, "2 chunks are of no use on one stage: set another schedule than zbv"),
        ({"pp": 2, "chunks": 2, "global_batch": 3, "schedule": "interleaved"}, "microbatches 3 is not a multiple"),
        ({"pp": 2, "chunks": 2, "global_batch": 2}, "1f1b has one chunk per stage, not 2"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused_with_the_numbers(settings, said):
    with pytest.raises(UserError) as refused:
        Layout(**settings)
    assert said in str(refused.value)


def test_a_sequence_is_checked_before_anything_is_built():
    layout = layout_of(tp=2, sequence=True)
    layout.check(SMALL, 6)
    for seq, said in ((7, "a sequence of 7 tokens does not divide over tp 2"), (10, "10 tokens do not fit")):
        with pytest.raises(UserError, match=said):
            layout.check(SMALL, seq)
    assert (layout_of(tp=2, pp=2, dp=4, m=6).ranks, layout_of(dp=4, m=6, micro_batch=2).microbatches) == (16, 6)
