"""The closed forms of cost/ against the running model: parameters, FLOPs and saved bytes, each exactly."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.cost import (
    backward_flops,
    count_parameters,
    forward_flops,
    recompute_flops,
    saved_activations,
)
from cs336_systems.model import TransformerLM
from cs336_systems.presets import COURSE_YEARS, ModelConfig, model_preset, preset_names

# No activation has the shape of a weight, so that autocast's casts of weights can be told from activations.
BATCH, SEQ = 5, 8
SMALL = ModelConfig(vocab_size=44, context_length=8, d_model=48, d_ff=112, num_layers=5, num_heads=4)
GPT2 = {"norm": "layernorm", "bias": True, "feed_forward": "gelu-tanh"}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False}
VARIANTS = [{}, GPT2, LLAMA, BERT, {"positions": "sinusoidal"}, {"positions": "none"}, {"dropout": 0.1}]


def variant(**changes) -> ModelConfig:
    return replace(SMALL, **changes)


def loss_of(model: TransformerLM) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, SEQ))
    targets = torch.randint(0, model.config.vocab_size, (BATCH, SEQ))
    out = model(tokens, torch.zeros_like(tokens) if model.config.token_types else None)
    if model.config.bert_heads:
        return F.cross_entropy(out.tokens.flatten(0, 1), targets.flatten()) + 0 * out.pair.sum()
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def saved_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of the distinct storages that autograd keeps after forward, parameters and their casts apart."""
    model = TransformerLM(config)
    skip = {p.untyped_storage().data_ptr() for p in model.parameters()}
    transposed = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        cast_weight = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in transposed
        if tensor.untyped_storage().data_ptr() not in skip and not cast_weight:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        loss_of(model)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_parameters_equal_the_model(changes):
    config = variant(**changes)
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in TransformerLM(config).parameters())


@pytest.mark.parametrize("year", COURSE_YEARS)
def test_parameters_of_every_preset_equal_the_model(year):
    for name in preset_names(year):
        config = model_preset(name, year)
        if not config.num_experts:
            model = TransformerLM(config, device="meta")
            assert sum(count_parameters(config).values()) == sum(p.numel() for p in model.parameters()), name


def test_parameters_of_published_models():
    def millions(name, year=2024):
        return sum(count_parameters(model_preset(name, year)).values()) / 1e6

    assert round(millions("bert-345m"), 1) == 334.7  # Megatron's, heads included
    assert round(millions("gpt3-175b") / 1e3, 1) == 174.6  # arXiv:2005.14165
    assert round(millions("llama-8b") / 1e3, 2) == 8.03  # arXiv:2407.21783
    assert round(count_parameters(model_preset("fairseq-moe-15b"))["experts"] / 1e9, 2) == 14.51
    # The course's editions share names, not models: from 2025 on the feed-forward is gated at the same d_ff.
    assert round(millions("xl") / 1e3, 2) == 1.49
    assert round(millions("xl", 2025) / 1e3, 3) == 1.998
    assert round(millions("2.7B", 2025) / 1e3, 3) == 3.407 == round(millions("xl", 2026) / 1e3, 3)
    assert round(millions("10B", 2026) / 1e3, 2) == 12.83


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_flops_equal_torch_counter(changes):
    config = variant(**changes)
    model = TransformerLM(config)
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == sum(forward_flops(config, BATCH, SEQ).values())
    assert backward.get_total_flops() == backward_flops(config, BATCH, SEQ)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("checkpoint", ["attention", "segments", "nested"])
def test_recompute_flops_equal_torch_counter(checkpoint, layers):
    config = variant(checkpoint=checkpoint, checkpoint_every=2, num_layers=layers)
    with set_checkpoint_early_stop(False):
        loss = loss_of(TransformerLM(config))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert backward.get_total_flops() == backward_flops(config, BATCH, SEQ) + recompute_flops(config, BATCH, SEQ)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_saved_activations_to_the_byte(changes, attention, precision):
    if (config := variant(**changes, attention=attention)).dropout and (attention, precision) == ("sdpa", "bf16"):
        pytest.skip("fused attention with dropout falls back to float32 on a CPU, and only there")
    assert saved_bytes(config, precision) == saved_activations(config, BATCH, SEQ, precision)[0]


@pytest.mark.parametrize("checkpoint", ["segments", "nested", "attention"])
def test_checkpointing_saves_what_the_formula_says(checkpoint):
    config = variant(checkpoint=checkpoint, checkpoint_every=2)
    assert saved_bytes(config, "fp32") == saved_activations(config, BATCH, SEQ)[0]
    assert saved_bytes(config, "fp32") < saved_bytes(SMALL, "fp32")
