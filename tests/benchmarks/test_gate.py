"""The correctness gate: it passes what is right and stops what only looks right, in every precision."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.harness import WrongResultError
from benchmarks.lib.gate import check
from benchmarks.lib.workload import Case
from cs336_systems.presets import ModelConfig, model_preset

CPU = torch.device("cpu")
SMALL = ModelConfig(vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=2, num_heads=4)


# The course's width, at which a sum has as many terms as there; the rest is smaller, and quicker.
WIDE = replace(model_preset("small"), d_ff=256, vocab_size=64, context_length=32)
CONFIGS = {"tiny": model_preset("tiny"), "wide": WIDE}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("size", "attention"), [("tiny", "sdpa"), ("wide", "naive")])
def test_the_gate_passes_what_is_right(size, precision, attention):
    error, tolerance = check(Case(replace(CONFIGS[size], attention=attention), 2, precision, False, CPU))
    assert 0 < error < tolerance


BROKEN = {
    "no causal mask": lambda q, k, v, **_: F.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v,
    "no scale": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v, is_causal=True, scale=1.0),
    "no output": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v, is_causal=True) * 0,
    "no gradient": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v, is_causal=True).detach(),
    "neighbour's value": lambda q, k, v, **_: TRUE_ATTENTION(q, k, v.roll(1, dims=1), is_causal=True),
}
TRUE_ATTENTION = F.scaled_dot_product_attention


# In bf16, whose tolerance is the widest: what it stops is stopped in a finer format. One mistake shows that those have
# tolerances of their own.
@pytest.mark.parametrize(
    ("name", "size", "precision"),
    [
        *((name, size, "bf16") for name in BROKEN for size in CONFIGS),
        *(("no scale", "tiny", f) for f in ("fp32", "fp16")),
    ],
)
def test_the_gate_stops_what_is_wrong(name, size, precision, monkeypatch):
    case = Case(replace(CONFIGS[size], attention="sdpa"), 2, precision, False, CPU)
    monkeypatch.setattr("cs336_systems.model.attention.F.scaled_dot_product_attention", BROKEN[name])
    with pytest.raises(WrongResultError):
        check(case)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_a_compiled_model_passes_the_gate():
    error, tolerance = check(Case(replace(SMALL, num_layers=1), 2, "fp32", True, CPU))
    assert 0 < error < tolerance
