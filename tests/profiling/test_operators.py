"""Operator tables: exact times of traces made by hand, and torch's own figures for a real one."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cs336_systems.cost.flops import backward_flops, forward_flops
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import model_preset
from cs336_systems.profiling.breakdown import attention_rows
from cs336_systems.profiling.capture import quiet_profiler
from cs336_systems.profiling.labels import tag_modules
from cs336_systems.profiling.names import ENGINE, PHASES, parse_tag
from cs336_systems.profiling.operators import (
    OUTSIDE,
    collective_rows,
    kernel_rows,
    op_rows,
    operator_flops,
    softmax_flops,
)
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import read_trace
from tests.support.chrome_events import GLOO, STREAM, event, product, tag, trace


def rows(*events, **choices):
    return {row.name: row for row in op_rows(trace(*events), **choices)}


STEP = (
    tag("step 0", 0, 100),
    tag("forward", 5, 60),
    event("aten::div_", 10, 40),
    event("aten::div_", 15, 20),
    event("aten::copy_", 20, 5),
    event("aten::div_", 55, 4),
    tag("optimizer", 70, 20),
    event("aten::mul", 72, 10),
)


def test_an_operator_that_calls_itself_among_others_is_called_twice():
    found = rows(event("aten::to", 0, 10), event("aten::empty", 1, 2), event("aten::to", 4, 5))
    assert (found["aten::to"].calls, found["aten::to"].cpu_total, found["aten::to"].cpu_self) == (2, 10_000, 8_000)
    found = rows(event("c10d::allreduce_", 0, 10), tag("nccl:all_reduce", 2, 6))  # on the main thread
    assert (found["nccl:all_reduce"].cpu_total, found["c10d::allreduce_"].cpu_self) == (6_000, 4_000)


def test_shares_of_one_phase_are_of_that_phase_and_rows_in_order():
    found = rows(*STEP, phase="forward")
    assert "aten::mul" not in found
    assert found["aten::div_"].cpu_self_share == pytest.approx(39 / 60)
    assert found[OUTSIDE].cpu_self == 16_000
    events = trace(event("a", 0, 10), event("b", 1, 9), event("c", 20, 8))
    assert [row.name for row in op_rows(events)] == ["a", "b", "c"]
    assert [row.name for row in op_rows(events, by="self", limit=2)] == ["b", "c"]


def test_communication_threads_are_listed_apart():
    events = (
        event("aten::mm", 0, 60),
        tag("gloo:all_reduce", 10, 80, GLOO),
        event("aten::div_", 82, 8, GLOO),
        event("aten::div_", 85, 5, GLOO),
        tag("gloo:all_reduce", 20, 30, (1, 3)),
        tag("gloo:send", 5, 100),
        tag("gloo:send", 6, 3),
    )
    (only,) = rows(*events).values()
    assert (only.name, only.cpu_self_share) == ("aten::mm", 1.0)
    found = [(row.name, row.where, row.calls, row.total) for row in collective_rows(trace(*events))]
    assert found == [
        ("gloo:send", "in flight", 2, 103_000),
        ("gloo:all_reduce", "communication thread 0", 1, 80_000),
        ("gloo:all_reduce", "communication thread 1", 1, 30_000),
        ("aten::div_", "communication thread 0", 2, 8_000),
    ]


GPU = (
    tag("forward", 0, 50),
    event("aten::linear", 1, 30, **{"External id": 1}),
    product("aten::mm", 5, 20, [64, 32], [32, 16], **{"External id": 2}),
    event("cudaLaunchKernel", 10, 4, cat="cuda_runtime", **{"External id": 2, "correlation": 9}),
    event("aten::copy_", 35, 10, **{"External id": 3}),
    event("sm90_gemm", 12, 30, STREAM, "kernel", **{"External id": 2, "correlation": 9}),
    event("sm90_gemm", 42, 10, STREAM, "kernel", **{"External id": 2, "correlation": 10}),
    event("Memcpy HtoD", 60, 8, STREAM, "gpu_memcpy", **{"External id": 3}),
    event("of nobody", 70, 2, STREAM, "kernel"),
    event("forward", 12, 40, STREAM, "gpu_user_annotation"),
)


def test_device_time_belongs_to_the_operator_that_launched():
    found = rows(*GPU)
    mm, linear, launch = found["aten::mm"], found["aten::linear"], found["cudaLaunchKernel"]
    assert (mm.device_self, mm.device_total, mm.calls) == (40_000, 40_000, 1)
    assert (linear.device_self, linear.device_total) == (0, 40_000)
    assert (launch.device_self, launch.device_total, launch.cpu_self) == (0, 0, 4_000)
    assert (mm.cpu_self, mm.cpu_total) == (16_000, 20_000)
    assert mm.device_self_share == pytest.approx(40 / 50)
    assert found["no operator: of nobody"].device_self == 2_000
    assert mm.flops == 2 * 64 * 32 * 16
    assert mm.flops_per_second == pytest.approx(mm.flops / 40e-6)
    ordered = [row.name for row in op_rows(trace(*GPU), sort="device", limit=3)]
    assert ordered == ["aten::linear", "aten::mm", "aten::copy_"]
    kernels = [(row.name, row.calls, row.total, row.share) for row in kernel_rows(trace(*GPU))]
    assert kernels == [("sm90_gemm", 2, 40_000, 0.8), ("Memcpy HtoD", 1, 8_000, 0.16), ("of nobody", 1, 2_000, 0.04)]


Q, KV = [2, 4, 8, 16], [2, 4, 32, 16]


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::addmm", [[7], [3, 5], [5, 7], []], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::_scaled_dot_product_flash_attention", [Q, KV, KV, []], 2 * 2 * (2 * 4 * 8 * 32 * 16)),
        ("aten::_scaled_dot_product_efficient_attention", [Q, KV, [2, 4, 32, 24]], 2 * (2 * 4 * 8 * 32) * 40),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [Q, Q, KV, KV], 5 * 2 * (2 * 4 * 8 * 32 * 16)),
        ("cs336_kernels::flash_attention_backward", [Q, Q, KV, KV, Q], 5 * 2 * (2 * 4 * 8 * 32 * 16)),
        ("aten::_scaled_dot_product_attention_math", [Q, KV, KV], None),
        ("aten::linear", [[3, 5], [7, 5]], None),
        ("aten::matmul", [[3, 5], [5, 7]], None),
        ("aten::mm", [], None),
        ("aten::mm", [[[3, 5], [5, 7]]], None),
        ("aten::bmm", "cut short", None),
        ("aten::_softmax", [[2, 3, 5], [], []], 5 * 30),
        ("aten::_softmax_backward_data", [[2, 3], [2, 3], []], 4 * 6),
        ("aten::softmax", [[2, 3, 5]], None),
    ],
)
def test_flops(name, shapes, flops):
    count = softmax_flops if "softmax" in name else operator_flops
    assert count(name, {"Input Dims": shapes}) == flops
    assert count(name, {}) is None


def test_flops_of_a_product_inside_another_count_once():
    fused = product("aten::_scaled_dot_product_flash_attention_for_cpu", 0, 10, Q, KV, KV)
    found = rows(fused, product("aten::bmm", 2, 5, [8, 8, 16], [8, 16, 32]))
    assert found["aten::bmm"].flops is None
    assert found[fused["name"]].flops == 2 * 2 * (2 * 4 * 8 * 32 * 16)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(torch's own averages, the trace) of a step of a small model."""
    torch.manual_seed(0)
    config = model_preset("tiny").override(attention="naive", num_layers=2)
    model, tokens = TransformerLM(config), torch.randint(256, (2, 17))
    lm_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
    with quiet_profiler(), tag_modules(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        with torch.profiler.record_function("forward"):
            loss = lm_loss(model, tokens[:, :-1], tokens[:, 1:])
        with torch.profiler.record_function("backward"):
            loss.backward()
    path = tmp_path_factory.mktemp("real") / "rank0.trace.json.gz"
    with quiet_profiler():
        profiler.export_chrome_trace(str(path))
    return profiler.key_averages(), read_trace(path), config


def test_calls_and_times_are_torchs_own(real):
    averages, found, _ = real
    ours = {row.name: row for row in op_rows(found)}
    averages = [each for each in averages if each.key not in PHASES and not parse_tag(each.key)]
    assert {each.key for each in averages} == set(ours) - {OUTSIDE}
    for each in averages:
        row = ours[each.key]
        assert row.calls == each.count
        assert row.cpu_self == pytest.approx(1000 * each.self_cpu_time_total, abs=20 * each.count), each.key


def test_flops_of_a_real_step_are_those_of_the_closed_form(real):
    _, found, config = real
    rows, parts = op_rows(found), forward_flops(config, 2, 16)
    assert sum(row.flops or 0 for row in rows) == sum(parts.values()) + backward_flops(config, 2, 16)
    attention = {row.name: row for row in attention_rows(found)}
    assert attention["projections"].forward_flops == parts["projections"]
    assert attention["scores q k^T"].forward_flops == attention["weights times v"].forward_flops == parts["scores"] // 2
    assert attention["both products"].backward_flops == 2 * parts["scores"]
    assert attention["softmax of attention"].forward_flops == 5 * 2 * config.num_heads * 2 * 16 * 16
    engine = [node for node in timeline(found).nodes if node.span.name.startswith(ENGINE)]
    assert all(node.modules for node in engine if "AccumulateGrad" not in node.span.name), (
        "of the modules that made them"
    )
    backward = [node for node in timeline(found).busy if node.direction == "backward"]
    products = Counter(node.modules[-1][0] for node in backward if node.span.name == "aten::mm")
    linears = [f"blocks.{i}.{part}" for i in range(2) for part in ("attention.query", "feed_forward.down")]
    assert [products[name] for name in linears] == [2] * 4  # the gradients of its weight and of its input


def test_waiting_for_autograd_is_no_time_of_the_main_thread():
    """A step of a GPU: the main thread waits in `backward` for 180 of 200 microseconds while autograd's works."""
    engine, node = (1, 9), "autograd::engine::evaluate_function: MmBackward0"
    blocked = [
        tag("step 0", 0, 400),
        tag("forward", 10, 40),
        event("aten::mm", 15, 20),
        tag("backward", 60, 200),
        event("aten::ones_like", 62, 4),
        event(node, 70, 100, engine),
        event("aten::mm", 80, 60, engine),
        event(node, 175, 80, engine),
        event("aten::copy_", 256, 2, engine),  # a callback, in no node
        tag("optimizer", 300, 60),
        event("aten::add_", 310, 30),
    ]
    found = rows(*blocked)
    assert found[OUTSIDE].cpu_self == 400_000 - 20_000 - 4_000 - 30_000 - 182_000
    assert found["aten::mm"].cpu_self == 80_000
    assert sum(row.cpu_self for row in found.values()) == 400_000
    busy = {node.span.name: node.busy for node in timeline(trace(*blocked)).busy}
    assert (busy["backward"], busy["step 0"]) == (200_000 - 4_000 - 182_000, 100_000)
    assert rows(*blocked, phase="backward")["aten::copy_"].cpu_self == 2_000
    beside = rows(*blocked, event("aten::item", 180, 10))
    assert (beside["aten::item"].cpu_self, beside[OUTSIDE].cpu_self) == (10_000, found[OUTSIDE].cpu_self)
