"""The closed forms of a layout against the split model: shapes, bytes of state and activations, FLOPs, each exactly."""

import weakref
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cs336_systems import regather
from cs336_systems.comm import Mesh
from cs336_systems.cost import Hardware, count_parameters, forward_flops
from cs336_systems.cost.layout import Layout, partial_names, rank_parameters, rank_shapes
from cs336_systems.cost.layout_activations import block_bytes, pass_activations, saved_by_sequence, sizes_of
from cs336_systems.cost.layout_memory import layout_memory, live_activations, parameter_bytes, rank_memory
from cs336_systems.cost.layout_step import pass_flops, predict_step, sample_flops
from cs336_systems.cost.parallel import Link
from cs336_systems.data import Batch
from cs336_systems.dropout import dropout_key
from cs336_systems.errors import UserError
from cs336_systems.heads import Losses
from cs336_systems.master_weights import MasterAdamW
from cs336_systems.model import TransformerLM
from cs336_systems.optim import decay_groups
from cs336_systems.pipeline import Pipeline, Stage
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.schedule import bubble_fraction, peak_live
from cs336_systems.tensor_parallel import tensor_parallel
from cs336_systems.zero import zero
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
    m, dp = changes.pop("m", changes.get("pp", 1)), changes.get("dp", 1)
    changes.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    return Layout(micro_batch=micro, global_batch=micro * m * dp, **changes)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"tp": 3}, "4 heads do not divide over tp 3"),
        ({"num_kv_heads": 2}, {"tp": 4}, "2 key/value heads do not divide over tp 4"),
        ({"d_ff": 113}, {"tp": 2}, "113 of d_ff do not divide over tp 2"),
        (
            {"vocab_size": 45},
            {"tp": 2},
            "a vocabulary of 45, padded to 45 (a multiple of 1), does not divide over tp 2",
        ),
        ({}, {"pp": 3}, "num_layers 4 is not a multiple of stages 3 x chunks 1 = 3"),
        ({}, {"pp": 2, "chunks": 3}, "num_layers 4 is not a multiple of stages 2 x chunks 3 = 6"),
        ({"context_length": 9}, {"tp": 2, "sequence": True}, "a sequence of 9 tokens does not divide over tp 2"),
        ({"num_experts": 8}, {}, "a layout of a model with 8 experts is not counted yet"),
    ],
    ids=str,
)
def test_a_model_that_does_not_divide_is_refused_with_the_numbers(changes, settings, said):
    config, layout = replace(SMALL, **changes), layout_of(**settings)
    with pytest.raises(UserError) as refused:
        layout.check(config)
    assert said in str(refused.value)
    with pytest.raises(UserError):
        rank_memory(config, layout, 8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp": 2, "micro_batch": 4, "global_batch": 30}, "x dp 2 = 8: use 24 or 32"),
        (
            {"dp": 2, "micro_batch": 4, "global_batch": 7},
            "of 7 sequences is not a multiple of micro-batch 4 x dp 2 = 8",
        ),
        ({"tp": 0}, "tp must be at least 1, not 0"),
        ({"zero": 4}, "ZeRO has stages 0 to 3, not 4"),
        ({"schedule": "zigzag"}, "no schedule is called 'zigzag'"),
        ({"chunks": 2, "schedule": "interleaved"}, "2 chunks are of no use on one stage"),
        ({"pp": 2, "chunks": 2, "global_batch": 3, "schedule": "interleaved"}, "microbatches 3 is not a multiple"),
        ({"pp": 2, "chunks": 2, "global_batch": 2}, "1f1b has one chunk per stage, not 2"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused_with_the_numbers(settings, said):
    with pytest.raises(UserError) as refused:
        Layout(**settings)
    assert said in str(refused.value)


def test_a_sequence_is_checked_before_anything_is_built():
    layout = layout_of(tp=2, sequence=True)
    layout.check(SMALL, 6)
    for seq, said in ((7, "a sequence of 7 tokens does not divide over tp 2"), (10, "10 tokens do not fit")):
        with pytest.raises(UserError, match=said):
            layout.check(SMALL, seq)
    assert (layout_of(tp=2, pp=2, dp=4, m=6).ranks, layout_of(dp=4, m=6, micro_batch=2).microbatches) == (16, 6)


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
        assert rank_parameters(config, layout, 0) | {"experts": 0} == count_parameters(config)


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
    number = tensor.dim() and tensor.shape[-1] == 1 and tensor.dtype == torch.bfloat16
    return tensor.untyped_storage().nbytes() * (2 if number else 1)


def saved_bytes(config: ModelConfig, layout: Layout, group, stage: int, chunk: int, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that autograd keeps after one microbatch's forward, parameters apart."""
    model = TransformerLM(config)
    part = Stage(model, stage, layout.pp, layout.chunks)
    tensor_parallel(model, group, layout.sequence)
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


ODD = GPT | {"vocab_size": 45, "d_ff": 111, "num_layers": 3}  # nothing divides over two ranks


def state_case(group, precision, stages):
    """Bytes of parameters, gradients and optimizer state that dp rank 0 has after a step, by ZeRO stage."""
    found = []
    for number in stages:
        config = replace(SMALL, **ODD)
        model = TransformerLM(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        wrapper, optimizer = zero(Stage(model, 0, 1), MasterAdamW, number, group, lambda m: decay_groups(m, 0.1))
        wrapper(batch_of(config)).tokens.backward()
        wrapper.finish_gradient_synchronization()
        kept = [each.gradient for each in wrapper.kept_gradients()]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
        optimizer.step()
        inner = getattr(optimizer, "inner", optimizer)
        state = [t for each in inner.state.values() for t in each.values() if torch.is_tensor(t) and t.dim()]
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in wrapper.parameters()}
        found.append([sum(weights.values()), sum(storages.values()), sum(t.nbytes for t in state)])
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_of_every_zero_stage_to_the_byte(precision):
    found = run(state_case, 2, precision=precision, stages=[0, 1, 2, 3])[0]
    for number, (weights, gradients, state) in enumerate(found):
        layout = layout_of(dp=2, zero=number, micro_batch=BATCH)
        parts = rank_memory(replace(SMALL, **ODD), layout, SEQ, precision)
        assert (parts["parameters"], parts["gradients"], parts["optimizer state"]) == (weights, gradients, state), (
            number
        )
    assert sum(parameter_bytes(precision)) == 16


def test_the_fullest_stage_and_what_shards_it():
    whole = layout_memory(BERT_345M, layout_of(pp=4, m=8, micro_batch=4), 512)
    assert whole == rank_memory(BERT_345M, layout_of(pp=4, m=8, micro_batch=4), 512, stage=0)  # four passes are live
    sums = [sum(rank_memory(BERT_345M, layout_of(dp=8, zero=stage), 512).values()) for stage in range(4)]
    assert sums == sorted(sums, reverse=True)
    sequence = layout_of(tp=4, micro_batch=4, sequence=True)
    plain = replace(sequence, sequence=False)
    assert sum(layout_memory(BERT_345M, sequence, 512).values()) < sum(layout_memory(BERT_345M, plain, 512).values())


def test_flops_of_a_sample_are_the_papers():
    s, n, h, v = 512, 24, 1024, 29_056
    paper = 96 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert round(paper / 1e12, 3) == 1.431
    bert = forward_flops(BERT_345M, 1, s)["head"] - 2 * s * h * v  # transform, pooler and pair, which it leaves out
    model, hardware = sample_flops(replace(BERT_345M, recompute="segments"), s)
    assert hardware - 3 * bert == round(paper)
    assert model - 3 * bert == round(72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))
    assert sample_flops(BERT_345M, s) == (model, model)


def test_flops_of_all_ranks_are_those_of_the_model():
    config = replace(BERT_345M, recompute="segments")
    layout = layout_of(tp=2, pp=4, micro_batch=3)
    hardware = sample_flops(config, 512)[1]
    ahead, back = (
        sum(each) for each in zip(*(pass_flops(config, layout, 512, stage) for stage in range(4)), strict=True)
    )
    bert = 3 * (forward_flops(config, 1, 512)["head"] - 2 * 512 * 1024 * 29_056)
    assert 2 * (ahead + back) == 3 * (hardware + bert)  # the transform is computed on both tp ranks


FAST = Link(0.0, 1e30)
MACHINE = Hardware("some", 1e12, 1e30, "made up")


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_predicted_bubble_is_the_schedules(name, chunks):
    config = replace(SMALL, vocab_size=1)  # all stages have almost as much to do
    layout = layout_of(pp=2, chunks=chunks, schedule=name, m=8)
    parts = predict_step(config, layout, SEQ, MACHINE, FAST)
    busy = parts["forward"] + parts["backward"]
    assert parts["total"] == pytest.approx(busy + parts["bubble"])
    assert parts["bubble"] / parts["total"] == pytest.approx(bubble_fraction(name, 2, 8, chunks), rel=0.01)
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    assert busy == pytest.approx(8 * sum(pass_flops(config, layout, SEQ, 1)) / 1e12)


def test_every_link_adds_what_it_carries():
    slow = Link(1.0, 1e30)

    def spent(**changes):
        return predict_step(SMALL, layout_of(**changes), SEQ, MACHINE, slow)

    # A block has four transfers; embedding, head and its two for the loss; then the norm.
    assert spent(tp=2, m=3)["tensor-parallel"] == pytest.approx(3 * (4 * 4 + 4))
    assert spent(dp=2)["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket, the vote, the norm
    assert spent(dp=2, zero=1)["data-parallel"] == pytest.approx(3 + 2)
    one_way = spent(pp=2, m=1)
    assert one_way["pipeline"] == pytest.approx(2 + 1)  # there and back, and the tied embedding
    assert spent()["total"] == pytest.approx(sum(pass_flops(SMALL, Layout(), SEQ, 0)) / 1e12)
    for changes in ({}, {"tp": 2, "pp": 2, "dp": 2}):
        parts = spent(**changes)
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    # Two gathers and a reduction of each of 26 matrices, and a third of the tied one; then the vectors, vote and norm.
    assert spent(dp=2, zero=3, m=2)["data-parallel"] == pytest.approx(2 * (3 * 26 + 1) + 3)
