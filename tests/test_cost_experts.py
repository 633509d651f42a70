"""The closed forms of expert layers against the running model: parameters, FLOPs, saved bytes, state and traffic."""

from dataclasses import asdict, replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems import gating
from cs336_systems.cost import (
    Hardware,
    backward_flops,
    count_parameters,
    forward_flops,
    memory,
    predict_step,
    recompute_flops,
    saved_activations,
)
from cs336_systems.cost import experts as closed
from cs336_systems.cost.capacity import require_layout_fits
from cs336_systems.cost.layout import Layout, partial_names, rank_parameters, rank_shapes
from cs336_systems.cost.layout_memory import rank_memory
from cs336_systems.cost.layout_step import pass_flops, sample_flops
from cs336_systems.cost.parallel import Link
from cs336_systems.dry_run import dry_run
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.mixture import Mixture
from cs336_systems.model import TransformerLM
from cs336_systems.pipeline import Stage
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.recipe import Recipe
from cs336_systems.tensor_parallel import tensor_parallel
from tests.test_cost import live_peaks, loss_of, saved_bytes
from tests.traffic_cases import in_turn

BATCH, SEQ = 5, 8
SMALL = ModelConfig(
    vocab_size=44, context_length=SEQ, d_model=48, d_ff=112, num_layers=4, num_heads=4, num_experts=4, expert_every=2
)
GPT = {"norm": "layernorm", "bias": True, "feed_forward": "gelu-tanh"}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
FAIRSEQ = model_preset("fairseq-moe-15b")


def sparse(mixture: dict, **changes) -> ModelConfig:
    return replace(SMALL, mixture=Mixture(**mixture), **changes)


MODELS = [
    sparse({}),
    sparse({"top_k": 1}, expert_every=1, **GPT),
    sparse({"expert_d_ff": 64, "shared_expert": True, "normalize": "before"}, **LLAMA),
    sparse({"expert_d_ff": 64, "shared_expert": True}, num_experts=8, expert_every=3, **GPT),
    sparse({"dispatch": "einsum", "capacity_factor": 1.5}, **GPT),
    sparse({"dispatch": "einsum", "top_k": 1, "shared_expert": True, "normalize": "before"}, **LLAMA),
    sparse({"dispatch": "einsum", "normalize": "before", "capacity_factor": 0.6, "aux_weight": 0.0}),
]
NAMES = [f"{number}: {each.feed_forward} {each.mixture.dispatch}" for number, each in enumerate(MODELS)]
models = pytest.mark.parametrize("config", MODELS, ids=NAMES)


@models
def test_parameters_equal_the_model(config):
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in TransformerLM(config, "meta").parameters())
    assert count_parameters(config) == rank_parameters(config, Layout(), 0)


def test_a_stage_without_expert_layers_has_none():
    config = replace(SMALL, num_layers=3, expert_every=4)
    assert count_parameters(config)["experts"] == 0
    assert forward_flops(config, 1, 8) == forward_flops(replace(config, num_experts=0), 1, 8)
    assert memory(config, 1, 8, "step") == memory(replace(config, num_experts=0), 1, 8, "step")


LAYOUTS = [
    Layout(ep=2, global_batch=2),
    Layout(tp=2, ep=4, global_batch=4, vocabulary_multiple=8),
    Layout(tp=2, sequence=True, vocabulary_multiple=8),
    Layout(tp=2, pp=2, ep=2, global_batch=2, sequence=True),
    Layout(pp=2, chunks=2, ep=2, global_batch=4, schedule="interleaved"),
]


@models
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"tp {each.tp} pp {each.pp} ep {each.ep}")
def test_parameters_of_a_rank_equal_the_built_model(config, layout):
    groups = {name: SimpleNamespace(size=lambda n=n: n, rank=lambda n=n: n - 1) for name, n in asdict(layout).items()}
    for stage in range(layout.pp):
        model = TransformerLM(config, "meta")
        Stage(model, stage, layout.pp, layout.chunks)
        plan = tensor_parallel(model, groups["tp"], layout.sequence, layout.vocabulary_multiple)
        expert_parallel(model, groups["ep"])
        shapes = rank_shapes(config, layout, stage)
        assert list(shapes.items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        assert set(partial_names(shapes, layout)) == plan.partial
        assert sum(rank_parameters(config, layout, stage).values()) == sum(p.numel() for p in model.parameters())


@pytest.fixture
def in_float64():
    """Where grouped products are a loop of plain ones, which torch's counter knows."""
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
@pytest.mark.parametrize("config", [MODELS[0], MODELS[3], MODELS[4]], ids=[NAMES[0], NAMES[3], NAMES[4]])
@pytest.mark.usefixtures("in_float64")
def test_recompute_flops_equal_torch_counter(config, recompute):
    config = replace(config, recompute=recompute, recompute_every=2, num_layers=5)
    with set_checkpoint_early_stop(False):
        loss = loss_of(TransformerLM(config))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert backward.get_total_flops() == backward_flops(config, BATCH, SEQ) + recompute_flops(config, BATCH, SEQ)


@models
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_activations_to_the_byte(config, precision):
    torch.manual_seed(0)
    for changes in ({}, {"recompute": "attention"}, {"recompute": "segments", "positions": "learned"}):
        each = replace(config, **changes)
        assert saved_bytes(each, precision) == saved_activations(each, BATCH, SEQ, precision)[0], changes


def test_a_capacity_is_counted_from_above(monkeypatch):
    config = sparse({"capacity_factor": 1.0}, **GPT)
    counted = saved_activations(config, BATCH, SEQ)[0]
    assert closed.kept_rows(config, BATCH * SEQ) == 40 == 4 * 10
    monkeypatch.setattr(gating, "choose", in_turn)
    assert saved_bytes(config, "fp32") == counted
    # All tokens want the first two experts: half of the slots of each layer stay empty.
    monkeypatch.setattr(gating, "choose", lambda logits, *rest: torch.arange(2)[:, None].repeat(1, len(logits)))
    # Of a row the experts' input, output and weighted output, two of the hidden width, a weight and four indices.
    row = 4 * (3 * 48 + 2 * 112) + 4 + 4 * 8
    assert counted - saved_bytes(config, "fp32") == 2 * 20 * row


def test_the_numbers_of_fairseqs_evaluation():
    # 2048 tokens a GPU, a capacity of 5% of them, half precision: what the profile of the 15B model shows, by hand.
    config = FAIRSEQ
    assert closed.slots(config, 2048, training=False) == 103
    assert closed.padded_rows(config, 2048, training=False) == 512 * 103 == 52_736
    assert closed.kept_rows(config, 2048, training=False) == 4096
    assert (
        closed.payload_bytes(config, 2048, training=False) / closed.useful_bytes(config, 2048, training=False) == 12.875
    )
    sent, useful = (count(config, 2048, training=False) for count in (closed.payload_bytes, closed.useful_bytes))
    assert sent / useful == 12.875
    assert round(sent / 1e6, 1) == 81.0
    assert round(useful / 1e6, 1) == 6.3
    padded, kept = (count(config, 2048, False) for count in (closed.padded_rows, closed.kept_rows))
    assert [round(closed.expert_flops(config, rows) / 1e9, 1) for rows in (padded, kept)] == [497.7, 38.7]
    assert round(closed.dispatch_flops(config, 2048, training=False) / 1e9) == 332
    # In training a factor of 2 on 4 tokens an expert.
    assert closed.slots(config, 2048) == 8
    assert closed.padded_rows(config, 2048) == closed.kept_rows(config, 2048)
    one_hot = replace(config, mixture=replace(config.mixture, dispatch="einsum"))
    parts, ours = (forward_flops(each, 1, 2048, training=False) for each in (one_hot, config))
    assert parts["experts"] == 6 * closed.expert_flops(config, 52_736) == 12.875 * ours["experts"]
    assert parts["one-hot products"] == 6 * (closed.dispatch_flops(config, 2048, False) + 2 * 2 * 2048 * 52_736)
    assert "one-hot products" not in ours


def test_the_experts_of_15_billion_parameters_do_not_fit_one_gpu():
    layout = Layout(global_batch=8, micro_batch=1, ep=8)
    needed = sum(rank_memory(FAIRSEQ, layout, 2048).values())
    assert needed > 4 * 4 * 14.51e9 / 8
    with pytest.raises(UserError) as refused:
        require_layout_fits("fairseq-moe-15b", FAIRSEQ, layout, 2048, "fp32", needed - 1)
    assert "at tp 1 x pp 1 x dp 1 x ep 8 needs" in str(refused.value)
    assert "raise --ep, --tp, --pp or --zero" in str(refused.value)
    require_layout_fits("fairseq-moe-15b", FAIRSEQ, layout, 2048, "fp32", needed)


@pytest.mark.parametrize("mixture", [{}, {"dispatch": "einsum", "capacity_factor": 1.0}], ids=str)
def test_peak_memory_is_about_that_of_the_live_tensors(mixture):
    config = sparse(mixture, vocab_size=300, d_ff=192, expert_every=1, context_length=64)
    # Rows of two widths, and of one-hot tensors one: the count may miss one of each that is alive inside a layer.
    rows = closed.computed_rows(config, 512)
    for mode, peak in live_peaks(config, 8, 64, ("forward", "forward", "step", "step")).items():
        counted = sum(memory(config, 8, 64, mode).values())
        assert abs(counted - peak) <= 4 * rows * (48 + 192 + (512 if mixture else 0)), mode


FAST, SLOW = Link(0.0, 1e30), Link(1.0, 1e30)
MACHINE = Hardware("some", 1e12, 1e30, "made up")


def test_flops_of_all_ranks_are_those_of_the_model():
    config = replace(MODELS[3], num_layers=6, recompute="segments")
    layout = Layout(tp=2, pp=2, ep=4, global_batch=12, micro_batch=3)
    ranks = [pass_flops(config, layout, SEQ, stage) for stage in range(2)]
    # One of two expert layers is on each stage. Both tp ranks route alike; its part comes forward, again, and twice.
    router = 2 * 4 * closed.router_flops(config, 3 * SEQ)
    alike = sum(forward_flops(config, 3, SEQ).values()) + backward_flops(config, 3, SEQ)
    assert 2 * sum(map(sum, ranks)) == alike + recompute_flops(config, 3, SEQ) + router
    assert sample_flops(config, SEQ)[0] == sum(forward_flops(config, 1, SEQ).values()) * 3


def test_the_all_to_alls_take_their_time():
    config = sparse({"aux_scope": "global"})
    spent = predict_step(config, Layout(ep=2, global_batch=6), SEQ, MACHINE, SLOW)
    # Two layers: counts, there, back and the balance forward, there and back backward; three microbatches.
    assert spent["expert-parallel"] == pytest.approx(3 * 2 * (4 + 2))
    assert spent["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket of dense parameters, the vote, the norm
    assert spent.pop("total") == pytest.approx(sum(spent.values()))
    wide = predict_step(config, Layout(ep=2, global_batch=2), SEQ, MACHINE, Link(0.0, 1e6))
    rows = 2 * SEQ * 48 * 4
    counts = 4 * 8 + 2 * 4 * 4  # and the balance's sum over both ranks, which sends twice as much
    assert wide["expert-parallel"] == pytest.approx(2 * (4 * rows + counts) / 2 / 1e6)
    assert predict_step(config, Layout(), SEQ, MACHINE, FAST)["expert-parallel"] == 0


def test_a_dry_run_counts_experts_and_their_messages():
    recipe = Recipe(
        num_layers=2, d_model=32, num_heads=4, d_ff=64, context=16, batch_size=8, num_experts=4, ep=2, tp=2
    )  # fmt: skip
    console = Console(width=160, record=True, file=StringIO())
    console.print(dry_run(recipe, 4))
    said = " ".join(console.export_text().split())
    assert "tp 2 x pp 1 x dp 1 x ep 2, ZeRO stage 0" in said
    assert "2 of 4 experts a rank, in 1 layer; balanced." in said
    assert "ep │ all-to-all │ 5 │" in said
    assert "data: dp and ep together." in said
