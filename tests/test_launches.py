"""Operators counted before they run: equal to what torch's dispatcher starts, and large tensors to what it makes."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.cost import Hardware, Layout, predict, predict_step
from cs336_systems.cost.launches import count_tensors, embedding_launches, head_launches, launches
from cs336_systems.cost.layout_step import pass_launches
from cs336_systems.cost.new_memory import new_bytes
from cs336_systems.cost.parallel import Link
from cs336_systems.master_weights import MasterAdamW
from cs336_systems.model import TransformerLM, lm_loss
from cs336_systems.optim import AdamW
from cs336_systems.precision import autocast
from cs336_systems.presets import ModelConfig, model_preset

BATCH, SEQ, WORDS = 2, 16, 512
CPU = torch.device("cpu")
NOTHING = {"aten._unsafe_view", "aten.detach", "aten.promote_types", "aten.empty_like"}  # no number is touched


class Started(TorchDispatchMode):
    """Operators by name, and the sizes of new storages in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.names: Counter[str] = Counter()

    def made(self, least: int) -> int:
        """Bytes of those of at least so many."""
        return sum(size for size in self.sizes if size >= least)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = str(function.overloadpacket)
        if packet.startswith("aten.") and not function.is_view and packet not in NOTHING:
            self.names[packet] += 1
        result = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tensors((args, kwargs))}
        new = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors(result)}
        self.sizes += [size for where, size in new.items() if where not in given]
        return result


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def small(name: str, **changes) -> ModelConfig:
    config = model_preset(name)
    kv = 2 if config.num_kv_heads else 0
    sizes = {"vocab_size": WORDS, "context_length": SEQ, "d_model": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    return replace(config, **sizes, num_kv_heads=kv, **changes)


@cache
def counted(config: ModelConfig, precision: str = "fp32") -> tuple[list[Started], int]:
    """What forward, backward and update start, after an update that makes the optimizer's state; and the parameters.
    In "half" the weights are in bf16 and have masters, as a layout's."""
    model = TransformerLM(config, CPU)
    if precision == "half":
        model.bfloat16()
    optimizer = (MasterAdamW if precision == "half" else AdamW)(model.parameters())
    tokens, targets = torch.randint(WORDS, (2, BATCH, SEQ))
    phases = [Started() for _ in range(3)]
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad()
    with autocast(CPU, "fp32" if precision == "half" else precision), phases[0]:
        loss = lm_loss(model, tokens, targets)
    with phases[1]:
        loss.backward()
    for each in model.parameters():  # BERT's classifier of pairs has no part in this loss
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    with phases[2]:
        optimizer.step()
    return phases, len(list(model.parameters()))


MODELS = {
    "tiny": small("tiny"),
    "course": small("small"),
    "llama": small("llama-8b"),
    "llama with sdpa": small("llama-8b", attention="sdpa"),
    "bert": small("bert-345m"),
    "gpt3": small("gpt3-175b"),
    "sinusoidal": small("tiny", positions="sinusoidal"),
    "no positions": small("tiny", positions="none"),
    "segments": small("small", recompute="segments"),
    "selective": small("small", recompute="attention"),
}


CASES = [(name, "fp32") for name in MODELS] + [(name, "bf16") for name in ("tiny", "course", "llama", "bert")]
CASES += [(name, "half") for name in ("llama with sdpa", "bert", "segments", "selective")]
CASTS = {"fp32": "none", "bf16": "products", "half": "weights"}


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_operators_equal_the_dispatchers(name, precision):
    config = MODELS[name]
    phases, number = counted(config, precision)
    said = launches(config, "step", CASTS[precision])
    assert list(said.values()) == [each.names.total() for each in phases]
    assert count_tensors(config) == number


def test_experts_are_counted_within_a_tenth():
    config = replace(small("fairseq-moe-twin"), num_experts=4, num_layers=4, dropout=0.0)
    phases, number = counted(config)
    for said, found in zip(launches(config, "step").values(), phases, strict=True):
        assert said == pytest.approx(found.names.total(), rel=0.1)
    assert count_tensors(config) == number


@pytest.mark.parametrize("name", ["course", "llama", "gpt3", "segments"])
def test_bytes_of_large_tensors_equal_those_made(name):
    # Hidden activations have 32 KiB, logits 64, tables 64, feed-forward matrices 32; the stream and the scores less.
    phases, _ = counted(MODELS[name])
    for least in (2**15, 2**16):
        said = new_bytes(MODELS[name], BATCH, SEQ, "step", least=least)
        assert list(said.values()) == [each.made(least) for each in phases]
    for count, found in zip(new_bytes(MODELS[name], BATCH, SEQ, "step", least=1).values(), phases, strict=True):
        assert count == pytest.approx(found.made(1), rel=0.15)


FREE = Hardware("free", 1e30, 1e30, "made up", launch=1.0)


def test_a_host_that_waits_adds_every_start():
    config, mode = MODELS["course"], "step"
    started = sum(launches(config, mode).values())
    assert sum(predict(config, BATCH, SEQ, mode, "fp32", FREE).values()) == pytest.approx(started)
    ahead = replace(FREE, asynchronous=True, matmul_flops=1.0)
    seconds = predict(config, BATCH, SEQ, mode, "fp32", ahead)
    assert seconds["launches"] == 0 < seconds["matrix products"]  # the device is the slower one
    assert sum(predict(config, BATCH, SEQ, mode, "fp32", replace(FREE, asynchronous=True)).values()) == started
    touched = predict(config, BATCH, SEQ, mode, "fp32", replace(FREE, launch=0.0, first_touch=1.0))
    assert touched["first touch"] == sum(new_bytes(config, BATCH, SEQ, mode).values()) == 0  # nothing here is large
    large = predict(replace(config, vocab_size=10**7), BATCH, SEQ, mode, "fp32", replace(FREE, first_touch=1.0))
    assert large["first touch"] > 4 * 4 * BATCH * SEQ * 10**7


def test_a_stage_starts_its_own():
    config, link = MODELS["course"], Link(0.0, 1e30)
    alone = predict_step(config, Layout(micro_batch=BATCH, global_batch=BATCH), SEQ, FREE, link)
    counts = launches(config, "step")
    assert [alone[name] for name in counts] == pytest.approx(list(counts.values()))
    deep = replace(config, num_layers=4)
    halves = Layout(pp=2, global_batch=2)
    both = [pass_launches(deep, halves, stage) for stage in range(2)]
    whole = launches(deep, "forward-backward")
    assert [sum(way) for way in zip(*both, strict=True)] == [whole["forward"], whole["backward"]]
    ends = zip(head_launches(deep), embedding_launches(deep), strict=True)  # each has one of them
    assert [last - first for first, last in zip(*both, strict=True)] == [head - start for head, start in ends]


BUSY = Hardware("busy", 1e9, 1e9, "made up", launch=1e-3, first_touch=1e-9)


@pytest.mark.parametrize("name", ["course", "llama", "bert", "segments", "selective"])
def test_a_layout_of_one_rank_takes_as_long_as_a_pass(name):
    """The same seconds, of which each part counts; in bf16, the other casts."""
    config, link = replace(MODELS[name], vocab_size=2**20), Link(0.0, 1e30)
    layout = Layout(micro_batch=BATCH, global_batch=BATCH)
    whole = predict(config, BATCH, SEQ, "step", "fp32", BUSY)
    assert predict_step(config, layout, SEQ, BUSY, link)["total"] == pytest.approx(sum(whole.values()), rel=1e-12)
    assert all(seconds > 0.001 * sum(whole.values()) for seconds in whole.values())
    narrow = sum(predict(config, BATCH, SEQ, "step", "bf16", BUSY).values())
    autocast, weights = (sum(launches(config, "step", casts).values()) for casts in ("products", "weights"))
    seconds = predict_step(config, layout, SEQ, BUSY, link, "bf16")["total"]
    assert seconds - narrow == pytest.approx(1e-3 * (weights - autocast), rel=1e-9)


def test_a_rank_touches_its_share_of_what_is_new():
    config, link = replace(MODELS["course"], vocab_size=2**20), Link(0.0, 1e30)
    touching = replace(FREE, launch=0.0, first_touch=1.0)
    new = new_bytes(config, BATCH, SEQ, "step")
    for split, ranks in (({"tp": 2}, 2), ({"pp": 2}, 2), ({"tp": 2, "pp": 2}, 4)):
        parts = predict_step(config, Layout(micro_batch=BATCH, global_batch=3 * BATCH, **split), SEQ, touching, link)
        for phase, passes in (("forward", 3), ("backward", 3), ("optimizer", 1)):
            assert parts[phase] == pytest.approx(passes * new[phase] / ranks)
    sharded = predict_step(config, Layout(dp=2, zero=1, micro_batch=BATCH, global_batch=2 * BATCH), SEQ, touching, link)
    assert sharded["optimizer"] == pytest.approx(new["optimizer"] / 2)
