"""Bytes that operators read, write and keep, counted by hand for one block of a small model."""

from dataclasses import replace

import pytest

from cs336_systems.cost.experts import kept_rows
from cs336_systems.cost.operators import operators_of
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.rank import Group, Operator, Rank
from cs336_systems.presets import ModelConfig
from tests.support.cost_cases import BERT, GPT, LLAMA, MOE, SEQ

ROWS, TP = 3, 4
TOKENS = ROWS * SEQ
FLASH = replace(LLAMA, attention="sdpa")


def moved(one: Operator) -> tuple[float, float]:
    """Bytes read and written by the kernels of forward, and of backward."""
    return sum(each.nbytes for each in one.forward), sum(each.nbytes for each in one.backward)


def operator(config: ModelConfig, name: str, group: Group = "dense", **plan: object) -> Operator:
    rank = Rank(config, Plan(micro_batch=ROWS, global_batch=ROWS, **plan).alone(), SEQ)
    return next(each for each in operators_of(rank, group) if each.name == name)


def test_fused_attention_reads_and_keeps_no_scores():
    stream, keys = 2 * TOKENS * 48, 2 * TOKENS * 16  # of queries and results; of keys, 4 heads of 4
    found = operator(FLASH, "attention")
    assert moved(found) == (2 * stream + 2 * keys, 5 * stream + 5 * keys)  # five products' worth of what two read
    assert found.kept == stream + 2 * keys + 4 * TOKENS * 12  # the log-sum-exp of each head in 32 bits


@pytest.mark.parametrize(("kernels", "passes", "number"), [("triton", 2, 2), ("torch", 10, 6)])
def test_rotary_positions_are_turned_in_one_pass_or_many(kernels, passes, number):
    found = operator(replace(LLAMA, kernels=kernels), "rotary positions")
    assert moved(found) == (passes * 2 * TOKENS * (48 + 16),) * 2
    assert found.forward[0].kernels == number


def test_the_embedding_looks_up_adds_positions_and_drops():
    found = operator(GPT, "embedding", "embedding")
    assert moved(found)[0] == 6 * 2 * TOKENS * 48 + TOKENS * 48  # three passes that read and write, and the mask
    assert moved(operator(LLAMA, "embedding", "embedding"))[0] == 2 * 2 * TOKENS * 48
    assert operator(BERT, "transform", "head").kept == 2 * 2 * TOKENS * 48


@pytest.mark.parametrize("sequence", [False, True])
def test_rows_of_experts_are_moved_and_kept_by_those_that_own_them(sequence):
    rows = kept_rows(MOE, TOKENS)
    whole = 2 * rows * 48
    own = whole / TP if sequence else whole
    dispatch, combine, router, up = (
        operator(MOE, name, "sparse", tp=TP, sequence=sequence)
        for name in ("dispatch", "combine", "router", "experts' up")
    )
    assert moved(dispatch) == (2 * own, 2 * own)
    assert moved(combine) == (3 * own, 3 * own)
    assert (combine.kept, up.kept) == (own, whole)
    assert {each.nbytes for each in (*dispatch.sent, *combine.returned)} == {own}
    assert router.forward[0].rows == (TOKENS // TP if sequence else TOKENS)
