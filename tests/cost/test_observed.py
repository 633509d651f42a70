"""Counts of a model's passes on fake tensors, against the running model, against formulas and by hand."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from cs336_systems.cost import MODES, count_parameters, memory
from cs336_systems.cost.observed import observe_passes
from cs336_systems.model import routing
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import Mixture, ModelConfig, model_preset
from tests.cost.test_cost import BATCH, BERT, GPT2, LLAMA, SEQ, SMALL
from tests.support.traffic_cases import in_turn

ONE = replace(SMALL, num_layers=1)
SPARSE = {"num_experts": 4, "expert_every": 1}
VARIANTS = {
    "rmsnorm": {"num_layers": 2},
    "gpt2": GPT2,
    "llama": LLAMA,
    "bert": BERT,
    "sinusoidal": {"positions": "sinusoidal"},
    "sdpa": {"attention": "sdpa"},
    "fused": {"attention": "flash", "kernels": "triton"},
    "dropout": {"dropout": 0.1},
    "selective": {"recompute": "attention"},
    "experts": SPARSE | {"mixture": Mixture(expert_d_ff=64, shared_expert=True)},
    "capacity": SPARSE | GPT2 | {"mixture": Mixture(capacity_factor=1.0)},
    "one-hot experts": SPARSE
    | GPT2
    | {"num_layers": 2, "expert_every": 2}
    | {"mixture": Mixture(dispatch="einsum", capacity_factor=1.5)},
}


def saved_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of the distinct storages that autograd keeps after the forward of a real model, parameters and their casts
    apart."""
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
    tokens, targets = torch.randint(config.vocab_size, (2, BATCH, SEQ)).unbind()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        loss = lm_loss(model, tokens.clone(), targets.clone())
    assert loss.isfinite()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


IN_BF16 = ("rmsnorm", "llama", "sdpa", "fused", "experts")
IN_FP32 = [name for name in VARIANTS if name not in ("rmsnorm", "llama", "experts")]


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp32") for name in IN_FP32), *((name, "bf16") for name in IN_BF16)]
)
def test_bytes_kept_for_backward_are_those_of_the_running_model(monkeypatch, name, precision):
    monkeypatch.setattr(routing, "choose", in_turn)  # a balanced router
    config = replace(ONE, **VARIANTS[name])
    assert observe_passes(config, BATCH, SEQ, precision).kept == saved_bytes(config, precision)


def test_memory_of_the_modes():
    config = replace(model_preset("tiny"), num_layers=2)
    weights = 4 * sum(count_parameters(config).values())
    passes = observe_passes(config, 2, 16)
    forward, backward, both, step = (passes.memory(mode) for mode in MODES)
    assert memory(config, 2, 16, "step") == step
    assert passes.phases["optimizer"].flops == 0
    assert passes.phases["evaluation"].flops == passes.phases["forward"].flops > 0
    assert forward["parameters"] == step["parameters"] == weights
    assert forward["gradients"] == forward["optimizer state"] == both["optimizer state"] == 0
    assert step["optimizer state"] == 2 * weights
    assert sum(forward.values()) < sum(both.values()) < sum(step.values())
    assert backward == both
    few = step | {"optimizer state": 0}
    assert sum(few.values()) >= sum(both.values())  # the optimizer needs a temporary
    # Few tokens: the fullest moment of a step is in its update, of all gradients and two temporaries of the largest.
    assert step["gradients"] == weights


def test_flat_gradients_are_there_from_the_start():
    config = replace(model_preset("tiny"), num_layers=2)
    weights = 4 * sum(count_parameters(config).values())
    plain, flat = (observe_passes(config, 8, 128, keeps_gradients=keeps) for keeps in (False, True))
    assert "gradients" not in plain.phases["forward"].peak
    assert flat.phases["forward"].peak["gradients"] == weights
    assert sum(flat.memory("step").values()) > sum(plain.memory("step").values())
