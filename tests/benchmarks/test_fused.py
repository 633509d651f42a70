"""The benchmark of the fused kernels: what it counts, gates, measures, leaves out and records."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from benchmarks import fused
from benchmarks.fused import KERNELS
from benchmarks.harness import WrongResultError
from benchmarks.lib import kernel_run, row_kernels
from benchmarks.lib.kernel import SizedTask, always
from benchmarks.records import read_records
from cs336_systems.cost import Hardware
from cs336_systems.host.console import run_command
from kernels import reference

CPU = torch.device("cpu")
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


def test_bytes_flops_and_peaks_are_those_of_the_hand_count():
    def counted(kernel, sizes, what, dtype="bf16"):
        task = SizedTask(kernel, sizes, dtype, what)
        return KERNELS[kernel].moved(task, CPU), KERNELS[kernel].flops(task, what)

    def matrices(kernel, name, what):
        return KERNELS[kernel].peak_bytes(name, SizedTask(kernel, (8, 16), "bf16", what)) / (8 * 16 * 2)

    forward = 4 * 8192 * 4096 * 2 + 4096 * 2 + 4 * 8192  # x, residual, sum, y; the weight; 1 / rms
    tokens, d, vocab = 8192, 4096, 128_256
    assert counted("swiglu", (8192, 11008), "forward") == (3 * 8192 * 11008 * 2, 0)
    assert counted("swiglu", (8192, 11008), BOTH) == ((3 + 5) * 8192 * 11008 * 2, 0)
    assert counted("add-rmsnorm", (8192, 4096), "forward") == (forward, 0)
    assert counted("add-rmsnorm", (8192, 4096), BOTH) == (2 * forward + 4096 * 2, 0)
    assert counted("adamw", (12, 768, 50_257), "step", "fp32") == (28 * 124_439_808, 0)
    assert counted("cross-entropy", (tokens, d, vocab), "forward")[1] == 2 * tokens * d * vocab
    assert counted("cross-entropy", (tokens, d, vocab), BOTH) == (2 * tokens * vocab * 2, 6 * tokens * d * vocab)

    kept = 2 * 2 * (tokens * d + vocab * d) + 8 * tokens  # hidden, weight and their gradients
    loss = SizedTask("cross-entropy", (tokens, d, vocab), "bf16", BOTH)
    peaks = {name: KERNELS["cross-entropy"].peak_bytes(name, loss) for name in ("torch", "ours", "liger")}
    # Ours: the weight's gradient in float32, and hidden's once more; both outweigh 4096 tokens' logits.
    ours = kept + 2 * vocab * d * 2 + tokens * d * 2
    assert peaks == {"torch": kept + 3 * tokens * vocab * 2, "ours": ours, "liger": kept + 256 * vocab * 2}
    assert [matrices("swiglu", name, "forward") for name in ("ours", "torch")] == [3, 4]  # gate, up, y; silu(gate)
    # And dy, dgate, dup; silu(gate)'s gradient; inputs of its own to write over.
    assert [matrices("swiglu", name, BOTH) for name in ("ours", "torch", "liger")] == [6, 7, 8]
    assert matrices("add-rmsnorm", "ours", BOTH) == 7  # x, residual, sum, y, both upstream gradients, one gradient


def test_a_run_records_every_candidate_beside_its_floor(in_tmp, capsys):
    chosen = [word for name in ("torch", "torch-fused", "eager", "liger") for word in ("--candidate", name)]
    assert run_command(fused.main, [*FAST, *chosen]) == 0
    records = read_records(in_tmp / "out/fused.jsonl")
    found = {(r.config["kernel"], r.config["pass"], r.config["candidate"]): r for r in records}
    assert len(found) == 2 * (2 + 2 + 2) + 3 + 4
    for (name, what, candidate), record in found.items():
        kernel, config = KERNELS[name], record.config
        assert tuple(config[size] for size in kernel.sizes_are) == kernel.tiny
        if candidate == "liger":
            assert record.flags == ["Liger-Kernel is not installed"]
            continue
        task = SizedTask(name, kernel.tiny, config["dtype"], what)
        metrics, predicted = record.metrics, record.predicted
        assert len(record.samples_ms) == 4
        assert metrics.get("flops", 0) == kernel.flops(task, what)
        work, size = metrics.get("flops", 0), metrics.get("bytes", 0)
        assert size == 0 or metrics["bytes_per_s"] == pytest.approx(1e3 * size / metrics["median_ms"])
        assert predicted["median_ms"] == pytest.approx(1e3 * (work / 1e15 + size / 1e14))
        if candidate == kernel.floor:
            assert size == (0 if work else kernel.moved(task, CPU))
            continue
        assert metrics["bytes"] == kernel.moved(task, CPU)
        assert predicted["peak_memory_bytes"] == kernel.peak_bytes(candidate, task)
        floor = found[name, what, kernel.floor].samples_ms
        pairs = [a / b for a, b in zip(record.samples_ms, floor, strict=True)]
        assert metrics["floor_ratio_median"] == pytest.approx(statistics.median(pairs))
        assert metrics["floor"] == {"cross-entropy": "matmuls"}.get(name, "copy")
        assert metrics["gate_error"] < 0.01
    assert found["adamw", "step", "eager"].metrics["best_other"] == "torch-fused"
    shown = capsys.readouterr().out
    assert "cross-entropy 8 x 16 x 100 bf16" in shown
    assert "of floor" in shown


def gate(name, function):
    task = TINY[name]
    return KERNELS[name].gate("it", function, task, KERNELS[name].inputs(task, CPU))


def detached(result, *leaves):
    """The same result with no gradient for the last of the leaves."""
    return result(*leaves[:-1], leaves[-1].detach() + 0 * leaves[-1])


OPTIONS, NORM, LOSS = fused.AdamWStep.options, row_kernels.reference_add_rmsnorm, fused.torch_loss
RIGHT = {
    "swiglu": reference.swiglu,
    "add-rmsnorm": NORM,
    "cross-entropy": LOSS,
    "adamw": lambda params: torch.optim.AdamW(params, **OPTIONS),
}
WRONG = [
    ("swiglu", "gradient of up", lambda *leaves: detached(reference.swiglu, *leaves)),
    ("swiglu", "y", lambda x, up: torch.cat((reference.swiglu(x[:-1], up[:-1]), up[-1:]))),
    ("add-rmsnorm", "gradient of weight", lambda *leaves: detached(NORM, *leaves)),
    ("add-rmsnorm", "sum", lambda x, residual, weight: (NORM(x, residual, weight)[0], x)),
    ("cross-entropy", "loss", lambda hidden, weight, targets: LOSS(hidden, weight, targets.clamp(min=0))),
    ("cross-entropy", "gradient of hidden", lambda h, w, t: detached(lambda w, h: LOSS(h, w, t), w, h)),
    ("cross-entropy", "gradient of weight", lambda h, w, t: detached(lambda t, w: LOSS(h, w, t), t, w)),
    ("adamw", "parameter 15", lambda params: torch.optim.AdamW(params[:-1], **OPTIONS)),
    *(
        ("adamw", "parameter 0", lambda params, each=each: torch.optim.AdamW(params, **OPTIONS | each))
        for each in ({"betas": (0.9, 0.96)}, {"weight_decay": 0.0}, {"lr": 1.001e-3}, {"eps": 1e-4})
    ),
]


def test_the_gates_see_every_result_gradient_and_setting():
    for name, right in RIGHT.items():
        assert gate(name, right) < 5e-6
    for name, what, wrong in WRONG:
        with pytest.raises(WrongResultError, match=f"it's {what} is off"):
            gate(name, wrong)


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
