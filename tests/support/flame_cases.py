"""Traces made by hand for flame graphs, in microseconds, and their stacks."""

from tests.support.chrome_events import event, trace

ENGINE = "autograd::engine::evaluate_function: "


def span(name, start, end, thread=1, category=None, **args):
    """A span in microseconds, an operator unless its name or `category` says otherwise."""
    operator = "::" in name or name.endswith("Backward0")
    return event(
        name, start, end - start, (7, thread), category or ("cpu_op" if operator else "user_annotation"), **args
    )


def link(number, source, target, to_thread=1):
    common = {"cat": "fwdbwd", "id": number, "pid": 7, "name": "fwdbwd"}
    return [{"ph": "s", "ts": source, "tid": 1} | common, {"ph": "f", "ts": target, "tid": to_thread} | common]


def trace_of(*events):
    return trace(*events, rank=0, world_size=2)


def a_step(number, t):
    """One step of 100 microseconds that starts at t."""
    return [
        span(f"step {number}", t, t + 100),
        span("forward", t, t + 40),
        span("model (Net)", t + 1, t + 39),
        span("blocks.0 (Block)", t + 2, t + 20),
        span("blocks.0.up (Linear)", t + 3, t + 18),
        span("aten::linear", t + 4, t + 16),
        span("aten::addmm", t + 5, t + 15),
        span("blocks.1 (Block)", t + 20, t + 38),
        span("aten::relu", t + 22, t + 30),
        span("backward", t + 40, t + 80),
        span(f"{ENGINE}ReluBackward0", t + 41, t + 50),
        span("ReluBackward0", t + 42, t + 49),
        span("aten::threshold_backward", t + 43, t + 48),
        span(f"{ENGINE}AddmmBackward0", t + 50, t + 70),
        span("AddmmBackward0", t + 51, t + 69),
        span("aten::mm", t + 53, t + 60),
        span("aten::mm", t + 60, t + 68),
        span(f"{ENGINE}torch::autograd::AccumulateGrad", t + 70, t + 75),
        span("torch::autograd::AccumulateGrad", t + 71, t + 74),
        span("synchronise", t + 80, t + 90),
        span(f"wait all-reduce 0#{number + 4} bucket 0, from blocks.1.up", t + 81, t + 89),
        span("optimizer", t + 90, t + 98),
        span("aten::add_", t + 91, t + 95),
        span("gloo:all_reduce", t + 60, t + 88, thread=2),
        span("aten::div_", t + 80, t + 85, thread=2),
        span("gloo:send", t + 10, t + 50),
        *link(2 * number, t + 22, t + 42),
        *link(2 * number + 1, t + 5, t + 51),
    ]


def two_steps():
    return trace_of(a_step(0, 0), a_step(1, 100))


def on_a_gpu():
    """The autograd engine has a thread of its own; kernels bear the number of the operator that launched them."""
    kernels = [
        ("gemm", 5, 25, 11),
        ("gemm_grad", 30, 70, 12),
        ("ncclDevKernel_AllReduce", 40, 75, 13),
        ("lost", 80, 81, 99),
    ]
    return trace_of(
        span("step 0", 0, 50),
        span("forward", 0, 20),
        span("model (Net)", 1, 19),
        span("aten::mm", 2, 10, **{"External id": 11}),
        span("cudaLaunchKernel", 3, 4, category="cuda_runtime", **{"External id": 11}),
        span("backward", 20, 48),
        *[span(f"aten::noise{i}", 100 + i, 101 + i, thread=4) for i in range(20)],
        span(f"{ENGINE}MmBackward0", 22, 40, thread=3),
        span("MmBackward0", 23, 39, thread=3),
        span("aten::mm", 24, 38, thread=3, **{"External id": 12}),
        span("aten::mm_out", 25, 37, thread=3, **{"External id": 12}),  # claims the same kernel
        span("course::reduce", 41, 45, thread=3, **{"External id": 13}),
        *[span(n, s, e, 9, "kernel", **{"External id": i}) for n, s, e, i in kernels],
        link(1, 2, 23, to_thread=3),
    )


def stacks(threads):
    """{stack: nanoseconds itself}."""
    found = (stack for root in threads for stack in root.stacks() if stack[-1].self_time)
    return {";".join(frame.name for frame in stack): stack[-1].self_time for stack in found}
