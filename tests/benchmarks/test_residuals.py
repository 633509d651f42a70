"""Residuals by module against the closed forms to the byte; and the best segment against brute force."""

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from benchmarks.lib.residuals import (
    Residual,
    Residuals,
    Strategy,
    best,
    model_residuals,
    neighbours,
    residuals,
    square_root_rule,
    strategy,
    sweep,
)
from cs336_systems.cost import count_parameters
from cs336_systems.cost.observed import observe_passes
from cs336_systems.model.precision import autocast
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig, preset

BATCH, SEQ = 5, 8
SMALL = ModelConfig(vocab_size=44, context_length=8, d_model=48, d_ff=112, num_layers=5, num_heads=4)
STREAM, HIDDEN, ROW = 4 * BATCH * SEQ * 48, 4 * BATCH * SEQ * 112, 4 * BATCH * SEQ
SCORES = 4 * BATCH * 4 * SEQ * SEQ
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False}
FUSED = {"attention": "flash", "kernels": "triton"}
VARIANTS = [{}, LLAMA, {"attention": "sdpa"}, {"dropout": 0.1}, {"norm": "layernorm"}, FUSED, LLAMA | FUSED]
RECOMPUTED = [{"recompute": name, "recompute_every": 2} for name in ("attention", "segments", "nested")]
RECOMPUTED += [{"recompute": "segments", "recompute_every": 3}]


def bytes_of_a_block(config: ModelConfig) -> int:
    """What a second block adds to what a model of one keeps."""
    one, two = (observe_passes(replace(config, num_layers=layers), BATCH, SEQ).kept for layers in (1, 2))
    return two - one


def real_residuals(config: ModelConfig, precision: str = "fp32") -> Residuals:
    """As `model_residuals`, but of a model that is there and runs."""
    model = TransformerLM(config)
    tokens, targets = torch.randint(44, (BATCH, SEQ)), torch.randint(44, (BATCH, SEQ))

    def forward() -> None:
        with autocast(torch.device("cpu"), precision):
            lm_loss(model, tokens, targets)

    return residuals(model, forward)


@pytest.mark.parametrize(
    ("changes", "precision"),
    [*product(VARIANTS + RECOMPUTED, ["fp32"]), *product([{}, LLAMA | FUSED, RECOMPUTED[0]], ["bf16"])],
    ids=str,
)
def test_the_bytes_are_those_of_the_formula(changes, precision):
    config = replace(SMALL, **changes)
    counted = model_residuals(config, BATCH, SEQ, precision)
    way = config.recompute, config.recompute_every
    assert counted.nbytes == strategy(config, BATCH, SEQ, *way, precision).kept
    assert sum(counted.by_block().values()) == counted.nbytes
    products = count_parameters(config)["attention"] + count_parameters(config)["feed-forward"] + 44 * 48
    if precision == "fp32":
        assert counted.weight_casts == 0
    elif config.recompute in ("none", "attention") and config.kernels == "torch":
        assert counted.weight_casts == 2 * products


@pytest.mark.parametrize(
    ("changes", "precision"), [(LLAMA, "fp32"), (RECOMPUTED[0], "bf16"), (RECOMPUTED[2], "fp32")], ids=str
)
def test_a_model_that_runs_keeps_what_an_imaginary_one_keeps_and_leaves_nothing_behind(changes, precision):
    def tensors() -> int:
        gc.collect()
        return sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects())

    config, before = replace(SMALL, **changes), tensors()
    kept = real_residuals(config, precision)
    assert tensors() <= before
    assert kept == model_residuals(config, BATCH, SEQ, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_norm_of_half_precision_keeps_its_statistics_in_four_bytes(precision):
    # Only a model that runs knows: torch's rule for shapes says two.
    config = replace(SMALL, **BERT)
    tokens = Residual("embedding.types", (BATCH, SEQ), "int64", 8 * BATCH * SEQ, "zeros_like")
    kept = real_residuals(config, precision)
    assert [each for each in kept.kept if each.module == tokens.module] == [tokens]
    missing = 2 * 2 * BATCH * SEQ if precision == "bf16" else 0  # of a mean and a deviation a token
    assert kept.nbytes == strategy(config, BATCH, SEQ, "none", 1, precision).kept + missing


def test_inside_a_block_by_hand():
    kept = model_residuals(SMALL, BATCH, SEQ)
    assert kept.by_module("blocks.3") == {
        "blocks.3.attention_norm": 2 * STREAM + ROW,  # input, normalised input, 1 / rms
        "blocks.3.attention": 5 * STREAM + SCORES,  # input, query, key, value, output; softmax
        "blocks.3.feed_forward_norm": 2 * STREAM + ROW,
        "blocks.3.feed_forward": STREAM + 2 * HIDDEN,  # input, before and after the GELU
    }
    outside = {name: n for name, n in kept.by_block().items() if name[:6] != "blocks"}
    logits = 4 * BATCH * SEQ * 44
    assert outside == {
        "embedding": 8 * BATCH * SEQ,
        "final_norm": 2 * STREAM + ROW,
        "tied_head": STREAM,  # its input
        "token_loss": logits + 8 * BATCH * SEQ + 4,  # log-softmax, targets, the weight's sum
    }
    assert kept.largest(4, "blocks.2") == [
        Residual("blocks.2.feed_forward", (BATCH, SEQ, 112), "float32", HIDDEN, "mm"),
        Residual("blocks.2.feed_forward.down", (BATCH * SEQ, 112), "float32", HIDDEN, "gelu"),
        Residual("blocks.2.attention_norm", (BATCH, SEQ, 48), "float32", STREAM, "add"),
        Residual("blocks.2.attention_norm", (BATCH, SEQ, 48), "float32", STREAM, "mul"),
    ]
    assert [each.module[:8] for each in kept.largest(3)] == ["blocks.0", "blocks.0", "blocks.1"]


def test_the_fullest_moment_is_in_the_loss_or_after_it():
    assert Strategy("segments", 2, 100, 50, 20, 30).peak == 120
    assert Strategy("segments", 2, 100, 60, 20, 30).peak == 130
    assert Strategy("none", 1, 100, 0, 0, 30).peak == 100
    config = replace(SMALL, num_layers=4, vocab_size=1000)
    block = bytes_of_a_block(config)
    logits = 4 * BATCH * SEQ * 1000
    head = 2 * STREAM + ROW + STREAM + logits + 4  # the last norm, the head's input, the log-softmax, a weight
    ids = 2 * 8 * BATCH * SEQ
    # The second segment is run again while the input of the first is there, and its own input is in its first block.
    again = STREAM + 2 * block - 2 * STREAM
    found = Strategy("segments", 2, ids + 2 * STREAM + head, again, logits, head)
    assert strategy(config, BATCH, SEQ, "segments", 2) == found
    large = (replace(preset("10B", 2026).model, num_layers=3), 4096, 512)  # for which no memory is needed
    assert model_residuals(*large).nbytes == strategy(*large, "none").kept > 2**41
    assert strategy(replace(config, kernels="triton"), BATCH, SEQ, "nested").logits == 0
    assert strategy(replace(config, kernels="triton", **BERT), BATCH, SEQ, "nested").logits == logits


@pytest.mark.parametrize("layers", [5, 60])
def test_the_best_length_is_that_of_brute_force(layers):
    config = replace(SMALL, num_layers=layers)
    block, logits = bytes_of_a_block(config), 4 * BATCH * SEQ * 44
    ids = 2 * 8 * BATCH * SEQ
    head = observe_passes(replace(config, num_layers=1), BATCH, SEQ).kept - block - ids
    needs = {}
    for k in range(1, layers + 1):
        starts = range(0, layers, k)
        kept = ids + len(starts) * STREAM + head
        # When a segment is run again, the inputs of those before it are still there.
        again = [j * STREAM + (min(start + k, layers) - start) * block for j, start in enumerate(starts)]
        needs[k] = max(kept + logits, ids + max(again))
    assert {each.every: each.peak for each in sweep(config, BATCH, SEQ)} == needs
    found = best(sweep(config, BATCH, SEQ))
    assert found.every == min(needs, key=needs.get)
    rule = square_root_rule(config, BATCH, SEQ)
    assert layers / rule * STREAM == pytest.approx(rule * block)  # at the minimum of a / k + b k the terms are equal
    assert abs(found.every - rule) < 1


def test_neighbours_of_the_best_are_worth_measuring():
    def names(layers: int) -> list[str]:
        return [each.name for each in neighbours(replace(SMALL, num_layers=layers), BATCH, SEQ)]

    assert names(5) == ["none", "segments of 1", "segments of 2", "nested"]
    assert names(200) == ["none", "segments of 3", "segments of 4", "segments of 5", "nested"]
    assert names(1) == ["none", "segments of 1", "nested"]
    applied = neighbours(replace(SMALL, num_layers=200), BATCH, SEQ)[3].apply(SMALL)
    assert (applied.recompute, applied.recompute_every) == ("segments", 5)
