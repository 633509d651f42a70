"""Counts of a running program: by hand, equal on fake and on real tensors, and equal to torch's own counters; and
results on the meta device, which are the same when they are looked up as when torch computes them."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.host.observe import Observer
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.optim.adamw import AdamW
from cs336_systems.presets import Mixture, ModelConfig, model_preset

BATCH, SEQ = 3, 16
SIZES = {"vocab_size": 64, "context_length": SEQ, "d_model": 32, "d_ff": 96, "num_layers": 1, "num_heads": 4}


def small(name: str = "small", **changes) -> ModelConfig:
    config = model_preset(name)
    return replace(config, **SIZES | {"num_kv_heads": 2 if config.num_kv_heads else 0} | changes)


@cache
def watch(name: str, is_fake: bool, autocast: bool = False) -> tuple[Observer, int]:
    """A step of a model of CASES under an observer, and what forward saves for backward."""
    config = CASES[name]
    model = TransformerLM(config, "meta" if is_fake else "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext():
        model = model.to_empty(device="cpu") if is_fake else model
        optimizer = AdamW(model.parameters())
        tokens, targets = torch.zeros(2, BATCH, SEQ, dtype=torch.long)
        with Observer(parameters=model.parameters()) as seen:
            seen.begin("forward")
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = lm_loss(model, tokens, targets)
            saved = seen.saved_bytes()
            seen.begin("backward")
            loss.backward()
            seen.begin("optimizer")
            optimizer.step()
    return seen, saved


CASES = {
    "course": small(),
    "llama": small("llama-8b"),
    "sdpa": small(attention="sdpa"),
    "bert": small("bert-345m", dropout=0.0),
    "dropout": small("gpt3-175b", dropout=0.1),
    "segments": small(recompute="segments", recompute_every=2, num_layers=2),
    "nested": small(recompute="nested", num_layers=2),
    "selective": small(recompute="attention"),
    "fused": small(attention="flash", kernels="triton"),
    "experts": small("fairseq-moe-twin", num_experts=4, dropout=0.0, mixture=Mixture()),
    "one-hot experts": small("fairseq-moe-twin", num_experts=4, dropout=0.0, mixture=Mixture(dispatch="einsum")),
}
# Not of BERT: in bf16 on a CPU, torch's fake LayerNorm has bf16 statistics where the real one has float32.
SAME = [*((name, False) for name in CASES if name != "llama"), ("segments", True), ("experts", True)]


@pytest.mark.parametrize(("name", "autocast"), SAME)
def test_fake_tensors_give_the_counts_of_real_ones(name, autocast):
    (real, saved), (fake, fake_saved) = (watch(name, is_fake, autocast) for is_fake in (False, True))
    assert saved == fake_saved > 0
    for phase, counts in real.phases.items():
        if name == "fused":
            continue  # on a CPU plain torch computes inside the operators of fused kernels, and is seen there
        assert counts.peak == fake.phases[phase].peak, phase
        assert counts.flops == fake.phases[phase].flops, phase
        if name == "one-hot experts":
            continue  # one_hot compares where there are no numbers, and scatters where there are
        assert counts.work == fake.phases[phase].work, phase
        assert counts.made == fake.phases[phase].made, phase


@pytest.mark.parametrize("name", ["course", "llama", "bert", "segments", "nested"])
def test_flops_equal_torch_counter(name):
    seen, _ = watch(name, is_fake=True)
    model = TransformerLM(CASES[name])
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = lm_loss(model, tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert seen.phases["forward"].flops == forward.get_total_flops()
    assert seen.phases["backward"].flops == backward.get_total_flops()


@pytest.mark.parametrize("is_fake", [False, True])
def test_counts_of_two_layers_by_hand(is_fake):
    with FakeTensorMode() if is_fake else nullcontext():
        first, second = (torch.zeros(64, 64, requires_grad=True) for _ in range(2))
        x = torch.zeros(128, 64)
        with Observer(parameters=[first, second], data=[x]) as seen:
            seen.begin("forward")
            y = (x @ first).relu() @ second
            assert seen.saved_bytes() == 4 * 128 * 64  # the output of relu
            assert seen.saved_bytes("data") == 4 * 128 * 64
            seen.begin("backward")
            y.sum().backward()
            seen.label("gradients", [first.grad, second.grad])
    forward, backward = seen.phases.values()
    product, weight, stream = 2 * 128 * 64 * 64, 4 * 64 * 64, 4 * 128 * 64
    assert (forward.flops, backward.flops) == (2 * product, 3 * product)  # x wants no gradient
    assert forward.work == {(product, 2 * stream + weight): 2, (0, 2 * stream): 1}
    assert forward.new_bytes() == 3 * stream
    assert forward.new_bytes(least=stream + 1) == 0
    # relu's input is gone before the second product.
    assert forward.peak == {"parameters": 2 * weight, "data": stream, "activations": 2 * stream}
    # y, relu's output and the gradients of its output and input; the sum and its gradient are a number each.
    assert backward.peak["gradients"] <= 2 * weight
    assert backward.peak["activations"] == 4 * stream + 4 * 2


def test_a_peak_is_that_of_its_phase():
    with Observer() as seen:
        seen.begin("large")
        kept = torch.zeros(1000)
        torch.zeros(5000)
        seen.begin("small")
        torch.zeros(10)
        del kept
        torch.zeros(20)
    assert seen.phases["large"].peak == {"activations": 4 * 6000}
    assert seen.phases["small"].peak == {"activations": 4 * 1010}
    assert seen.live == 0


def test_gathers_read_what_they_write():
    table, rows = torch.zeros(1000, 8), torch.zeros(4, dtype=torch.long)
    with Observer() as seen:
        seen.begin("look-up")
        F.embedding(rows, table)
    assert seen.phases["look-up"].work == {(0, 2 * 4 * 4 * 8): 1}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_expanded_tensor_is_read_as_far_as_its_storage_goes(device):
    one_row, many_rows = torch.zeros(1, 4, device=device), torch.zeros(100, 4, device=device)
    with Observer() as seen:
        seen.begin("add")
        for rows in (one_row, many_rows, one_row):
            rows[:1].expand(10, 4) + 1
        seen.begin("add overlapping")
        for numel in (14, 1000, 14):
            torch.zeros(numel, device=device).unfold(0, 5, 1)[:10] + 1
    result = 4 * 10 * 4
    assert seen.phases["add"].work == {(0, 4 * 4 + result): 2, (0, 2 * result): 1}
    result = 4 * 10 * 5
    assert {(0, 4 * 14 + result): 2, (0, 2 * result): 1}.items() <= seen.phases["add overlapping"].work.items()


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


OPERATORS = {
    "broadcast": lambda: meta(2, 1, 4) + meta(3, 1),
    "promoted": lambda: meta(2, dtype=torch.bfloat16) * meta(2),
    "integer times integer": lambda: meta(2, dtype=torch.int64) * 2,
    "integer times number": lambda: meta(2, dtype=torch.int64) * 2.0,
    "transposed": lambda: meta(3, 4).t().exp(),
    "several results": lambda: torch.native_layer_norm(meta(2, 4), (4,), meta(4), meta(4), 1e-5),
    "softmax in another precision": lambda: torch.softmax(meta(2, 4, dtype=torch.bfloat16), -1, dtype=torch.float32),
    "expanded": lambda: meta(1, 4).expand(3, 4).clone(),
    "product": lambda: meta(2, 3, 4) @ meta(4, 5),
    "attention": lambda: F.scaled_dot_product_attention(*(meta(1, 2, 3, 4) for _ in range(3))),
    "loss": lambda: F.cross_entropy(meta(3, 4), meta(3, dtype=torch.int64)),
}


def test_results_that_are_looked_up_are_torchs():
    def kinds(results) -> list:
        results = results if isinstance(results, tuple) else (results,)
        return [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in results]

    for name, operator in OPERATORS.items():
        want = kinds(operator())
        with Observer():
            assert [kinds(operator()) for _ in range(3)] == [want] * 3, name


def test_results_share_the_storage_that_they_should():
    def place(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    x, other, out = meta(4), meta(4), meta(4)
    with Observer():
        for _ in range(3):
            assert x.lerp_(other, 0.5) is x
            assert torch.add(x, other, out=out) is out
            assert place(x.view(2, 2)) == place(x)
            assert place(x + other) not in (place(x), place(other))
            assert len(x.clone().resize_(6)) == 6


def test_numbers_and_the_default_dtype_matter():
    with Observer():
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                assert (meta(2, dtype=torch.int64) / 2).dtype == dtype
            finally:
                torch.set_default_dtype(torch.float32)
        for value in (1.0, 2.0):
            assert (torch.full((1,), value) + 1).item() == value + 1
