"""The closed forms of cost/ against the running model: parameters, FLOPs and saved bytes, each exactly."""

import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.cost import (
    MODES,
    Hardware,
    backward_flops,
    count_parameters,
    forward_flops,
    memory,
    predict,
    recompute_flops,
    saved_activations,
)
from cs336_systems.cost.memory import Activations, Sizes, block_activations
from cs336_systems.cost.probe import probe
from cs336_systems.model import TransformerLM, lm_loss
from cs336_systems.optim import AdamW
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
    if model.config.kernels == "triton":
        return lm_loss(model, tokens, targets)
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
@pytest.mark.parametrize("recompute", ["attention", "segments", "nested"])
def test_recompute_flops_equal_torch_counter(recompute, layers):
    config = variant(recompute=recompute, recompute_every=2, num_layers=layers)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, LLAMA, {"norm": "layernorm", "tied_head": False}, BERT], ids=str)
def test_fused_kernels_save_what_the_formula_says(changes, precision):
    config = variant(**changes, attention="flash", kernels="triton", num_layers=2)
    assert saved_bytes(config, precision) == saved_activations(config, BATCH, SEQ, precision)[0]


@pytest.mark.parametrize("recompute", ["segments", "nested", "attention"])
def test_checkpointing_saves_what_the_formula_says(recompute):
    config = variant(recompute=recompute, recompute_every=2)
    assert saved_bytes(config, "fp32") == saved_activations(config, BATCH, SEQ)[0]
    assert saved_bytes(config, "fp32") < saved_bytes(SMALL, "fp32")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, for as long as they live; `peak` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, out)
        self.peak = max(self.peak, self.live)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.live -= size


PASSES = ("forward", "forward", "forward-backward", "step", "step")


def live_peaks(config: ModelConfig, batch: int, seq: int, passes: tuple[str, ...] = PASSES) -> dict[str, int]:
    """The most bytes alive in the last pass of each mode, the model's and the optimizer's state included."""
    peaks = {}
    with LiveBytes() as counter:
        model = TransformerLM(config)
        optimizer = AdamW(model.parameters())
        tokens = torch.randint(config.vocab_size, (batch, seq))
        for mode in passes:
            counter.peak = 0
            with torch.set_grad_enabled(mode != "forward"):
                loss = lm_loss(model, tokens, tokens)
            if mode != "forward":
                loss.backward()
            if mode == "step":
                optimizer.step()
            optimizer.zero_grad()
            del loss
            peaks[mode] = counter.peak
    return peaks


WIDE = replace(SMALL, context_length=64, d_model=96, d_ff=384, num_layers=6, vocab_size=300)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_size": 6000},
        {"vocab_size": 6000, "tied_head": False},
        {"num_heads": 24},
        {"attention": "sdpa"},
        {"feed_forward": "swiglu", "positions": "rotary"},
        {"recompute": "segments", "recompute_every": 2},
        {"recompute": "nested"},
        {"recompute": "attention"},
        # The loss and the blocks that are run again are never there together.
        {"recompute": "segments", "recompute_every": 2, "vocab_size": 6000},
        {"recompute": "segments", "recompute_every": 4, "vocab_size": 6000, "tied_head": False},
        {"recompute": "nested", "vocab_size": 6000},
        {"recompute": "segments", "recompute_every": 3, "vocab_size": 2000, "context_length": 256},
        {"recompute": "segments", "recompute_every": 6, "attention": "sdpa", "context_length": 256},
    ],
    ids=str,
)
def test_peak_memory_is_that_of_the_live_tensors(changes, batch):
    config = replace(WIDE, **changes)
    seq = config.context_length
    # The count is made of whole tensors, and may miss one of each kind that is alive inside a block.
    tokens = 4 * batch * seq
    scores = config.num_heads * seq if config.attention == "naive" else 0
    one_of_each = tokens * (config.d_model + config.d_ff + scores)
    peaks = live_peaks(config, batch, seq)
    peaks["backward"] = peaks["forward-backward"]  # whose forward is not timed, but runs
    assert peaks.keys() == set(MODES)
    for mode, peak in peaks.items():
        assert abs(sum(memory(config, batch, seq, mode).values()) - peak) <= one_of_each, mode


# Many tokens for few weights, so that the fullest moment is when blocks have just been run again.
FLAT = replace(WIDE, d_model=32, d_ff=128, vocab_size=40, attention="sdpa")


@pytest.mark.parametrize(("layers", "every"), [(5, 2), (7, 3), (7, 4), (4, 4), (2, 0), (3, 0), (9, 0), (12, 0)])
def test_blocks_that_are_run_again_hold_what_the_formula_says(layers, every):
    recompute = "segments" if every else "nested"
    config = replace(FLAT, num_layers=layers, recompute=recompute, recompute_every=every or 1)
    counted = sum(memory(config, 64, 64, "forward-backward").values())
    peak = live_peaks(config, 64, 64, ("forward-backward",) * 2)["forward-backward"]
    stream = 4 * 64 * 64 * 32
    # A block that is run again stops at the last tensor that backward needs: its own output is never made.
    assert 0 <= counted - peak < 1.5 * stream


@pytest.mark.parametrize(
    ("changes", "held"),
    [  # (tensors of the stream, blocks) that are there when the backward of each of 5 blocks begins
        ({}, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
        ({"recompute": "segments"}, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]),
        ({"recompute": "segments", "recompute_every": 2}, [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]),
        ({"recompute": "segments", "recompute_every": 8}, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
        # Halves of 5 are 2 and 3, of 3 1 and 2: the way to the last block turns to a second half three times.
        ({"recompute": "nested"}, [(0, 1), (1, 1), (1, 1), (2, 1), (3, 1)]),
    ],
    ids=str,
)
def test_what_blocks_hold_by_hand(changes, held):
    sizes = Sizes.of(SMALL, BATCH, SEQ, "fp32")
    block = block_activations(SMALL, sizes)
    found = Activations.of(variant(**changes), BATCH, SEQ)
    assert found.held == tuple(streams * sizes.stream + blocks * block for streams, blocks in held)
    kept, recomputed = saved_activations(variant(**changes), BATCH, SEQ)
    assert kept + recomputed == found.shared + found.head + max(found.held)


def test_the_prediction_adds_products_and_traffic():
    work = (model_preset("small"), 16, 128)
    forward = sum(forward_flops(*work).values())
    slow = predict(*work, "forward", "fp32", Hardware("slow", 1e9, 1e30, "made up"))
    assert sum(slow.values()) == pytest.approx(forward / 1e9)
    machine = Hardware("some", 1e11, 1e10, "made up")
    seconds = {mode: predict(*work, mode, "fp32", machine) for mode in MODES}
    assert seconds["backward"]["matrix products"] == 2 * seconds["forward"]["matrix products"]
    for kind in ("matrix products", "element-wise"):
        assert seconds["forward-backward"][kind] == seconds["step"][kind]
        assert seconds["step"][kind] == pytest.approx(seconds["forward"][kind] + seconds["backward"][kind])
    assert seconds["step"]["optimizer"] > 0 == seconds["forward-backward"]["optimizer"]
    recomputing = predict(replace(work[0], recompute="segments"), 16, 128, "backward", "fp32", machine)
    assert recomputing["matrix products"] > 1.4 * seconds["backward"]["matrix products"]


def test_the_probe_finds_a_ceiling_of_this_machine():
    found = probe(torch.device("cpu"), "fp32", "here", budget=0.02)
    assert 1e8 < found.matmul_flops < 1e15
    assert 1e8 < found.bandwidth < 1e14
    assert "fp32" in found.source
    with pytest.raises(ValueError, match="must be positive"):
        Hardware("broken", 0.0, 1.0, "made up")
