"""The benchmark of the fused kernels: what it counts, gates, measures, leaves out and records."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch

from benchmarks import fused
from benchmarks.fused import KERNELS, gpt2_shapes
from benchmarks.harness import WrongResultError
from benchmarks.lib import kernel_run, row_kernels
from benchmarks.lib.kernel import SizedTask, always
from cs336_systems.cost import Hardware
from cs336_systems.host.console import run_command
from kernels import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAST = ("--device", "cpu", "--rounds", "4", "--results", "out")
BOTH = "forward-backward"
GATED = {"cross-entropy": (64, 32, 500), "swiglu": (100, 32), "add-rmsnorm": (100, 32), "adamw": (1, 16, 64)}
TINY = {name: SizedTask(name, GATED[name], kernel.dtypes[-1], kernel.whats[-1]) for name, kernel in KERNELS.items()}


@pytest.fixture(autouse=True)
def small_and_known(monkeypatch):
    """Shapes that take no time, and ceilings that need not be measured and are out of reach."""
    monkeypatch.setattr(kernel_run, "measure_once", lambda *_: Hardware("fast", 1e15, 1e14, "made up"))
    for kernel in KERNELS.values():
        monkeypatch.setattr(type(kernel), "cpu_sizes", (kernel.tiny,))


def lines(folder):
    return [json.loads(line) for line in (folder / "out/fused.jsonl").read_text().splitlines()]


def pick(*names):
    return [word for name in names for word in ("--candidate", name)]


def moved(name, sizes, dtype, what):
    return KERNELS[name].moved(SizedTask(name, sizes, dtype, what), CPU)


def test_bytes_and_flops_are_those_of_the_hand_count():
    assert moved("swiglu", (8192, 11008), "bf16", "forward") == 3 * 8192 * 11008 * 2
    assert moved("swiglu", (8192, 11008), "bf16", BOTH) == (3 + 5) * 8192 * 11008 * 2
    forward = 4 * 8192 * 4096 * 2 + 4096 * 2 + 4 * 8192  # x, residual, sum, y; the weight; 1 / rms
    assert moved("add-rmsnorm", (8192, 4096), "bf16", "forward") == forward
    assert moved("add-rmsnorm", (8192, 4096), "bf16", BOTH) == 2 * forward + 4096 * 2
    assert len(gpt2_shapes((12, 768, 50_257))) == 148
    assert moved("adamw", (12, 768, 50_257), "fp32", "step") == 28 * 124_439_808
    sizes = (4096, 4096, 128_256)
    forward, both = (SizedTask("cross-entropy", sizes, "bf16", what) for what in ("forward", BOTH))
    assert KERNELS["cross-entropy"].flops(forward, "forward") == 2 * 4096 * 4096 * 128_256
    assert KERNELS["cross-entropy"].flops(both, BOTH) == 6 * 4096 * 4096 * 128_256
    assert moved("cross-entropy", sizes, "bf16", BOTH) == 2 * 4096 * 128_256 * 2


def test_peak_memory_of_the_loss_is_that_of_the_hand_count():
    task = SizedTask("cross-entropy", (8192, 4096, 128_256), "bf16", BOTH)
    hidden, weight, logits = 8192 * 4096 * 2, 128_256 * 4096 * 2, 8192 * 128_256 * 2
    kept = 2 * (hidden + weight) + 8 * 8192
    assert KERNELS["cross-entropy"].peak_bytes("torch", task) == kept + 3 * logits
    # The weight's gradient in float32, and in bf16 with that of hidden once more: both outweigh 4096 tokens' logits.
    assert KERNELS["cross-entropy"].peak_bytes("ours", task) == kept + 2 * weight + hidden
    assert KERNELS["cross-entropy"].peak_bytes("liger", task) == kept + 256 * 128_256 * 2


def test_peak_memory_of_rows_is_that_of_the_hand_count():
    def matrices(kernel, name, what):
        return KERNELS[kernel].peak_bytes(name, SizedTask(kernel, (8, 16), "bf16", what)) / (8 * 16 * 2)

    assert matrices("swiglu", "ours", "forward") == 3  # gate, up, y
    assert matrices("swiglu", "torch", "forward") == 4  # and silu(gate)
    assert matrices("swiglu", "ours", BOTH) == 6  # and dy, dgate, dup
    assert matrices("swiglu", "torch", BOTH) == 7  # and silu(gate), then its gradient
    assert matrices("swiglu", "liger", BOTH) == 8  # and inputs of its own to write over
    assert matrices("add-rmsnorm", "ours", BOTH) == 7  # x, residual, sum, y, both upstream gradients, one gradient


def test_the_shapes_that_matter_most_come_first():
    tasks = fused.FusedSettings().tasks(CUDA)
    assert [task.kernel for task in tasks[:7]] == [
        *["cross-entropy"] * 2,
        *["swiglu"] * 2,
        *["add-rmsnorm"] * 2,
        "adamw",
    ]
    assert len(tasks) == 2 * (3 + 2 + 2) + 1
    assert SizedTask("cross-entropy", (16384, 1600, 50_257), "bf16", BOTH) in tasks
    assert {task.kernel for task in fused.FusedSettings(kernel=("adamw",)).tasks(CUDA)} == {"adamw"}
    assert not fused.FusedSettings(kernel=("adamw",), dtype="bf16").tasks(CUDA)


def test_a_run_records_every_candidate_beside_its_floor(in_tmp, capsys):
    assert run_command(fused.main, [*FAST, *pick("torch", "torch-fused", "eager", "liger")]) == 0
    found = {(r["config"]["kernel"], r["config"]["pass"], r["config"]["candidate"]): r for r in lines(in_tmp)}
    assert len(found) == 2 * (2 + 2 + 2) + 3 + 4
    for (name, what, candidate), record in found.items():
        kernel, config = KERNELS[name], record["config"]
        assert tuple(config[size] for size in kernel.sizes_are) == kernel.tiny
        if candidate == "liger":
            assert record["flags"] == ["Liger-Kernel is not installed"]
            continue
        task, metrics, predicted = (
            SizedTask(name, kernel.tiny, config["dtype"], what),
            record["metrics"],
            record["predicted"],
        )
        assert len(record["samples_ms"]) == 4
        assert metrics.get("flops", 0) == kernel.flops(task, what)
        work, size = metrics.get("flops", 0), metrics.get("bytes", 0)
        assert size == 0 or metrics["bytes_per_s"] == pytest.approx(1e3 * size / metrics["median_ms"])
        assert predicted["median_ms"] == pytest.approx(1e3 * (work / 1e15 + size / 1e14))
        if candidate == kernel.floor:
            assert size == (0 if work else kernel.moved(task, CPU))
            continue
        assert metrics["bytes"] == kernel.moved(task, CPU)
        assert predicted["peak_memory_bytes"] == kernel.peak_bytes(candidate, task)
        floor = found[name, what, kernel.floor]["samples_ms"]
        pairs = [a / b for a, b in zip(record["samples_ms"], floor, strict=True)]
        assert metrics["floor_ratio_median"] == pytest.approx(statistics.median(pairs))
        assert metrics["floor"] == {"cross-entropy": "matmuls"}.get(name, "copy")
        assert metrics["gate_error"] < 0.01
    assert found["adamw", "step", "eager"]["metrics"]["best_other"] == "torch-fused"
    shown = capsys.readouterr().out
    assert "cross-entropy 8 x 16 x 100 bf16" in shown
    assert "of floor" in shown


def gate(name, function):
    task = TINY[name]
    return KERNELS[name].gate("it", function, task, KERNELS[name].inputs(task, CPU))


def detached(result, *leaves):
    """The same result with no gradient for the last of the leaves."""
    return result(*leaves[:-1], leaves[-1].detach() + 0 * leaves[-1])


def test_the_gates_see_every_result_and_gradient():
    norm, loss = row_kernels.reference_add_rmsnorm, fused.torch_loss
    assert gate("swiglu", reference.swiglu) < 1e-6
    assert gate("add-rmsnorm", norm) < 1e-6
    assert gate("cross-entropy", loss) < 1e-6
    with pytest.raises(WrongResultError, match="it's gradient of up is off"):
        gate("swiglu", lambda *leaves: detached(reference.swiglu, *leaves))
    with pytest.raises(WrongResultError, match="it's gradient of weight is off"):
        gate("add-rmsnorm", lambda *leaves: detached(norm, *leaves))
    with pytest.raises(WrongResultError, match="it's sum is off"):
        gate("add-rmsnorm", lambda x, residual, weight: (norm(x, residual, weight)[0], x))
    with pytest.raises(WrongResultError, match="it's y is off"):
        gate("swiglu", lambda x, up: torch.cat((reference.swiglu(x[:-1], up[:-1]), up[-1:])))
    with pytest.raises(WrongResultError, match="it's loss is off"):
        gate("cross-entropy", lambda hidden, weight, targets: loss(hidden, weight, targets.clamp(min=0)))
    with pytest.raises(WrongResultError, match="it's gradient of hidden is off"):
        gate(
            "cross-entropy", lambda hidden, weight, targets: detached(lambda w, h: loss(h, w, targets), weight, hidden)
        )
    with pytest.raises(WrongResultError, match="it's gradient of weight is off"):
        gate("cross-entropy", lambda hidden, *rest: detached(lambda t, w: loss(hidden, w, t), rest[1], rest[0]))


@pytest.mark.parametrize("change", [{"betas": (0.9, 0.96)}, {"weight_decay": 0.0}, {"lr": 1.001e-3}, {"eps": 1e-4}])
def test_the_gate_of_adamw_sees_every_setting(change):
    options = fused.AdamWStep.options
    assert gate("adamw", lambda params: torch.optim.AdamW(params, **options)) < 5e-6
    with pytest.raises(WrongResultError, match="it's parameter 0 is off"):
        gate("adamw", lambda params: torch.optim.AdamW(params, **options | change))


def test_the_gate_of_adamw_sees_a_tensor_that_was_left_out():
    options = fused.AdamWStep.options
    with pytest.raises(WrongResultError, match="it's parameter 15 is off"):
        gate("adamw", lambda params: torch.optim.AdamW(params[:-1], **options))


class Overwriting(torch.autograd.Function):
    """SwiGLU whose backward writes over its inputs, as Liger-Kernel's does."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.kept = gate.detach(), up.detach()
        return reference.swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad):
        grads = reference.swiglu_backward(grad, *ctx.kept)
        return tuple(kept.copy_(each) for kept, each in zip(ctx.kept, grads, strict=True))


def test_a_candidate_that_writes_over_its_inputs_spoils_them_for_no_other(in_tmp, monkeypatch):
    both = {"liger": always(Overwriting.apply), "torch": always(reference.swiglu)}
    monkeypatch.setattr(type(KERNELS["swiglu"]), "candidates", both)
    task, clock = TINY["swiglu"], SimpleNamespace(device=CPU)
    inputs = KERNELS["swiglu"].inputs(task, CPU)
    before = [matrix.detach().clone() for matrix in inputs.leaves.values()]
    assert KERNELS["swiglu"].prepare(clock, "liger", task, inputs).metrics["gate_error"] < 1e-6
    assert all(map(torch.equal, before, inputs.leaves.values()))
