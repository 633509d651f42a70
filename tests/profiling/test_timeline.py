"""Attribution of time to phases and modules, and of a node of backward to the module whose forward made it."""

from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, record_function

from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import model_preset
from cs336_systems.profiling.labels import module_names, tag_modules
from cs336_systems.profiling.names import ENGINE, kind_of, parse_tag
from cs336_systems.profiling.timeline import lane_number, roles, timeline
from cs336_systems.profiling.trace import parse, read_trace, trace_files
from tests.profiling.test_trace import chrome, slice_
from tests.support.chrome_events import MAIN, event, tag, trace


def tagged(name: str, start: float, length: float) -> dict:
    return slice_(name, start, length, "user_annotation")


def link(number: int, source: float, target: float) -> list[dict]:
    both = {"id": number, "pid": 7, "tid": 1, "cat": "fwdbwd", "name": "fwdbwd"}
    return [both | {"ph": "s", "ts": source}, both | {"ph": "f", "ts": target}]


def test_by_hand():
    """A linear layer in a block, its backward with a hook's work inside, and an optimizer."""
    events = [
        tagged("forward", 0, 100),
        tagged("model (Net)", 10, 80),
        tagged("blocks.0.up (Linear)", 20, 50),
        slice_("aten::linear", 30, 30),
        slice_("aten::matmul", 40, 12),  # what is linked to begins with it, and is inside it
        slice_("aten::addmm", 40, 10, **{"External id": 5}),
        tagged("x (Trainer)", 190, 150),
        tagged("backward", 200, 100),
        slice_("aten::ones_like", 202, 2),
        slice_(f"{ENGINE}AddmmBackward0", 210, 40),
        slice_("AddmmBackward0", 220, 20),
        slice_("aten::mm", 225, 10),
        slice_(f"{ENGINE}torch::autograd::AccumulateGrad", 260, 10),
        tagged("optimizer", 400, 100),
        slice_("aten::add_", 410, 10),
        slice_("aten::zeros", 600, 10),
        slice_("gemm", 1000, 7, "kernel", tid=3, **{"External id": 5}),
        *link(1, 40, 220),
    ]
    placed = {each.span.name: each for each in timeline(parse(chrome(*events))).nodes}
    up = (("model", "Net"), ("blocks.0.up", "Linear"))
    found = {name: (each.phase, each.direction, each.modules) for name, each in placed.items()}
    assert found["aten::addmm"] == ("forward", "forward", up)
    assert found["aten::mm"] == ("backward", "backward", up)
    assert found[f"{ENGINE}AddmmBackward0"] == ("backward", "backward", up)
    assert found[f"{ENGINE}torch::autograd::AccumulateGrad"] == ("backward", "backward", ())
    assert found["aten::ones_like"] == ("backward", "forward", ())
    assert found["aten::add_"] == ("optimizer", "forward", ())
    assert found["aten::zeros"] == ("other", "forward", ())
    assert placed["aten::addmm"].device_self == 7000
    assert placed["aten::linear"].device_self == 0


def test_of_spans_that_begin_together_the_inner_one_is_meant():
    names = ("forward", "model (Net)", "up (Linear)")
    outer = [tagged(name, 10, 50 - i) for i, name in enumerate(names)]
    inside = [slice_("aten::addmm", 10, 5), slice_(f"{ENGINE}AddmmBackward0", 210, 40)]
    node = slice_("AddmmBackward0", 220, 20)
    placed = {each.span.name: each for each in timeline(parse(chrome(*outer, *inside, node, *link(1, 10, 220)))).nodes}
    assert placed["AddmmBackward0"].modules == (("model", "Net"), ("up", "Linear"))


def test_phases_without_annotations():
    """A trace of plain torch.profiler: the engine is backward, torch's own annotation the optimizer."""
    events = [
        tagged("x (Linear)", 0, 10),
        slice_("aten::mm", 1, 5),
        slice_(f"{ENGINE}MmBackward0", 20, 10),
        slice_("aten::t", 21, 2),
        tagged("Optimizer.step#AdamW.step", 40, 10),
        slice_("aten::add_", 41, 2),
    ]
    placed = {each.span.name: each.phase for each in timeline(parse(chrome(*events))).nodes}
    assert (placed["aten::mm"], placed["aten::t"], placed["aten::add_"]) == ("forward", "backward", "optimizer")


def profiled(tmp_path, recompute: str):
    config = model_preset("tiny").override(recompute=recompute, num_layers=2, context_length=8)
    model, tokens = TransformerLM(config), torch.zeros(1, 8, dtype=torch.long)
    with record_function("warm-up"), tag_modules(), profile(record_shapes=True) as profiler:
        with record_function("forward"):
            loss = lm_loss(model, tokens, tokens)
        with record_function("backward"):
            loss.backward()
    profiler.export_chrome_trace(str(tmp_path / "x.json"))
    return timeline(read_trace(tmp_path / "x.json")).nodes


def test_backward_belongs_to_the_module_that_made_it(tmp_path):
    placed = profiled(tmp_path, "none")
    products = [each for each in placed if each.span.name == "aten::mm" and each.phase == "backward"]
    by_module: dict[str, int] = {}
    for each in products:
        by_module[each.modules[-1][0]] = by_module.get(each.modules[-1][0], 0) + 1
    linears = [f"blocks.{i}.{part}" for i in range(2) for part in ("attention.query", "feed_forward.down")]
    for name in (*linears, "blocks.1.attention.out"):
        assert by_module[name] == 2, by_module  # the gradients of its weight and of its input
    assert not [each for each in placed if each.phase == "forward" and each.direction == "backward"]
    nodes = [e for e in placed if e.span.name.startswith(ENGINE) and "AccumulateGrad" not in e.span.name]
    assert all(node.modules for node in nodes), [n.span.name for n in nodes if not n.modules]


def test_recomputed_forward_is_backward_time_of_its_module(tmp_path):
    placed = profiled(tmp_path, "segments")
    again = [e for e in placed if e.phase == "backward" and e.direction == "forward" and e.span.name == "aten::gelu"]
    assert [each.modules[-1][0] for each in again] == ["blocks.1.feed_forward", "blocks.0.feed_forward"]
    nodes = [e for e in placed if e.span.name.startswith(f"{ENGINE}GeluBackward0")]
    assert [each.modules[-1][0] for each in nodes] == ["blocks.1.feed_forward", "blocks.0.feed_forward"]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("inside")


def names_of(model: nn.Module, fails: bool = False) -> list[str]:
    seen = []

    def annotate(name: str):
        seen.append(name)
        return record_function(name)

    with tag_modules(annotate):
        try:
            model(torch.ones(2, 2))
        except RuntimeError:
            assert fails
        if fails:  # a tag that an exception left open would put these inside it
            seen.append("again")
            nn.Linear(2, 2)(torch.ones(2, 2))
    before = len(seen)
    model[0](torch.ones(2, 2)) if isinstance(model, nn.Sequential) else None
    assert len(seen) == before, "the hooks are gone"
    return seen


def test_a_wrapper_does_not_change_the_names():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    plain = ["model (Sequential)", "0 (Linear)", "1 (ReLU)"]
    assert names_of(inner) == plain
    assert names_of(Wrapper(inner)) == ["wrapper (Wrapper)", *plain]
    assert module_names(Wrapper(inner))[inner[0]] == "0"


def test_what_is_no_part_of_the_model_goes_by_its_class():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    seen = []

    def annotate(name: str):
        seen.append(name)
        return record_function(name)

    x = torch.ones(1, 2)
    with tag_modules(annotate, model):
        model[1](x)
        for _ in range(2):
            nn.MSELoss()(x, x)
        nn.Sequential(nn.Linear(2, 2))(x)
    want = ["1 (Sequential)", "1.0 (Linear)", "MSELoss (MSELoss)", "MSELoss_2 (MSELoss)"]
    assert seen == [*want, "Sequential (Sequential)", "Sequential.0 (Linear)"]
    seen.clear()
    with tag_modules(annotate):
        model[1](x)
        model(x)  # around the first that was called
    assert seen == ["model (Sequential)", "0 (Linear)", "model (Sequential)", "0 (Linear)", *want[:2]]


def test_an_exception_closes_the_tags():
    names = names_of(nn.Sequential(nn.Linear(2, 2), Fails()), fails=True)
    assert names == ["model (Sequential)", "0 (Linear)", "1 (Fails)", "again", "Linear (Linear)"]


def test_tags_and_kinds():
    assert parse_tag("blocks.0.attention (SelfAttention)") == ("blocks.0.attention", "SelfAttention")
    assert parse_tag("aten::mm") is parse_tag("launch all-reduce 0#3 bucket (x)") is None
    names = ["SelfAttention", "RMSNorm", "LayerNorm", "FeedForward", "MoELayer", "Embedding", "Block", "Linear", "ReLU"]
    kinds = ["attention", "norm", "norm", "feed-forward", "moe", "embedding", "block", "linear", "other"]
    assert [kind_of(name) for name in names] == kinds


def test_autograds_own_thread_works_in_the_phase_of_the_thread_that_waits():
    events = [
        tagged("backward", 100, 100),
        tagged("synchronise", 105, 3),  # inside it, and over before what follows
        tagged("optimizer", 300, 50),
        slice_("aten::a", 90, 5, tid=9),
        slice_(f"{ENGINE}MmBackward0", 110, 40, tid=9),
        slice_("aten::b", 160, 5, tid=9),
        slice_("aten::c", 200, 5, tid=9),
        slice_("aten::d", 120, 5, tid=8),  # no thread of the engine
    ]
    placed = {each.span.name[-1]: each.phase for each in timeline(parse(chrome(*events))).nodes}
    assert {name: placed[name] for name in "abcd"} == {"a": "other", "b": "backward", "c": "other", "d": "other"}


NODE = f"{ENGINE}MmBackward0"


def lane(thread: object) -> tuple[int, object]:
    return 1, thread


def test_every_role():
    spans = [event(f"aten::op{i}", i, 1, lane(3)) for i in range(20)]
    spans += [tag("step 0", 0, 100, lane(9)), event(NODE, 1, 5, lane(12)), event(NODE, 1, 5, lane(13))]
    spans += [tag("gloo:all_reduce", 1, 5, lane(8)), event("aten::div_", 2, 1, lane(8))]
    spans += [tag("gloo:all_reduce", 1, 5, lane(10)), tag("gloo:recv", 1, 5, lane(9)), tag("gloo:send", 2, 5, lane(9))]
    spans += [event("gemm", 1, 5, (0, 7), "kernel")]
    found = roles(trace(*spans))
    assert list(found.items()) == [
        (lane(9), "main thread"),
        (lane(12), "autograd thread"),
        (lane(13), "autograd thread 1"),
        (lane(8), "communication thread 0"),
        (lane(10), "communication thread 1"),
        (lane("in flight 0"), "in flight 0"),
        (lane("in flight 1"), "in flight 1"),
        (lane(3), "other thread 0"),
    ]


def test_the_main_thread_has_our_annotations_or_the_process_number_or_the_most_spans():
    busy = [event("aten::mm", i, 1, lane(5)) for i in range(5)]
    assert roles(trace(*busy, event("aten::mm", 0, 1)))[MAIN] == "main thread", "its number is the process's"
    for name in ("forward", "ProfilerStep#3", "model (Net)"):
        assert roles(trace(*busy, event("aten::mm", 0, 1), tag(name, 0, 9, lane(4))))[lane(4)] == "main thread"
    assert roles(trace(*busy, event("aten::mm", 0, 1, lane(3))))[lane(5)] == "main thread"
    assert roles(trace(event("aten::mm", 0, 1, lane(3)), event("aten::mm", 0, 1, lane(2))))[lane(2)] == "main thread"


def test_backward_on_the_main_thread_and_nccl_on_any():
    spans = [tag("step 0", 0, 100), event(NODE, 1, 5), tag("nccl:all_reduce", 8, 2)]
    spans += [event(NODE, 1, 5, lane(2)), tag("nccl:all_reduce", 2, 1, lane(2)), tag("nccl:barrier", 0, 1, lane(3))]
    assert roles(trace(*spans)) == {MAIN: "main thread", lane(2): "autograd thread", lane(3): "other thread 0"}


def test_traces_without_threads():
    assert roles(trace()) == {}
    assert lane_number((1, "stream")) == 0
    found = roles(read_trace(trace_files(Path(__file__).resolve().parents[1] / "files" / "cuda_two_ranks")[0]))
    assert next(iter(found.values())) == "main thread"
