"""Attribution of time to phases and modules, and of a node of backward to the module whose forward made it."""

from contextlib import suppress

import torch
from torch import nn
from torch.profiler import record_function

from cs336_systems.profiling.labels import module_names, tag_modules
from cs336_systems.profiling.names import ENGINE
from cs336_systems.profiling.timeline import roles, timeline
from tests.support.chrome_events import MAIN, event, tag, trace


def lane(thread: object) -> tuple[int, object]:
    return 1, thread


def link(number: int, source: float, target: float) -> list[dict]:
    both = {"id": number, "pid": 1, "tid": 1, "cat": "fwdbwd", "name": "fwdbwd"}
    return [both | {"ph": "s", "ts": source}, both | {"ph": "f", "ts": target}]


def test_by_hand():
    """A linear layer in a block, its backward with a hook's work inside, and an optimizer."""
    events = [
        tag("forward", 0, 100),
        tag("model (Net)", 10, 80),
        tag("blocks.0.up (Linear)", 20, 50),
        event("aten::linear", 30, 30),
        event("aten::matmul", 40, 12),  # what is linked to begins with it, and is inside it
        event("aten::addmm", 40, 10, **{"External id": 5}),
        tag("x (Trainer)", 190, 150),
        tag("backward", 200, 100),
        event("aten::ones_like", 202, 2),
        event(f"{ENGINE}AddmmBackward0", 210, 40),
        event("AddmmBackward0", 220, 20),
        event("aten::mm", 225, 10),
        event(f"{ENGINE}torch::autograd::AccumulateGrad", 260, 10),
        tag("optimizer", 400, 100),
        event("aten::add_", 410, 10),
        event("aten::zeros", 600, 10),
        event("gemm", 1000, 7, (1, 3), "kernel", **{"External id": 5}),
        *link(1, 40, 220),
    ]
    placed = {each.span.name: each for each in timeline(trace(*events)).nodes}
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
    # Of spans that begin together the inner one is linked.
    outer = [tag(name, 10, 50 - i) for i, name in enumerate(("forward", "model (Net)", "up (Linear)"))]
    inside = [event("aten::addmm", 10, 5), event(f"{ENGINE}AddmmBackward0", 210, 40)]
    node = event("AddmmBackward0", 220, 20)
    placed = {each.span.name: each for each in timeline(trace(*outer, *inside, node, *link(1, 10, 220))).nodes}
    assert placed["AddmmBackward0"].modules == (("model", "Net"), ("up", "Linear"))


class Wrapper(nn.Module):
    """Around another module; it may fail."""

    def __init__(self, module: nn.Module, fails: bool = False) -> None:
        super().__init__()
        self.module, self.fails = module, fails

    def forward(self, x):
        if self.fails:
            raise RuntimeError("inside")
        return self.module(x)


def test_names_of_modules():
    """A wrapper does not change them, what is no part of the model goes by its class, and exceptions close the tags."""
    x, seen = torch.ones(1, 2), list[str]()

    def annotate(name: str):
        seen.append(name)
        return record_function(name)

    def names(*calls, model: nn.Module | None = None) -> list[str]:
        seen.clear()
        with tag_modules(annotate, model):
            for call in calls:
                with suppress(RuntimeError):
                    call(x)
        before = len(seen)
        nn.Linear(2, 2)(x)
        assert len(seen) == before, "the hooks are gone"
        return seen[:]

    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    plain = ["model (Sequential)", "0 (Linear)", "1 (Sequential)", "1.0 (Linear)"]
    assert names(inner) == plain
    assert names(Wrapper(inner)) == ["wrapper (Wrapper)", *plain]
    assert module_names(Wrapper(inner))[inner[0]] == "0"
    other = ["MSELoss (MSELoss)", "Sequential (Sequential)", "Sequential.0 (Linear)"]
    assert (
        names(inner[1], lambda x: nn.MSELoss()(x, x), nn.Sequential(nn.Linear(2, 2)), model=inner) == plain[2:] + other
    )
    around = ["model (Sequential)", "0 (Linear)"]
    assert names(inner[1], inner) == [*around, *around, *plain[2:]], "around the first that was called"
    fails = nn.Sequential(nn.Linear(2, 2), Wrapper(inner, fails=True))
    again = [*around, "1 (Wrapper)", "Linear (Linear)"]
    assert names(fails, nn.Linear(2, 2)) == again, "no tag was left open"


def test_autograds_own_thread_works_in_the_phase_of_the_thread_that_waits():
    events = [
        tag("backward", 100, 100),
        tag("synchronise", 105, 3),  # inside it, and over before what follows
        tag("optimizer", 300, 50),
        event("aten::a", 90, 5, lane(9)),
        event(f"{ENGINE}MmBackward0", 110, 40, lane(9)),
        event("aten::b", 160, 5, lane(9)),
        event("aten::c", 200, 5, lane(9)),
        event("aten::d", 120, 5, lane(8)),  # no thread of the engine
    ]
    placed = {each.span.name[-1]: each.phase for each in timeline(trace(*events)).nodes}
    assert {name: placed[name] for name in "abcd"} == {"a": "other", "b": "backward", "c": "other", "d": "other"}


NODE = f"{ENGINE}MmBackward0"


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
    spans = [tag("step 0", 0, 100), event(NODE, 1, 5), tag("nccl:all_reduce", 8, 2)]  # backward on the main thread
    spans += [event(NODE, 1, 5, lane(2)), tag("nccl:all_reduce", 2, 1, lane(2)), tag("nccl:barrier", 0, 1, lane(3))]
    assert roles(trace(*spans)) == {MAIN: "main thread", lane(2): "autograd thread", lane(3): "other thread 0"}
    assert roles(trace()) == {}


def test_the_main_thread_has_our_annotations_or_the_process_number_or_the_most_spans():
    busy, one = [event("aten::mm", i, 1, lane(5)) for i in range(5)], event("aten::mm", 0, 1, lane(3))
    rows = [(1, [*busy, event("aten::mm", 0, 1)]), (5, [*busy, one]), (2, [one, event("aten::mm", 0, 1, lane(2))])]
    rows += [(4, [*busy, one, tag(name, 0, 9, lane(4))]) for name in ("forward", "ProfilerStep#3", "model (Net)")]
    for thread, events in rows:
        assert roles(trace(*events))[lane(thread)] == "main thread"
