"""The closed forms of a layout against the split model: shapes and bytes of activations, each exactly."""

import weakref
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cs336_systems import regather
from cs336_systems.comm import Mesh
from cs336_systems.cost import count_parameters
from cs336_systems.cost.layout import Layout, partial_names, rank_parameters, rank_shapes
from cs336_systems.cost.layout_activations import block_bytes, pass_activations, saved_by_sequence, sizes_of
from cs336_systems.cost.layout_memory import layout_memory, live_activations, rank_memory
from cs336_systems.data import Batch
from cs336_systems.dropout import dropout_key
from cs336_systems.errors import UserError
from cs336_systems.expert_parallel import expert_parallel
from cs336_systems.heads import Losses
from cs336_systems.model import TransformerLM
from cs336_systems.pipeline import Pipeline, Stage
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.schedule import peak_live
from cs336_systems.tensor_parallel import tensor_parallel
from tests.ranks import run

BATCH, SEQ = 3, 8
SMALL = ModelConfig(vocab_size=44, context_length=SEQ, d_model=48, d_ff=112, num_layers=4, num_heads=4)
GPT = {"norm": "layernorm", "bias": True, "feed_forward": "gelu-tanh"}
LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "tied_head": False, "num_kv_heads": 2}
BERT = {"norm": "layernorm", "bias": True, "bert_heads": True, "token_types": 2, "causal": False}
BERT_345M = model_preset("bert-345m")


def layout_of(**changes) -> Layout:
    """With a batch that fits, of one microbatch for each stage."""
    chunks, micro = changes.get("chunks", 1), changes.pop("micro_batch", 1)
    m, dp = changes.pop("m", changes.get("pp", 1)), changes.get("dp", 1) * changes.get("ep", 1)
    changes.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    return Layout(micro_batch=micro, global_batch=micro * m * dp, **changes)


def built(config: ModelConfig, layout: Layout, stage: int, tp_rank: int):
    """The parameters of a rank, of a model that has none of their values, and what was done to it."""
    model = TransformerLM(config, "meta")
    Stage(model, stage, layout.pp, layout.chunks)
    group = SimpleNamespace(size=lambda: layout.tp, rank=lambda: tp_rank)
    return model, tensor_parallel(model, group, layout.sequence, layout.vocabulary_multiple)


DEGREES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (4, 4, 1), (1, 4, 3), (8, 8, 1)]


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        *((BERT_345M, each) for each in DEGREES),
        *((model_preset("llama-8b"), each) for each in ((1, 1, 1), (2, 2, 2), (8, 4, 1))),
        *(
            (replace(SMALL, **kind), each)
            for kind in (GPT, LLAMA)
            for each in ((1, 1, 1), (2, 2, 1), (2, 1, 1), (1, 4, 1))
        ),
    ],
    ids=lambda each: str(each) if isinstance(each, tuple) else each.positions,
)
def test_parameters_of_a_rank_equal_the_built_model(config, degrees):
    tp, pp, chunks = degrees
    layout = layout_of(tp=tp, pp=pp, chunks=chunks, sequence=True, vocabulary_multiple=128)
    for stage in range(pp):
        model, plan = built(config, layout, stage, tp - 1)
        shapes = rank_shapes(config, layout, stage)
        assert list(shapes.items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        assert set(partial_names(shapes, layout)) == plan.partial
        assert sum(rank_parameters(config, layout, stage).values()) == sum(p.numel() for p in model.parameters())
    if layout.ranks == 1:
        assert rank_parameters(config, layout, 0) == count_parameters(config)


def test_bert_345m_on_two_by_two():
    # Megatron's padding to 128 tp: 29,056 words become 29,184. The last stage has the tied embedding as well.
    layout = layout_of(tp=2, pp=2, vocabulary_multiple=256)
    assert [sum(rank_parameters(BERT_345M, layout, stage).values()) for stage in (0, 1)] == [91_082_752, 92_676_354]
    assert layout.vocabulary(BERT_345M) == 29_184 // 2
    parts = rank_memory(BERT_345M, layout, 512, "fp16", stage=1)
    assert parts["parameters"] == parts["gradients"] == 2 * 92_676_354
    assert parts["optimizer state"] == 12 * 92_676_354
    with pytest.raises(UserError, match="stage 2 does not exist"):
        rank_parameters(BERT_345M, layout, 2)


def batch_of(config: ModelConfig) -> Batch:
    tokens, targets = (torch.randint(config.vocab_size, (BATCH, SEQ)) for _ in range(2))
    if not config.bert_heads:
        return Batch(tokens, targets, torch.arange(BATCH))
    real = torch.ones(BATCH, SEQ, dtype=torch.bool)
    return Batch(tokens, targets, torch.arange(BATCH), torch.zeros_like(tokens), real, torch.zeros(BATCH).long())


def nbytes(tensor: torch.Tensor) -> int:
    # On a CPU LayerNorm's numbers, one a token, have two bytes in half precision; on a GPU and in the formula four.
    number = tensor.dim() == 3 and tensor.shape[-1] == 1 and tensor.dtype == torch.bfloat16
    return tensor.untyped_storage().nbytes() * (2 if number else 1)


def saved_bytes(
    config: ModelConfig, layout: Layout, group, stage: int, chunk: int, dtype: torch.dtype, experts=None
) -> int:
    """Bytes of the distinct storages that autograd keeps after one microbatch's forward, parameters apart. The model is
    split over the group, its experts over those of `experts`."""
    model = TransformerLM(config)
    part = Stage(model, stage, layout.pp, layout.chunks)
    tensor_parallel(model, group, layout.sequence)
    if experts is not None:
        expert_parallel(model, experts)
    model.to(dtype)
    skip = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in skip:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    def pack(self, tensor, original=regather.Gathered.pack):
        packed = original(self, tensor)
        keep(tensor if packed is tensor else self.part)
        return packed

    batch, hidden = batch_of(config), None
    if stage or chunk:
        seq = SEQ // (layout.tp if layout.sequence else 1)
        hidden = torch.randn(BATCH, seq, config.d_model, dtype=dtype).requires_grad_()
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr(regather.Gathered, "pack", pack)  # torch calls the innermost hooks only, which are these
        held = part(batch, hidden, chunk, dropout_key(1, 2, batch.rows))
    total = sum(map(nbytes, kept.values()))
    del held
    return total


def saved_case(group, cases):
    """Where autograd keeps other than the formula says, in bytes."""
    wrong = []
    for changes, settings, stage, chunk, precision in cases:
        config, layout = replace(SMALL, **changes), Layout(**settings)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        got = saved_bytes(config, layout, group, stage, chunk, dtype)
        want = pass_activations(config, layout, SEQ, stage, chunk, precision).kept
        if got != want:
            wrong.append([str(changes), str(settings), stage, chunk, precision, got - want])
    return wrong


PLACES = [(1, 1, 0, 0), (2, 1, 1, 0), (2, 1, 0, 0), (2, 2, 0, 1), (2, 2, 1, 1)]  # pp, chunks, stage, chunk
CHOICES = list(
    product(
        (GPT, LLAMA, BERT, {}),
        ("naive", "sdpa"),
        (0.0, 0.1),
        ("none", "attention", "segments", "nested"),
        (False, True),
    )
)


def saved_cases(tp: int, precision: str) -> list:
    """Some of all kinds of model, attention, dropout and recompute, with sequence parallelism or not, each at another
    place."""
    cases = []
    for number, (kind, attention, dropout, recompute, sequence) in enumerate(CHOICES):
        pp, chunks, stage, chunk = PLACES[number % len(PLACES)]
        changes = kind | {"attention": attention, "dropout": dropout, "recompute": recompute}
        layout = layout_of(tp=tp, pp=pp, chunks=chunks, sequence=sequence, micro_batch=BATCH)
        if not (sequence and tp == 1):
            cases.append((changes, asdict(layout), stage, chunk, precision))
    return cases[:: 5 - tp if precision == "fp32" else 9]


@pytest.mark.parametrize(("tp", "precision"), [(1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16")])
def test_activations_of_a_microbatch_to_the_byte(tp, precision):
    assert run(saved_case, tp, cases=saved_cases(tp, precision)) == [[]] * tp


def test_fused_kernels_save_what_the_formula_says():
    fused = {"attention": "flash", "kernels": "triton"}
    cases = [
        (kind | fused, asdict(layout_of(tp=tp, sequence=tp > 1, micro_batch=BATCH)), 0, 0, "fp32")
        for kind in (GPT, LLAMA)
        for tp in (2,)
    ]
    assert run(saved_case, 2, cases=cases) == [[]] * 2


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["none", "attention", "segments"])
def test_a_block_keeps_what_the_paper_says(recompute, tp):
    # Korthikanti et al., arXiv:2205.05198, table 2, with a softmax in float32 and LayerNorm's two numbers a token.
    config = replace(BERT_345M, recompute=recompute)
    s, b, h, a = 512, 4, config.d_model, config.num_heads
    layout = layout_of(tp=tp, micro_batch=b)
    scores, norms = (0 if recompute == "attention" else 7 * b * a * s * s // tp), 16 * s * b
    without = 2 * s * b * h if recompute == "segments" else s * b * h * 10 + s * b * h * 24 // tp + scores + norms
    with_ = 2 * s * b * h // tp if recompute == "segments" else s * b * h * 34 // tp + scores + norms // tp
    assert saved_by_sequence(config, layout, s, "fp16") == (without, with_ if tp > 1 else without)
    assert block_bytes(config, layout, s, "fp16") == without


class Tracker:
    """Bytes that autograd keeps and outputs that the pipeline holds, as they come and go; `peak` is the most."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.live = self.peak = 0

    def enter(self, tensor: torch.Tensor) -> tuple[int, int]:
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if not self.users.get(place):
            self.live += size
        self.users[place] = self.users.get(place, 0) + 1
        self.peak = max(self.peak, self.live)
        return place, size

    def leave(self, place: int, size: int) -> None:
        self.users[place] -= 1
        self.live -= 0 if self.users[place] else size

    def watch(self, holder: object, tensor: torch.Tensor) -> None:
        weakref.finalize(holder, self.leave, *self.enter(tensor))


class Held:
    """What stands for a tensor in the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def live_case(group, cases):
    """(counted, seen) bytes that a stage keeps at once."""
    found = []
    for settings in cases:
        config, layout = replace(SMALL, **GPT, dropout=0.1), Layout(**settings)
        mesh, tracker = Mesh(pp=2), Tracker()
        stage = Stage(TransformerLM(config), mesh.pp.rank(), 2, layout.chunks)
        skip = {p.untyped_storage().data_ptr() for p in stage.parameters()}

        def pack(tensor, skip=skip, tracker=tracker):
            held = Held(tensor)
            if tensor.untyped_storage().data_ptr() not in skip:
                tracker.watch(held, tensor)
            return held

        class Watched(nn.Module):
            """Notes how long each output is held."""

            def forward(self, *inputs, stage=stage, pack=pack, tracker=tracker):
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
                    output = stage(*inputs)
                if not isinstance(output, Losses):
                    tracker.watch(output, output)
                return output

        batches = [batch_of(config) for _ in range(layout.microbatches)]
        keys = [dropout_key(1, 2, each.rows) for each in batches]
        Pipeline(stage, Watched(), mesh, layout.schedule).run(batches, lambda losses: losses.tokens, keys)
        found.append([live_activations(config, layout, SEQ, mesh.pp.rank()), tracker.peak])
        assert tracker.live == 0
    return found


def test_a_schedule_holds_what_the_formula_says():
    kinds = [("gpipe", 1, 4), ("1f1b", 1, 4), ("1f1b", 1, 1), ("interleaved", 2, 2), ("interleaved", 2, 4)]
    layouts = [layout_of(pp=2, schedule=name, chunks=chunks, m=m, micro_batch=BATCH) for name, chunks, m in kinds]
    for stage, found in enumerate(run(live_case, 2, cases=[asdict(layout) for layout in layouts])):
        for layout, (counted, seen) in zip(layouts, found, strict=True):
            assert counted == seen, (stage, layout)
            if layout.chunks == 1:
                passes = peak_live(layout.schedule, stage, 2, layout.microbatches)
                config = replace(SMALL, **GPT, dropout=0.1)
                output = 0 if stage else sizes_of(config, layout, SEQ, "fp32").stream
                assert counted == passes * (pass_activations(config, layout, SEQ, stage).kept + output)


def test_the_fullest_stage_and_what_shards_it():
    whole = layout_memory(BERT_345M, layout_of(pp=4, m=8, micro_batch=4), 512)
    assert whole == rank_memory(BERT_345M, layout_of(pp=4, m=8, micro_batch=4), 512, stage=0)  # four passes are live
    sums = [sum(rank_memory(BERT_345M, layout_of(dp=8, zero=stage), 512).values()) for stage in range(4)]
    assert sums == sorted(sums, reverse=True)
    sequence = layout_of(tp=4, micro_batch=4, sequence=True)
    plain = replace(sequence, sequence=False)
    assert sum(layout_memory(BERT_345M, sequence, 512).values()) < sum(layout_memory(BERT_345M, plain, 512).values())
