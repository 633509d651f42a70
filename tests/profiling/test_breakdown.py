"""Modules and shares: exact times of a step made by hand, in which attention is naive, fused or recomputed."""

import pytest

from cs336_systems.profiling.breakdown import (
    FUSED_LOSS_NOTE,
    NO_SOFTMAX,
    attention_rows,
    module_rows,
    part_rows,
    share_note,
    share_rows,
)
from tests.support.chrome_events import backward, event, product, tag, trace

BHST = [1, 2, 4, 4]


def attention(start: float, name: str = "blocks.0.attention") -> list:
    """50 microseconds: a projection, q k^T, a scale, a softmax with its cast, weights v."""
    return [
        tag(f"{name} (SelfAttention)", start, 50),
        tag(f"{name}.query (Linear)", start + 1, 12),
        event("aten::linear", start + 2, 10),
        product("aten::mm", start + 3, 8, [4, 6], [6, 6]),
        product("aten::bmm", start + 15, 5, [2, 4, 3], [2, 3, 4]),
        event("aten::div", start + 21, 2),
        event("aten::softmax", start + 24, 9),
        event("aten::to", start + 25, 2),
        product("aten::_softmax", start + 28, 4, BHST, [], []),
        product("aten::bmm", start + 35, 7, [2, 4, 4], [2, 4, 3]),
    ]


# Two steps with one block each, 1000 microseconds apart: the forward pass takes 100, backward 70, the optimizer 20.
def step(at: float, number: int) -> list:
    return [
        tag(f"step {number}", at, 200),
        tag("forward", at, 100),
        tag("model (TransformerLM)", at + 1, 98),
        tag("blocks.0 (Block)", at + 2, 70),
        tag("blocks.0.attention_norm (RMSNorm)", at + 3, 10),
        event("aten::mul", at + 5, 6),
        *attention(at + 15),
        product("aten::softmax", at + 75, 3),  # of a gate, not of attention
        product("aten::_softmax", at + 76, 1, [9, 9]),
        event("aten::cross_entropy_loss", at + 80, 10),
        event("aten::_log_softmax", at + 82, 4),
        tag("backward", at + 110, 70),
        backward("LogSoftmaxBackward0", at + 111, 6, at + 82, 4 * number),
        event("aten::_log_softmax_backward_data", at + 112, 4),
        backward("BmmBackward0", at + 120, 12, at + 50, 4 * number + 1),
        product("aten::bmm", at + 121, 5, [2, 4, 4], [2, 4, 3]),
        product("aten::bmm", at + 126, 5, [2, 4, 3], [2, 3, 4]),
        backward("SoftmaxBackward0", at + 135, 10, at + 43, 4 * number + 2),
        product("aten::_softmax_backward_data", at + 137, 6, BHST, BHST, [], []),
        backward("MulBackward0", at + 150, 20, at + 5, 4 * number + 3),
        event("aten::mul", at + 155, 11),
        tag("optimizer", at + 180, 20),
        event("aten::addcdiv_", at + 185, 10),
    ]


STEPS = [*step(0, 0), *step(1000, 1)]


def by_name(rows):
    return {row.name: row for row in rows}


def test_parts_partition_the_step():
    parts = by_name(part_rows(trace(*STEPS)))
    assert sum(row.total for row in parts.values()) == 400_000
    assert sum(row.share for row in parts.values()) == pytest.approx(1)
    times = {name: (row.forward, row.recomputed, row.backward, row.other) for name, row in parts.items()}
    assert times == {
        "attention": (100_000, 0, 44_000, 0),
        "norm": (20_000, 0, 40_000, 0),
        "blocks, between their parts": (20_000, 0, 0, 0),
        "rest of the model": (56_000, 0, 12_000, 0),
        "outside modules: forward": (4_000, 0, 0, 0),
        "outside modules: backward": (0, 0, 44_000, 0),
        "outside modules: optimizer": (0, 0, 0, 40_000),
        "outside modules and phases": (0, 0, 0, 20_000),
    }
    assert parts["attention"].share == pytest.approx(144 / 400)
    assert list(parts)[:2] == ["attention", "rest of the model"]


def test_modules_with_and_without_those_inside():
    rows = by_name(module_rows(trace(*STEPS)))
    outer, query = rows["blocks.*.attention"], rows["blocks.*.attention.query"]
    assert (outer.forward, outer.inclusive.forward) == (76_000, 100_000)
    assert (outer.backward, outer.inclusive.backward) == (44_000, 44_000)
    assert (query.forward, query.inclusive.forward, query.backward) == (24_000, 24_000, 0)
    assert (outer.modules, outer.calls) == (1, 2)
    assert rows["model"].inclusive.total == 196_000 + 96_000
    assert rows["model"].inclusive.share == pytest.approx(292 / 400)
    assert next(iter(rows)) == "model"
    events = trace(tag("forward", 0, 200), *attention(0), *attention(100, "blocks.11.attention"))
    (row,) = (row for row in module_rows(events) if row.name == "blocks.*.attention")
    assert (row.modules, row.calls, row.inclusive.forward) == (2, 2, 100_000)
    (row,) = module_rows(trace(tag("x.0 (Net)", 0, 50), tag("x.1 (Net)", 10, 20)))  # one inside the other
    assert (row.name, row.inclusive.forward, row.modules) == ("x.*", 50_000, 2)


def test_recomputed_work_is_its_own_modules():
    events = trace(
        tag("forward", 0, 60),
        tag("model (Net)", 0, 60),
        tag("blocks.0 (Block)", 1, 55),
        tag("blocks.0.up (Linear)", 2, 20),
        event("aten::mm", 3, 10),
        tag("backward", 100, 100),
        backward("MmBackward0", 110, 80, 3, 1),
        tag("blocks.0 (Block)", 120, 60),
        tag("blocks.0.attention_norm (RMSNorm)", 130, 10),
        event("aten::mul", 131, 4),
    )
    rows = by_name(module_rows(events))
    norm, up, block = rows["blocks.*.attention_norm"], rows["blocks.*.up"], rows["blocks.*"]
    assert (norm.recomputed, norm.backward, norm.calls) == (10_000, 0, 0)
    assert (up.inclusive.recomputed, up.inclusive.backward) == (0, 20_000)
    assert (block.inclusive.recomputed, block.inclusive.backward, block.calls) == (60_000, 20_000, 1)
    assert rows["model"].inclusive.recomputed == 60_000
    assert by_name(share_rows(events))["RMSNorm"].backward == 10_000


def test_experts_are_one_part_and_the_innermost_counts():
    events = trace(
        tag("a (MoELayer)", 0, 10),
        tag("a.0 (FeedForward)", 1, 5),
        tag("b (SelfAttention)", 20, 10),
        tag("b.norm (RMSNorm)", 21, 4),
        tag("head (Linear)", 40, 3),
        tag("words (Embedding)", 50, 2),
    )
    assert {row.name: row.forward for row in part_rows(events)} == {
        "moe": 10_000, "attention": 6_000, "norm": 4_000, "linear layers elsewhere": 3_000, "embedding": 2_000
    }  # fmt: skip


def test_softmax_beside_the_products():
    rows = by_name(attention_rows(trace(*STEPS)))
    found = {name: (row.forward, row.forward_flops, row.backward, row.backward_flops) for name, row in rows.items()}
    one = 2 * 2 * 4 * 4 * 3
    assert found == {
        "softmax of attention": (18_000, 2 * 5 * 32, 12_000, 2 * 4 * 32),
        "scores q k^T": (10_000, 2 * one, 0, 0),
        "weights times v": (14_000, 2 * one, 0, 0),
        "both products": (24_000, 4 * one, 20_000, 4 * one),
        "projections": (16_000, 2 * 2 * 4 * 6 * 6, 0, 0),
        "the rest": (100_000 - 18_000 - 24_000 - 16_000, 0, 44_000 - 32_000, 0),
    }
    assert attention_rows(trace(event("aten::mm", 0, 10), event("aten::softmax", 20, 5))) == []


def test_shares_of_the_step():
    rows = [(row.name, row.share, row.of_forward, row.backward) for row in share_rows(trace(*STEPS))]
    assert rows == [
        ("matrix products", 0.15, 0.2, 20_000),
        ("RMSNorm", 0.15, 0.1, 40_000),
        ("softmax of attention", 0.075, 0.09, 12_000),
        ("loss", 0.07, 0.1, 8_000),
    ]
    assert share_note(trace(*STEPS)) == ""


@pytest.mark.parametrize(
    ("operator", "flops"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", 2 * 2 * (2 * 4 * 4 * 3)),
        ("cs336_kernels::flash_attention", 2 * 2 * (2 * 4 * 4 * 3)),
        ("FlashAttention2", 2 * 2 * 4 * 3 * 4),  # the stand-in in torch counts its own products
    ],
)
def test_fused_attention_has_no_softmax(operator, flops):
    q = [1, 2, 4, 3]
    events = trace(
        tag("forward", 0, 40),
        tag("x (SelfAttention)", 0, 20),
        product(operator, 1, 10, q, q, q),
        product("aten::bmm", 2, 3, [2, 4, 3], [2, 3, 4]),
    )
    assert share_note(events) == NO_SOFTMAX
    rows = by_name(share_rows(events))
    assert (rows["fused attention"].total, rows["matrix products"].total) == (10_000, 0)
    (fused, rest) = attention_rows(events)
    assert (fused.forward, fused.forward_flops, rest.forward) == (10_000, flops, 10_000)


def test_collectives_inside_a_module_are_not_its_own():
    events = trace(
        tag("forward", 0, 100),
        tag("x (SelfAttention)", 0, 80),
        tag("wait all-gather 0#3 blocks.0", 10, 50),
        event("aten::mm", 20, 10),
        event("c10d::recv_", 65, 5),
        tag("x.norm (RMSNorm)", 71, 9),
        tag("launch all-gather 0#4 blocks.0", 72, 4),
    )
    assert {row.name: row.forward for row in part_rows(events)} == {
        "collectives": 59_000, "attention": 16_000, "norm": 5_000, "outside modules: forward": 20_000
    }  # fmt: skip
    rows = by_name(share_rows(events))
    assert (rows["collectives"].total, rows["matrix products"].total, rows["RMSNorm"].total) == (59_000, 0, 5_000)
    assert {row.name: row.forward for row in attention_rows(events)} == {"collectives": 59_000, "the rest": 21_000}


def test_a_fused_loss_makes_the_products_of_the_head():
    events = trace(
        tag("forward", 0, 60),
        event("cs336_kernels::linear_cross_entropy", 5, 40),
        event("aten::matmul", 8, 12),
        product("aten::mm", 10, 8, [4, 6], [6, 9]),
        product("aten::addmm", 30, 5, [9, 6], [9, 4], [4, 6]),
        event("aten::copy_", 31, 2),
    )
    rows = by_name(share_rows(events))
    assert (rows["matrix products"].forward, rows["loss"].forward) == (13_000, 27_000)
    assert share_note(events) == FUSED_LOSS_NOTE
