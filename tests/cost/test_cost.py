"""Closed forms of parameters and FLOPs against the running model; the sum that predicts; the probe."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.cost import (
    MODES,
    Hardware,
    backward_flops,
    count_parameters,
    forward_flops,
    predict,
    recompute_flops,
)
from cs336_systems.cost.observed import observe_passes
from cs336_systems.cost.probe import probe
from cs336_systems.host.observe import Counts
from cs336_systems.layout import MAPPED
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import COURSE_YEARS, Mixture, ModelConfig, model_preset, preset_names

# No activation has the shape of a weight, so that autocast's casts of weights can be told from activations.
BATCH, SEQ = 5, 8
SMALL = ModelConfig(vocab_size=44, context_length=8, d_model=48, d_ff=112, num_layers=3, num_heads=4)
GPT2 = {"norm": "layernorm", "bias": True, "feed_forward": "gelu-tanh"}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False}
DENSE = [{}, GPT2, LLAMA, BERT, {"positions": "sinusoidal"}, {"positions": "none"}, {"dropout": 0.1}]


def sparse(mixture: dict, **changes) -> ModelConfig:
    given = {"num_experts": 4, "expert_every": 2} | changes
    return replace(SMALL, mixture=Mixture(**mixture), **given)


SPARSE = [
    sparse({}),
    sparse({"top_k": 1}, expert_every=1, **GPT2),
    sparse({}, expert_every=4),  # no layer has experts
    sparse({"expert_d_ff": 64, "shared_expert": True, "normalize": "before"}, **LLAMA),
    sparse({"expert_d_ff": 64, "shared_expert": True}, num_experts=8, expert_every=3, **GPT2),
    sparse({"dispatch": "einsum", "capacity_factor": 1.5}, **GPT2),
    sparse({"dispatch": "einsum", "top_k": 1, "shared_expert": True, "normalize": "before"}, **LLAMA),
    sparse({"dispatch": "einsum", "normalize": "before", "capacity_factor": 0.6, "aux_weight": 0.0}),
]
MODELS = {str(changes): replace(SMALL, **changes) for changes in DENSE}
MODELS |= {f"{number}: {each.feed_forward} {each.mixture.dispatch}": each for number, each in enumerate(SPARSE)}
models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def loss_of(model: TransformerLM) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, SEQ))
    targets = torch.randint(0, model.config.vocab_size, (BATCH, SEQ))
    if model.config.kernels == "triton":
        return lm_loss(model, tokens, targets)
    out = model(tokens, torch.zeros_like(tokens) if model.config.token_types else None)
    if model.config.bert_heads:
        return F.cross_entropy(out.tokens.flatten(0, 1), targets.flatten()) + 0 * out.pair.sum()
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


@models
def test_parameters_equal_the_model(config):
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in TransformerLM(config, "meta").parameters())


@pytest.mark.parametrize("year", COURSE_YEARS)
def test_parameters_of_every_preset_equal_the_model(year):
    for name in preset_names(year):
        test_parameters_equal_the_model(replace(model_preset(name, year), num_layers=2))


def test_parameters_of_published_models():
    """In billions. The course's editions share names, not models: from 2025 on the feed-forward is gated."""
    for name, year, billions in (
        ("bert-345m", 2024, 0.3347), ("gpt3-175b", 2024, 174.6), ("llama-8b", 2024, 8.03), ("xl", 2024, 1.49),
        ("xl", 2025, 1.998), ("2.7B", 2025, 3.407), ("xl", 2026, 3.407), ("10B", 2026, 12.83),
    ):  # fmt: skip
        found = sum(count_parameters(model_preset(name, year)).values()) / 1e9
        assert found == pytest.approx(billions, rel=2e-3), (name, year)
    assert round(count_parameters(model_preset("fairseq-moe-15b"))["experts"] / 1e9, 2) == 14.51


@pytest.fixture
def in_float64():
    """Where experts' grouped products are a loop of plain ones, which torch's counter knows."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@models
@pytest.mark.usefixtures("in_float64")
def test_flops_equal_torch_counter(config):
    model = TransformerLM(config)
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == sum(forward_flops(config, BATCH, SEQ).values())
    assert backward.get_total_flops() == backward_flops(config, BATCH, SEQ)


@pytest.mark.parametrize("recompute", ["attention", "segments", "nested"])
@pytest.mark.parametrize(
    "config",
    [replace(SMALL, num_layers=1), replace(SMALL, num_layers=5), *(SPARSE[i] for i in (0, 4, 5))],
    ids=["one layer", "dense", "experts", "shared expert", "einsum"],
)
@pytest.mark.usefixtures("in_float64")
def test_recompute_flops_equal_torch_counter(config, recompute):
    config = replace(config, recompute=recompute, recompute_every=2)
    with set_checkpoint_early_stop(False):
        loss = loss_of(TransformerLM(config))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert backward.get_total_flops() == backward_flops(config, BATCH, SEQ) + recompute_flops(config, BATCH, SEQ)


def counts(work: dict[tuple[int, int], int], made: dict[int, int] | None = None) -> Counts:
    return Counts(Counter(work), Counter(made or {}))


def test_an_operator_takes_as_long_as_its_flops_or_its_bytes():
    machine = Hardware("some", 1e9, 1e6, "made up")
    passes = {
        "forward": counts({(2 * 10**9, 10**6): 3, (1000, 10**6): 1, (0, 10**6): 5}),
        "optimizer": counts({(0, 2 * 10**6): 4}),
    }
    found = predict(passes, machine)
    assert found == {"matrix products": 3 * 2 + 1, "element-wise": 5, "optimizer": 8, "launches": 0, "first touch": 0}
    # A host that waits adds every start and first touch.
    passes = {"forward": counts({(10**9, 0): 7, (0, 10): 5}, {MAPPED: 2, MAPPED - 1: 9})}
    free = Hardware("free", 1e30, 1e30, "made up", launch=1.0)
    assert sum(predict(passes, free).values()) == pytest.approx(12)
    behind = replace(free, asynchronous=True)
    assert sum(predict(passes, behind).values()) == pytest.approx(12)
    assert predict(passes, replace(behind, matmul_flops=1.0))["launches"] == 0  # the device is the slower one
    assert predict(passes, replace(free, first_touch=1e-9))["first touch"] == pytest.approx(2e-9 * MAPPED)


def test_a_prediction_of_the_counted_passes():
    passes = observe_passes(SMALL, BATCH, SEQ)
    machine = Hardware("some", 1e30, 1e9, "made up")
    seconds = {mode: predict(passes.of(mode), machine) for mode in MODES}
    kind = "matrix products"
    both = seconds["forward-backward"][kind]
    assert both == seconds["step"][kind] > seconds["backward"][kind] > seconds["forward"][kind]
    # AdamW reads and writes a parameter's tensors 21 times.
    weights = 4 * sum(count_parameters(SMALL).values())
    assert seconds["step"]["optimizer"] == pytest.approx(21 * weights / 1e9)
    assert seconds["forward-backward"]["optimizer"] == 0


def test_the_probe_finds_a_ceiling_of_this_machine():
    found = probe(torch.device("cpu"), "fp32", "here", budget=0.02)
    assert 1e8 < found.matmul_flops < 1e15
    assert 1e8 < found.bandwidth < 1e14
    assert "fp32" in found.source
    with pytest.raises(ValueError, match="must be positive"):
        Hardware("broken", 0.0, 1.0, "made up")
