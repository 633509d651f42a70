"""Flame graphs: sums exact to the nanosecond, and the module of each backward."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.profiling.capture import Capture
from cs336_systems.profiling.flame import collapsed, flames
from cs336_systems.profiling.nesting import nest
from cs336_systems.profiling.trace import HOST, read_trace
from tests.support.flame_cases import (
    ENGINE,
    TWO_STEPS,
    frame,
    link,
    on_a_gpu,
    span,
    stacks,
    trace_of,
    two_steps,
)


def check_sums(trace, **options):
    """Every thread's self times sum to its roots, and all three forms say so."""
    roots = [sum(node.duration for node in nest(spans) if node.parent is None) for spans in trace.lanes(*HOST).values()]
    threads = flames(trace, **options)
    for thread in threads:
        assert thread.total in roots
        assert all(stack[-1].self_time >= 0 for stack in thread.stacks())
    assert sum(stacks(threads).values()) == sum(thread.total for thread in threads)


def test_the_stacks_of_two_steps():
    threads = flames(two_steps())
    assert collapsed(0, threads) == TWO_STEPS
    assert len(threads) == 2
    assert "rank 1 main thread;step;forward 4000\n" in collapsed(1, flames(two_steps(rank=1)))


def test_blocks_added_up():
    found = stacks(flames(two_steps(), collapse_blocks=True))
    assert found["main thread;step;forward;model (Net);blocks.* (Block)"] == 26000
    assert found["main thread;step;backward;model (Net);blocks.* (Block);up;AddmmBackward0;aten::mm"] == 30000
    assert found["main thread;step;synchronise;wait all-reduce bucket 0, from blocks.*.up"] == 16000


def test_modules_inside_a_sequential_have_classes():
    trace = trace_of(
        span("model (Sequential)", 0, 10),
        span("0 (Linear)", 0, 4),
        span("1 (Sequential)", 4, 9),
        span("1.0 (ReLU)", 5, 8),
    )
    ones = {"0 (Linear)": 4000, "1 (Sequential)": 2000, "1 (Sequential);0 (ReLU)": 3000}
    expected = {f"main thread;model (Sequential);{name}": time for name, time in ones.items()}
    assert stacks(flames(trace)) == expected | {"main thread;model (Sequential)": 1000}


def recomputing(t=0):
    """Backward of block 1 runs blocks 0 and 1 again, as a segment of two does; in between the engine runs itself."""
    return trace_of(
        span("forward", t, t + 20),
        span("model (Net)", t, t + 20),
        span("blocks.1 (Block)", t + 10, t + 19),
        span("blocks.1.up (Linear)", t + 11, t + 18),
        span("aten::addmm", t + 12, t + 17),
        span("backward", t + 20, t + 100),
        span(f"{ENGINE}AddmmBackward0", t + 20, t + 90),
        span("AddmmBackward0", t + 21, t + 89),
        span("blocks.0 (Block)", t + 30, t + 40),
        span("aten::relu", t + 31, t + 38),
        span("blocks.1 (Block)", t + 40, t + 60),
        span("blocks.1.up (Linear)", t + 42, t + 58),
        span(f"{ENGINE}ReluBackward0", t + 60, t + 70),
        span("ReluBackward0", t + 61, t + 69),
        link(1, t + 12, t + 21),
        link(2, t + 31, t + 61),
    )


def test_recompute_stands_below_the_backward_of_its_block():
    threads = flames(recomputing())
    net = "main thread;backward;model (Net)"
    assert {name: own for name, own in stacks(threads).items() if "backward" in name} == {
        "main thread;backward": 10000,
        f"{net};blocks.1 (Block);up;AddmmBackward0": 30000,
        f"{net};blocks.0 (Block);recompute": 3000,
        f"{net};blocks.0 (Block);recompute;aten::relu": 7000,
        f"{net};blocks.1 (Block);recompute": 4000,
        f"{net};blocks.1 (Block);recompute;up": 16000,
        f"{net};blocks.0 (Block);ReluBackward0": 10000,
    }
    check_sums(recomputing())
    block = threads[0].children["backward"].children["model (Net)"].children["blocks.0 (Block)"]
    assert block.paint == "backward"
    assert block.children["recompute"].children["aten::relu"].paint == "forward"


def test_operators_without_tags():
    trace = trace_of(span("aten::mm", 0, 5), span(f"{ENGINE}MmBackward0", 6, 9), span("MmBackward0", 7, 8))
    assert stacks(flames(trace)) == {"main thread;aten::mm": 5000, "main thread;MmBackward0": 3000}
    assert [each.paint for each in flames(trace)[0].children.values()] == ["other", "backward"]


def test_paints():
    step = flames(two_steps())[0].children["step"]
    assert [each.paint for each in step.children.values()] == ["forward", "backward", "communication", "optimizer"]
    accumulate = step.children["backward"].children["AccumulateGrad"]
    assert accumulate.paint == "backward"
    gloo = flames(two_steps())[1].children["gloo:all_reduce"]
    assert (gloo.paint, gloo.children["aten::div_"].paint) == ("communication", "communication")
    gather = trace_of(span("forward", 0, 9), span("launch all-gather 0#1 x", 1, 8), span("c10d::send", 2, 3))
    launch = flames(gather)[0].children["forward"].children["launch all-gather x"]
    assert (launch.paint, launch.children["c10d::send"].paint) == ("communication", "communication")
    foreign = flames(trace_of(span("forward", 0, 9), span("c10d::broadcast_", 1, 8)))[0].children["forward"]
    assert foreign.children["c10d::broadcast_"].paint == "communication"


def with_python():
    """Python frames: the launcher's, the user's, torch's, and one that crosses an annotation."""
    return trace_of(
        frame("run.py(3): <module>", 0, 100),
        frame("course/loop.py(9): train", 1, 99),
        span("step 0", 10, 90),
        frame("course/loop.py(12): loss", 11, 50),
        frame("torch/nn/modules/module.py(1): _call_impl", 12, 49),
        frame("nn.Module: Net_0", 13, 48),
        frame("torch/autograd/profiler.py(5): __enter__", 14, 20),
        span("model (Net)", 16, 40),
        frame("<built-in method add of Tensor object at 0x7f01>", 22, 30),
        span("aten::add", 23, 29),
        frame("contextlib.py(137): __exit__", 38, 46),
        frame("/repo/cs336_systems/profiling/module_spans.py(3): leave", 60, 70),
        frame("contextlib.py(104): __init__", 70, 75),
    )


def test_python_frames():
    loss = "main thread;step;course/loop.py(12): loss"
    assert stacks(flames(with_python())) == {
        "main thread": 20000,
        "main thread;step": 41000,
        loss: 15000,
        f"{loss};model (Net)": 18000,
        f"{loss};model (Net);aten::add": 6000,
    }


def test_without_tags_python_tells_the_modules():
    trace = trace_of(frame("nn.Module: Linear_0", 0, 10), span("aten::linear", 1, 9))
    assert stacks(flames(trace)) == {
        "main thread;nn.Module: Linear_0": 2000,
        "main thread;nn.Module: Linear_0;aten::linear": 8000,
    }


def test_the_autograd_thread_of_a_gpu():
    threads = flames(on_a_gpu())
    assert [thread.name for thread in threads] == ["main thread", "autograd thread", "other thread 0"]
    assert stacks(threads[1:2]) == {
        "autograd thread;model (Net);MmBackward0": 4000,
        "autograd thread;model (Net);MmBackward0;aten::mm": 2000,
        "autograd thread;model (Net);MmBackward0;aten::mm;aten::mm_out": 12000,
        "autograd thread;course::reduce": 4000,
    }
    check_sums(on_a_gpu())


def test_kernels_below_the_operator_that_launched_them():
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
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False).sum()


@pytest.mark.parametrize("stack", [False, True])
def test_a_captured_run(tmp_path, stack):
    model = Net()
    with Capture(tmp_path, model=model, warmup=1, steps=2, stack=stack) as capture:
        for _ in range(capture.total):
            with capture.step():
                with capture.phase("forward"):
                    loss = model(torch.ones(4, 8))
                with capture.phase("backward"):
                    loss.backward()
    trace = read_trace(tmp_path / "rank0.trace.json.gz")
    check_sums(trace)
    check_sums(trace, collapse_blocks=True)
    found = [re.sub(r"[^;]*\.py\([^;]*;", "", each) for each in stacks(flames(trace))]
    net = "main thread;step;backward;model (Net)"
    for block in range(2):
        assert any(each.startswith(f"{net};blocks.{block} (Block);up;AddmmBackward0;aten::mm") for each in found)
    assert any(each.startswith(f"{net};blocks.1 (Block);recompute;up;aten::linear") for each in found)
    assert not any(f"{net};blocks.0 (Block);recompute" in each or "evaluate_function" in each for each in found)
    assert not any("recompute" in each for each in found if ";forward;" in each)
    again = flames(read_trace(tmp_path / "rank0.trace.json.gz"))
    assert collapsed(0, again) == collapsed(0, flames(trace))
