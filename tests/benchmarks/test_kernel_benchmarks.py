"""The benchmarks of norms and attention: what they count, gate, measure, leave out, record and print."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention, norms
from benchmarks.attention import AttentionTask, flops, peak_bytes, some_queries
from benchmarks.harness import WrongResultError
from benchmarks.lib import kernel_run, row_kernels
from benchmarks.lib.contest import Contest, UnavailableError
from benchmarks.lib.kernel import SizedTask
from benchmarks.lib.kernel_run import Session
from benchmarks.lib.options import Recorder
from benchmarks.lib.row_kernels import norm_bytes
from benchmarks.records import read_records
from cs336_systems.cost import Hardware
from cs336_systems.host.console import run_command
from kernels import reference
from kernels.launch import INTERPRETED

CPU = torch.device("cpu")
FAST = ("--device", "cpu", "--rounds", "4", "--results", "out")
TINY_NORM = ("--rows", "32", "--columns", "64", "--candidate", "layernorm", "--candidate", "eager", *FAST)
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the GPU here")
TINY_FLASH = ("--grid", "flash", "--sequence", "32", "--dim", "16", "--dtype", "fp32", *FAST)


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    """Ceilings that need not be measured, and out of reach."""
    monkeypatch.setattr(kernel_run, "measure_once", lambda *_: Hardware("fast", 1e15, 1e15, "made up"))


def by_name(records, what):
    return {r.config["candidate"]: r for r in records if r.config["pass"] == what}


def test_bytes_flops_and_peaks_are_those_of_the_hand_count():
    forward = 2 * 50_000 * 1024 * 4 + 1024 * 4 + 4 * 50_000
    assert norm_bytes(50_000, 1024, 4, "forward", 264) == forward
    backward = 3 * 50_000 * 1024 * 4 + 2 * 1024 * 4 + 4 * 50_000 + 2 * 264 * 1024 * 4
    assert norm_bytes(50_000, 1024, 4, "forward-backward", 264) == forward + backward

    full, causal = (AttentionTask("flash", 2, 8, 4, "fp32", causal) for causal in (False, True))
    assert flops(full, "forward") == 2 * (2 * 2 * 8 * 8 * 4)  # two products of 2 x (8 x 4) (4 x 8), 2 FLOPs each
    assert flops(causal, "forward") == flops(full, "forward") / 2
    assert flops(causal, "backward") == 2.5 * flops(causal, "forward")
    leaderboard = flops(attention.LEADERBOARD[0], "forward-backward")
    assert leaderboard / 5.364e-3 == pytest.approx(359e12, rel=0.01)  # what the published best amounts to

    task, matrices = AttentionTask("course", 8, 16384, 128, "fp32", causal=False), 8 * 8 * 16384 * 128 * 4
    assert peak_bytes("eager", task) == matrices + 12 * 8 * 16384**2  # with its scores
    assert peak_bytes("ours", task) == matrices


def test_a_run_of_norms_prints_a_table_and_records_every_candidate(in_tmp, capsys):
    """What it has beside the run of tests/benchmarks/test_fused.py: a copy for a floor, and a ratio to the others."""
    assert run_command(norms.main, [*TINY_NORM]) == 0
    records = read_records(in_tmp / "out/norms.jsonl")
    assert len(records) == 2 * 3
    for what in ("forward", "forward-backward"):
        found = by_name(records, what)
        assert set(found) == {"layernorm", "eager", "copy"}
        for record in found.values():
            assert record.config | {"rows": 32, "columns": 64, "dtype": "fp32"} == record.config
            assert record.metrics["bytes"] == norm_bytes(32, 64, 4, what, 0)
        eager = found["eager"]
        against = {name: zip(eager.samples_ms, found[name].samples_ms, strict=True) for name in found}
        copies = [b / a for a, b in against["copy"]]
        assert eager.metrics["copy_fraction_median"] == pytest.approx(statistics.median(copies))
        pairs = [a / b for a, b in against["layernorm"]]
        assert eager.metrics["ratio_median"] == pytest.approx(statistics.median(pairs))
        assert eager.metrics["best_other"] == "layernorm"
    shown = capsys.readouterr().out
    assert "32 x 64 fp32" in shown
    assert "of copy" in shown


def test_a_run_of_attention_records_time_memory_and_refusals(in_tmp, capsys):
    names = ("eager", "sdpa-flash", "sdpa-cudnn")
    options = [word for name in names for word in ("--candidate", name)]
    assert run_command(attention.main, [*TINY_FLASH, *options]) == 0
    records = read_records(in_tmp / "out/attention.jsonl")
    for what, share in (("forward", 1), ("backward", 2.5), ("forward-backward", 3.5)):
        found = by_name(records, what)
        assert found["sdpa-cudnn"].status == "unsupported"
        assert found["sdpa-cudnn"].samples_ms == []
        for name in names[:2]:
            record, metrics = found[name], found[name].metrics
            assert metrics["flops"] == share * 4 * 32 * 32 * 16 / 2
            assert record.predicted["median_ms"] == pytest.approx(1e3 * metrics["flops"] / 1e15)
            assert metrics["mfu"] == pytest.approx(metrics["flops_per_s"] / 1e15)
            assert len(record.samples_ms) == 4
            assert metrics["gate_error"] < 1e-5
        # q, k, v and the weights, (1 32 16) and (1 32 32), in float32
        assert found["eager"].metrics["before_backward_bytes"] == 3 * 32 * 16 * 4 + 32 * 32 * 4
    shown = capsys.readouterr().out
    assert "1 x 32 x 16 fp32 causal" in shown
    assert "sdpa-cudnn: PyTorch has no such kernel for these inputs" in shown


def test_the_gates_see_every_gradient_and_the_last_row():
    task, norm = SizedTask("norm", (1000, 16), "fp32", "forward-backward"), row_kernels.rmsnorm
    inputs = norms.NORM.inputs(task, CPU)
    assert norms.NORM.gate("eager", norm, task, inputs) < 1e-6
    assert norms.NORM.gate("layernorm", row_kernels.layernorm, task, inputs) < 1e-6
    for name, what, wrong in (
        ("shy", "gradient of weight", lambda x, w: torch.cat((norm(x[:-1], w), norm(x[-1:], w.detach())))),
        ("layernorm", "gradient of bias", lambda x, w, b: row_kernels.layernorm(x, w, b.detach() + 0 * b)),
        ("short", "y", lambda x, w: torch.cat((norm(x[:-1], w), x[-1:]))),
    ):
        with pytest.raises(WrongResultError, match=f"{name}'s {what} is off"):
            norms.NORM.gate(name, wrong, task, inputs)

    flash, queries = AttentionTask("flash", 2, 50, 16, "fp32", causal=True), torch.tensor([0, 3, 49])
    inputs = attention.inputs(flash, CPU)
    q, k, v = inputs.leaves.values()
    few = some_queries(q[:, queries], k, v, queries, True)  # which are all that the gate needs
    assert torch.allclose(few, reference.attention(q, k, v, True)[0][:, queries], atol=1e-6)
    wrong = lambda q, k, v: reference.attention(q, 4 * k - 3 * k.detach(), v, True)[0]  # noqa: E731
    with pytest.raises(WrongResultError, match="unscaled's gradient of k is off"):
        attention.gate("unscaled", wrong, flash, inputs)


def test_wrong_attention_gets_no_speed(in_tmp, monkeypatch):
    right = attention.naive_attention
    monkeypatch.setattr(attention, "naive_attention", lambda q, k, v, bias: right(q, k, v, None))  # no mask
    assert run_command(attention.main, [*TINY_FLASH, "--candidate", "eager", "--candidate", "sdpa-math"]) == 2
    found = by_name(read_records(in_tmp / "out/attention.jsonl"), "forward")
    assert "wrong result: eager's output" in found["eager"].flags[0]
    assert found["eager"].samples_ms == []
    assert found["sdpa-math"].status == "ok"


@needs_interpreter
def test_a_dim_that_our_kernel_cannot_do_makes_it_unavailable():
    with pytest.raises(UnavailableError, match="takes dims up to 128, not 129"):
        attention.load_ours(AttentionTask("flash", 1, 32, 129, "fp32", causal=True), CPU)
    attention.load_ours(AttentionTask("flash", 1, 32, 128, "fp32", causal=True), CPU)


def test_what_does_not_fit_is_recorded(in_tmp, monkeypatch, capsys):
    monkeypatch.setattr(kernel_run, "usable_memory", lambda device: 17_000)
    assert run_command(norms.main, [*TINY_NORM]) == 0
    assert {r.status for r in read_records(in_tmp / "out/norms.jsonl")} == {"out-of-memory"}
    options = ("--candidate", "eager", "--candidate", "sdpa-flash")
    assert run_command(attention.main, [*TINY_FLASH, *options]) == 0
    found = by_name(read_records(in_tmp / "out/attention.jsonl"), "forward")
    assert found["eager"].status == "out-of-memory"
    assert found["eager"].flags == ["needs 32.0 KiB, 16.6 KiB usable"]
    assert found["eager"].predicted["peak_memory_bytes"] == 32 * 2**10
    assert found["sdpa-flash"].status == "ok"
    assert "needs 32.0 KiB, 16.6 KiB usable" in capsys.readouterr().out


def test_the_budget_lets_no_other_shape_begin(in_tmp, monkeypatch, capsys):
    ticks = iter(range(100))
    monkeypatch.setattr(kernel_run, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    assert run_command(norms.main, [*TINY_NORM, "--columns", "32", "--budget", "1.5"]) == 0
    assert {(r.config["columns"], r.config["pass"]) for r in read_records(in_tmp / "out/norms.jsonl")} == {
        (64, "forward")
    }
    left_out = "norm 32 x 64 fp32 forward-backward; norm 32 x 32 fp32 forward;"
    shown = " ".join(capsys.readouterr().out.split())
    assert f"not begun: the budget of 1.5 s is used up: {left_out}" in shown
    # A run that leaves everything out says so and is no error.
    assert run_command(norms.main, [*TINY_NORM, "--patience", "0", "--results", "other"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "eager left out, too slow for --patience: norm 32 x 64 fp32 forward, about" in shown
    assert (in_tmp / "other/norms.jsonl").read_text() == ""


def test_a_candidate_that_was_slow_is_expected_to_be_slow_and_gets_fewer_rounds(in_tmp, monkeypatch):
    settings = norms.NormSettings(device="cpu", rounds=8, patience=8.0, results=in_tmp)
    session = Session("norms", settings, Recorder(None), CPU)
    task, played = SizedTask("norm", (32, 64), "fp32", "forward"), []
    monkeypatch.setattr(session, "names", lambda kernel: ["eager"])
    monkeypatch.setattr(Contest, "play", lambda contest, rounds: played.append(rounds) or contest.entries.clear())
    predicted = session.seconds_of(norms.NORM, task)
    for seconds, note in ((0.1, False), (1.1, False), (1.2, True)):
        session.slowness["eager", "norm", "fp32"] = seconds / predicted
        session.compare(norms.NORM, task)
        assert bool(session.notes) == note
    assert played == [8, 7]
    assert session.notes == {"eager left out, too slow for --patience": [f"{task}, about 1.2 s a call"]}
