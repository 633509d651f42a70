"""Flame graphs: sums exact to the nanosecond, and the module of each backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.profiling.capture import Capture
from cs336_systems.profiling.flame import flames
from cs336_systems.profiling.nesting import nest
from cs336_systems.profiling.trace import HOST, read_trace
from tests.support.flame_cases import ENGINE, link, on_a_gpu, span, stacks, trace_of, two_steps

NET = "main thread;step;{};model (Net)"
BLOCK = f"{NET};blocks.* (Block)"
TWO_STEPS = {
    "main thread;step": 4000,
    "main thread;step;forward": 4000,
    NET.format("forward"): 4000,
    BLOCK.format("forward"): 26000,
    f"{BLOCK.format('forward')};up": 6000,
    f"{BLOCK.format('forward')};up;aten::linear": 4000,
    f"{BLOCK.format('forward')};up;aten::linear;aten::addmm": 20000,
    f"{BLOCK.format('forward')};aten::relu": 16000,
    "main thread;step;backward": 12000,
    f"{BLOCK.format('backward')};ReluBackward0": 8000,
    f"{BLOCK.format('backward')};ReluBackward0;aten::threshold_backward": 10000,
    f"{BLOCK.format('backward')};up;AddmmBackward0": 10000,
    f"{BLOCK.format('backward')};up;AddmmBackward0;aten::mm": 30000,
    "main thread;step;backward;AccumulateGrad": 10000,
    "main thread;step;synchronise": 4000,
    "main thread;step;synchronise;wait all-reduce bucket 0, from blocks.*.up": 16000,
    "main thread;step;optimizer": 8000,
    "main thread;step;optimizer;aten::add_": 8000,
    "communication thread 0;gloo:all_reduce": 46000,
    "communication thread 0;gloo:all_reduce;aten::div_": 10000,
}


def check_sums(trace):
    """Every thread's self times sum to its roots."""
    roots = [sum(node.duration for node in nest(spans) if node.parent is None) for spans in trace.lanes(*HOST).values()]
    threads = flames(trace)
    for thread in threads:
        assert thread.total in roots
        assert all(stack[-1].self_time >= 0 for stack in thread.stacks())
    assert sum(stacks(threads).values()) == sum(thread.total for thread in threads)


def test_the_stacks_of_two_steps_and_their_paints():
    main, gloo = flames(two_steps())
    assert stacks([main, gloo]) == TWO_STEPS
    check_sums(two_steps())
    step = main.children["step"]
    assert [each.paint for each in step.children.values()] == ["forward", "backward", "communication", "optimizer"]
    assert step.children["backward"].children["AccumulateGrad"].paint == "backward"
    reduced = gloo.children["gloo:all_reduce"]
    assert (reduced.paint, reduced.children["aten::div_"].paint) == ("communication", "communication")


def test_modules_inside_a_sequential_have_classes():
    trace = trace_of(
        span("model (Sequential)", 0, 10),
        span("0 (Linear)", 0, 4),
        span("1 (Sequential)", 4, 9),
        span("1.0 (ReLU)", 5, 8),
    )
    ones = {"0 (Linear)": 4000, "1 (Sequential)": 2000, "1 (Sequential);* (ReLU)": 3000}
    expected = {f"main thread;model (Sequential);{name}": time for name, time in ones.items()}
    assert stacks(flames(trace)) == expected | {"main thread;model (Sequential)": 1000}


def test_recompute_stands_below_the_backward_of_its_block():
    """Backward of the last block runs both again, as a segment of two does; in between the engine runs itself."""
    trace = trace_of(
        span("forward", 0, 20),
        span("model (Net)", 0, 20),
        span("last (Block)", 10, 19),
        span("last.up (Linear)", 11, 18),
        span("aten::addmm", 12, 17),
        span("backward", 20, 100),
        span(f"{ENGINE}AddmmBackward0", 20, 90),
        span("AddmmBackward0", 21, 89),
        span("first (Block)", 30, 40),
        span("aten::relu", 31, 38),
        span("last (Block)", 40, 60),
        span("last.up (Linear)", 42, 58),
        span(f"{ENGINE}ReluBackward0", 60, 70),
        span("ReluBackward0", 61, 69),
        link(1, 12, 21),
        link(2, 31, 61),
    )
    threads, net = flames(trace), "main thread;backward;model (Net)"
    assert {name: own for name, own in stacks(threads).items() if "backward" in name} == {
        "main thread;backward": 10000,
        f"{net};last;up;AddmmBackward0": 30000,
        f"{net};first;recompute": 3000,
        f"{net};first;recompute;aten::relu": 7000,
        f"{net};last;recompute": 4000,
        f"{net};last;recompute;up": 16000,
        f"{net};first;ReluBackward0": 10000,
    }
    check_sums(trace)
    block = threads[0].children["backward"].children["model (Net)"].children["first"]
    assert block.paint == "backward"
    assert block.children["recompute"].children["aten::relu"].paint == "forward"


def test_spans_without_modules_and_collectives_without_phases():
    trace = trace_of(span("aten::mm", 0, 5), span(f"{ENGINE}MmBackward0", 6, 9), span("MmBackward0", 7, 8))
    assert stacks(flames(trace)) == {"main thread;aten::mm": 5000, "main thread;MmBackward0": 3000}
    assert [each.paint for each in flames(trace)[0].children.values()] == ["other", "backward"]
    gather = trace_of(span("forward", 0, 9), span("launch all-gather 0#1 x", 1, 8), span("c10d::send", 2, 3))
    launch = flames(gather)[0].children["forward"].children["launch all-gather x"]
    assert (launch.paint, launch.children["c10d::send"].paint) == ("communication", "communication")
    foreign = flames(trace_of(span("forward", 0, 9), span("c10d::broadcast_", 1, 8)))[0].children["forward"]
    assert foreign.children["c10d::broadcast_"].paint == "communication"


def test_the_autograd_thread_of_a_gpu_and_kernels_below_the_operator_that_launched_them():
    threads = flames(on_a_gpu())
    assert [thread.name for thread in threads] == ["main thread", "autograd thread", "other thread 0"]
    assert stacks(threads[1:2]) == {
        "autograd thread;model (Net);MmBackward0": 4000,
        "autograd thread;model (Net);MmBackward0;aten::mm": 2000,
        "autograd thread;model (Net);MmBackward0;aten::mm;aten::mm_out": 12000,
        "autograd thread;course::reduce": 4000,
    }
    check_sums(on_a_gpu())
    threads = flames(on_a_gpu(), "device")
    assert stacks(threads) == {
        "main thread;step;forward;model (Net);aten::mm;gemm": 20000,
        "autograd thread;model (Net);MmBackward0;aten::mm;gemm_grad": 40000,
        "autograd thread;course::reduce;ncclDevKernel_AllReduce": 35000,
        "kernels of no known operator;lost": 1000,
    }
    assert len(threads) == 3, "a thread without kernels is left out"
    reduce = threads[1].children["course::reduce"]
    assert (reduce.paint, reduce.children["ncclDevKernel_AllReduce"].paint) == ("backward", "communication")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x):
        return checkpoint(self.last, self.first(x), use_reentrant=False).sum()


def test_a_captured_run(tmp_path):
    model = Net()
    with Capture(tmp_path, model=model, warmup=1, steps=2) as capture:
        for _ in range(capture.total):
            with capture.step():
                with capture.phase("forward"):
                    loss = model(torch.ones(4, 8))
                with capture.phase("backward"):
                    loss.backward()
    trace = read_trace(tmp_path / "rank0.trace.json.gz")
    check_sums(trace)
    found, net = stacks(flames(trace)), NET.format("backward")
    for block in ("first", "last"):
        assert f"{net};{block};up;AddmmBackward0;aten::mm" in found
    assert any(each.startswith(f"{net};last;recompute;up;aten::linear") for each in found)
    assert not any(f"{net};first;recompute" in each or "evaluate_function" in each for each in found)
    assert not any("recompute" in each for each in found if ";forward;" in each)
