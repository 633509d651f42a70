"""What a layout refuses, the bytes of its state in every ZeRO stage, its FLOPs and its time."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.cost import Hardware, forward_flops
from cs336_systems.cost.layout import Layout
from cs336_systems.cost.layout_memory import parameter_bytes, rank_memory
from cs336_systems.cost.layout_step import pass_flops, predict_step, sample_flops
from cs336_systems.cost.parallel import Link
from cs336_systems.errors import UserError
from cs336_systems.master_weights import MasterAdamW
from cs336_systems.mixture import Mixture
from cs336_systems.model import TransformerLM
from cs336_systems.optim import decay_groups
from cs336_systems.pipeline import Stage
from cs336_systems.schedule import bubble_fraction
from cs336_systems.zero import zero
from tests.ranks import run
from tests.test_cost_layout import BATCH, BERT_345M, GPT, SEQ, SMALL, batch_of, layout_of


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
    with pytest.raises(UserError):
        rank_memory(config, layout, 8)


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
        ({"zero": 4}, "ZeRO has stages 0 to 3, not 4"),
        ({"schedule": "zigzag"}, "no schedule is called 'zigzag'"),
        ({"chunks": 2, "schedule": "interleaved"}, "2 chunks are of no use on one stage"),
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


ODD = GPT | {"vocab_size": 45, "d_ff": 111, "num_layers": 3}  # nothing divides over two ranks


def state_case(group, precision, stages):
    """Bytes of parameters, gradients and optimizer state that dp rank 0 has after a step, by ZeRO stage."""
    found = []
    for number in stages:
        config = replace(SMALL, **ODD)
        model = TransformerLM(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        wrapper, optimizer = zero(Stage(model, 0, 1), MasterAdamW, number, group, lambda m: decay_groups(m, 0.1))
        wrapper(batch_of(config)).tokens.backward()
        wrapper.finish_gradient_synchronization()
        kept = [each.gradient for each in wrapper.kept_gradients()]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
        optimizer.step()
        inner = getattr(optimizer, "inner", optimizer)
        state = [t for each in inner.state.values() for t in each.values() if torch.is_tensor(t) and t.dim()]
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in wrapper.parameters()}
        found.append([sum(weights.values()), sum(storages.values()), sum(t.nbytes for t in state)])
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_of_every_zero_stage_to_the_byte(precision):
    found = run(state_case, 2, precision=precision, stages=[0, 1, 2, 3])[0]
    for number, (weights, gradients, state) in enumerate(found):
        layout = layout_of(dp=2, zero=number, micro_batch=BATCH)
        parts = rank_memory(replace(SMALL, **ODD), layout, SEQ, precision)
        assert (parts["parameters"], parts["gradients"], parts["optimizer state"]) == (weights, gradients, state), (
            number
        )
    assert sum(parameter_bytes(precision)) == 16


def test_flops_of_a_sample_are_the_papers():
    s, n, h, v = 512, 24, 1024, 29_056
    paper = 96 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert round(paper / 1e12, 3) == 1.431
    bert = forward_flops(BERT_345M, 1, s)["head"] - 2 * s * h * v  # transform, pooler and pair, which it leaves out
    model, hardware = sample_flops(replace(BERT_345M, recompute="segments"), s)
    assert hardware - 3 * bert == round(paper)
    assert model - 3 * bert == round(72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))
    assert sample_flops(BERT_345M, s) == (model, model)


def test_flops_of_all_ranks_are_those_of_the_model():
    config = replace(BERT_345M, recompute="segments")
    layout = layout_of(tp=2, pp=4, micro_batch=3)
    hardware = sample_flops(config, 512)[1]
    ahead, back = (
        sum(each) for each in zip(*(pass_flops(config, layout, 512, stage) for stage in range(4)), strict=True)
    )
    bert = 3 * (forward_flops(config, 1, 512)["head"] - 2 * 512 * 1024 * 29_056)
    assert 2 * (ahead + back) == 3 * (hardware + bert)  # the transform is computed on both tp ranks


FAST = Link(0.0, 1e30)
MACHINE = Hardware("some", 1e12, 1e30, "made up")


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_predicted_bubble_is_the_schedules(name, chunks):
    config = replace(SMALL, vocab_size=1)  # all stages have almost as much to do
    layout = layout_of(pp=2, chunks=chunks, schedule=name, m=8)
    parts = predict_step(config, layout, SEQ, MACHINE, FAST)
    busy = parts["forward"] + parts["backward"]
    assert parts["total"] == pytest.approx(busy + parts["bubble"])
    assert parts["bubble"] / parts["total"] == pytest.approx(bubble_fraction(name, 2, 8, chunks), rel=0.01)
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    assert busy == pytest.approx(8 * sum(pass_flops(config, layout, SEQ, 1)) / 1e12)


def test_every_link_adds_what_it_carries():
    slow = Link(1.0, 1e30)

    def spent(**changes):
        return predict_step(SMALL, layout_of(**changes), SEQ, MACHINE, slow)

    # A block has four transfers; embedding, head and its two for the loss; then the norm.
    assert spent(tp=2, m=3)["tensor-parallel"] == pytest.approx(3 * (4 * 4 + 4))
    assert spent(dp=2)["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket, the vote, the norm
    assert spent(dp=2, zero=1)["data-parallel"] == pytest.approx(3 + 2)
    one_way = spent(pp=2, m=1)
    assert one_way["pipeline"] == pytest.approx(2 + 1)  # there and back, and the tied embedding
    assert spent()["total"] == pytest.approx(sum(pass_flops(SMALL, Layout(), SEQ, 0)) / 1e12)
    for changes in ({}, {"tp": 2, "pp": 2, "dp": 2}):
        parts = spent(**changes)
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    # Two gathers and a reduction of each of 26 matrices, and a third of the tied one; then the vectors, vote and norm.
    assert spent(dp=2, zero=3, m=2)["data-parallel"] == pytest.approx(2 * (3 * 26 + 1) + 3)
