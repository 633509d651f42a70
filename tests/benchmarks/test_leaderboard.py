"""The leaderboard tasks: how large a step fits, what its gate sees, and what is recorded."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from benchmarks import leaderboard
from benchmarks.attention import AttentionTask, inputs
from benchmarks.harness import WrongResultError
from benchmarks.leaderboard import FULL, TINY, LeaderboardStep, gate_step, largest_step
from benchmarks.lib.gate import tolerance
from benchmarks.records import read_records
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from cs336_systems.model import attention
from kernels import reference

CPU = torch.device("cpu")
PLAIN = replace(TINY, attention="naive", kernels="torch")
GIB = 2**30


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    """Ceilings that need not be measured, and out of reach."""
    monkeypatch.setattr(leaderboard, "measure_once", lambda *_: Hardware("fast", 1e15, 1e15, "made up"))


def test_what_a_step_needs_is_that_of_the_hand_count():
    # Per block 4 attention matrices, 3 of the gated layer and 2 norms; an embedding, a head and the last norm.
    parameters = 34 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 2 * 151_936 * 4096 + 4096
    assert parameters == pytest.approx(8.1e9, rel=0.01)
    tokens = 2 * 32_768
    activations = 34 * tokens * 4096 * 2 + tokens * 2 * (18 * 4096 + 6 * 11_008)
    head = 151_936 * (6 * 4096 + 2 * 4096)
    assert LeaderboardStep(FULL, 2).bytes_needed == 12 * parameters + activations + head
    assert largest_step(FULL, None, 140 * GIB) == LeaderboardStep(FULL, 2)


def test_the_step_is_scaled_to_what_fits():
    found = largest_step(FULL, None, 80 * GIB)
    assert 1 < found.config.num_layers < 34
    assert found.batch == 1
    deeper = replace(found, config=replace(found.config, num_layers=found.config.num_layers + 1))
    assert found.bytes_needed <= 80 * GIB < deeper.bytes_needed
    assert largest_step(FULL, 8, 80 * GIB) == LeaderboardStep(replace(FULL, num_layers=8), 2)
    with pytest.raises(UserError, match=r"--layers 34 at batch 1 needs 1\d\d\.\d GiB, 80\.0 GiB are usable"):
        largest_step(FULL, 34, 80 * GIB)


def test_the_predicted_time_is_that_of_the_hand_count():
    step = LeaderboardStep(replace(TINY, recompute="none"), 2)
    per_token = 2 * (4 * 32**2 + 3 * 32 * 64 + 256 * 32)
    scores = 2 * 2 * 2 * 32 * 32 / 2 * 32  # two products, batch 2, 32 queries and keys, half of them masked
    predicted = step.predict(Hardware("slow", 1e9, 1e9, "made up"))
    assert predicted["flops"] == pytest.approx(3 * (2 * 32 * per_token + scores), rel=0.01)
    parameters = 4 * 32**2 + 3 * 32 * 64 + 2 * 32 + 2 * 256 * 32 + 32
    assert predicted["median_ms"] == pytest.approx(1e3 * (predicted["flops"] + 22 * parameters) / 1e9)


def test_the_records_have_what_was_measured_and_what_was_not(in_tmp, monkeypatch, capsys):
    monkeypatch.setattr(leaderboard, "LAPTOP", PLAIN)
    assert run_command(leaderboard.main, ["--device", "cpu", "--steps", "2", "--results", "out"]) == 0
    skipped, done = read_records(in_tmp / "out/leaderboard.jsonl")
    assert (skipped.status, skipped.flags, skipped.samples_ms) == ("unsupported", ["needs a GPU"], [])
    assert skipped.predicted["flops"] == 3.5 * 4 * 16 * 16_384**2 * 64 / 2
    config, metrics = done.config, done.metrics
    assert config == {
        "task": "step-2026", "layers": 1, "d_model": 32, "batch_size": 2, "context": 32, "dtype": "bf16",
    }  # fmt: skip
    assert len(done.samples_ms) == 2
    assert 0 < metrics["gate_error"] < 0.1
    assert metrics["peak_memory_bytes"] >= 0
    assert metrics["flops_per_s"] == pytest.approx(1e3 * done.predicted["flops"] / metrics["median_ms"])
    shown = capsys.readouterr().out
    assert "2 records appended" in shown
    assert "step-2026: 1 layer of width 32, batch 2 x 32 (the board's" in shown
    assert "best published" not in shown  # of another model


def test_the_attention_that_is_timed_forward_and_backward_is_the_one_that_was_gated(monkeypatch, capsys):
    triton, calls = pytest.importorskip("triton.testing"), []
    task, cuda = AttentionTask("leaderboard", 1, 32, 16, "fp32", causal=True), SimpleNamespace(type="cuda")
    hardware, settings = Hardware("fast", 1e15, 1e15, "made up"), leaderboard.LeaderboardSettings()

    def right(q, k, v):
        return reference.attention(q, k, v, True)[0]

    def compiled(q, k, v):
        calls.append("forward")
        q.register_hook(lambda grad: calls.append("backward"))
        return right(q, k, v)

    def bench(run, rep, warmup, return_mode):
        calls.clear()
        run()
        return [rep, warmup]

    monkeypatch.setattr(triton, "do_bench", bench)
    monkeypatch.setattr(leaderboard, "TASK", task)
    monkeypatch.setattr(leaderboard, "load_ours", lambda task, device: right)
    monkeypatch.setattr(leaderboard, "inputs", lambda task, device: inputs(task, CPU))
    loop = leaderboard.time_attention
    monkeypatch.setattr(leaderboard, "time_attention", lambda flash, seconds, device: loop(flash, seconds, CPU))
    monkeypatch.setattr(leaderboard, "compile_model", lambda function, device: compiled)
    fields = leaderboard.run_attention(settings, cuda, hardware)
    assert calls == ["forward", "backward"]
    leaderboard.finish(fields, hardware, {})
    assert "best published, the whole task on an H100: 5.364 ms" in capsys.readouterr().out
    wrong = Mock(side_effect=lambda q, k, v: reference.attention(q, k, v, False)[0])
    monkeypatch.setattr(leaderboard, "compile_model", lambda function, device: wrong)
    with pytest.raises(WrongResultError, match="ours's output is off"):  # a compiler that gets it wrong
        leaderboard.run_attention(settings, cuda, hardware)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, k, v, causal: reference.attention(q, k, v, False)[0], r"of a block|the gradient of"),
        (lambda q, k, v, causal: reference.attention(q, k.detach(), v, causal)[0], "the gradient of"),
    ],
    ids=["no mask", "no gradient of keys"],
)
def test_the_gate_sees_wrong_attention(wrong, message, monkeypatch):
    step, right = LeaderboardStep(replace(TINY, kernels="torch"), 2), lambda *given: reference.attention(*given)[0]
    monkeypatch.setattr(attention, "FlashAttention2", SimpleNamespace(apply=right))
    assert gate_step(step, CPU) < tolerance(step.block, "bf16") / 5
    monkeypatch.setattr(attention, "FlashAttention2", SimpleNamespace(apply=wrong))
    with pytest.raises(WrongResultError, match=message):
        gate_step(step, CPU)


def test_a_parameter_without_a_gradient_or_a_wrong_loss_gets_no_speed(in_tmp, monkeypatch, capsys):
    def freeze(model):
        torch.nn.Module.bfloat16(model)
        list(model.parameters())[-1].requires_grad_(False)
        return model

    monkeypatch.setattr(leaderboard, "LAPTOP", PLAIN)
    with monkeypatch.context() as frozen:
        frozen.setattr(leaderboard.TransformerLM, "bfloat16", freeze)
        with pytest.raises(WrongResultError, match=r"the gradient of .* is off its reference by 1\.00e\+00"):
            gate_step(LeaderboardStep(PLAIN, 2), CPU)
    right, factors = leaderboard.lm_loss, iter((1.0, 1.2))  # the candidate's, the reference's
    monkeypatch.setattr(leaderboard, "lm_loss", lambda model, *batch: next(factors) * right(model, *batch))
    assert run_command(leaderboard.main, ["--device", "cpu", "--results", "out"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: step-2026: the loss of a block is off its ref")
    assert [record.status for record in read_records(in_tmp / "out/leaderboard.jsonl")] == ["unsupported"]


def test_running_out_of_memory_is_recorded(in_tmp, monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    monkeypatch.setattr(leaderboard, "LAPTOP", PLAIN)
    monkeypatch.setattr(leaderboard, "time_step", Mock(side_effect=error))
    assert run_command(leaderboard.main, ["--device", "cpu", "--task", "step-2026", "--results", "out"]) == 0
    (record,) = read_records(in_tmp / "out/leaderboard.jsonl")
    assert (record.status, record.samples_ms) == ("out-of-memory", [])


def test_a_loss_that_is_no_number_has_no_speed(monkeypatch):
    right = leaderboard.lm_loss
    monkeypatch.setattr(leaderboard, "lm_loss", lambda model, *batch: right(model, *batch) * float("nan"))
    with pytest.raises(UserError, match="the loss is nan"):
        leaderboard.time_step(LeaderboardStep(PLAIN, 1), 1, CPU)
