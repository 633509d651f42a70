"""The memory benchmark, run as a user runs it: what it measures beside the prediction, records, shows and refuses."""

import gc
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks import memory
from benchmarks.lib.memory_tables import label, peak_row
from benchmarks.lib.residuals import neighbours, strategy, sweep
from benchmarks.lib.workload import Bench, Case
from benchmarks.records import Record, read_records
from benchmarks.tables import measured_tables
from cs336_systems.cost import Hardware
from cs336_systems.cost.observed import observe_passes
from cs336_systems.host.console import run_command
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.profiling.labels import live_storages
from tests.support.machine import one_layer_each

CPU = torch.device("cpu")
FAST = Hardware("fast", 1e12, 1e11, "made up")
WHERE = {"device": "Test CPU", "cores": 2, "torch": "2.13", "commit": "abcdef012345", "dirty": False}
WHERE["date"] = "2026-01-01"
TINY = ("--size", "tiny", "--batch-size", "2", "--context", "32", "--results", "out/here")
CONFIG = model_preset("tiny").override(context_length=32)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """No probe of this machine's speed, which no test looks at; enough memory unless a test says otherwise."""
    monkeypatch.setattr(memory, "make_bench", lambda plan, device, usable: Bench(plan, device, FAST, usable, WHERE))
    monkeypatch.setattr(memory, "usable_memory", lambda device: 2**30)


@pytest.fixture
def collected():
    """Models that earlier tests have left would count as memory that was there before."""
    gc.collect()


def run(*arguments: str) -> int:
    return run_command(memory.main, ["--device", "cpu", *arguments])


def one_of_each(config: ModelConfig, batch: int) -> int:
    """Bytes that the count may miss: it is made of whole tensors, and of each kind one may live inside a block."""
    seq = config.context_length
    return 4 * batch * seq * (config.d_model + config.d_ff + config.num_heads * seq)


def test_both_passes_are_measured_beside_the_prediction(in_tmp, capsys, collected):
    foreign = sum(each.nbytes for each in live_storages([]))  # of other tests in this process
    assert run(*TINY) == 0
    records = read_records(Path("out/here/memory.jsonl"))
    assert [(r.config["mode"], r.status, r.samples_ms) for r in records] == [("forward", "ok", []), ("step", "ok", [])]
    weights = observe_passes(CONFIG, 2, 32).memory("forward")["parameters"]
    for record in records:
        mode, metrics = record.config["mode"], record.metrics
        parts = observe_passes(CONFIG, 2, 32).memory(mode)
        assert record.predicted == {"peak_memory_bytes": sum(parts.values()), "memory_by_part": parts}
        assert abs(metrics["peak_memory_bytes"] - foreign - sum(parts.values())) <= one_of_each(CONFIG, 2)
        measured = metrics["memory_by_part"]
        assert sum(measured.values()) == metrics["peak_memory_bytes"]
        assert measured["parameters"] == weights
        # Two moments of each weight, there from the step before, and for each tensor the count of its steps.
        state = measured["optimizer state"]
        assert state == 0 if mode == "forward" else 2 * weights <= state <= 2 * weights + 8 * len(records) * 100
    assert "tiny (2024) 2 x 32" in capsys.readouterr().out


def test_what_does_not_fit_is_computed_and_says_so(in_tmp, monkeypatch, capsys):
    fits = sum(observe_passes(CONFIG, 2, 32).memory("forward").values())
    monkeypatch.setattr(memory, "usable_memory", lambda device: fits)
    monkeypatch.setattr(memory, "measure_peak", lambda *given: {"forward": {"peak_memory_bytes": 2 * fits}}[given[1]])
    assert run(*TINY) == 0
    forward, step = read_records(Path("out/here/memory.jsonl"))
    assert (forward.status, step.status, step.metrics) == ("ok", "out-of-memory", {})
    assert "does not fit: computed" in capsys.readouterr().out
    need = sum(observe_passes(CONFIG, 2, 32).memory("step").values())
    page = measured_tables(Path("out"), "memory")
    assert "Test CPU, 2 cores, torch 2.13, commit abcdef0, 2026-01-01:" in page
    assert f"| step | fp32 | {need / 2**20:.1f} MiB (computed) | {need / 2**20:.1f} MiB |" in page
    assert f"| forward | fp32 | {2 * fits / 2**20:.1f} MiB (+100.0%) | {fits / 2**20:.1f} MiB |" in page
    assert page.endswith("(computed): does not fit this machine; the figures are the memory model's.")


def test_a_real_out_of_memory_is_recorded_too(in_tmp, monkeypatch, capsys):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(memory, "measure_peak", Mock(side_effect=error))
    assert run(*TINY) == 0
    assert {record.status for record in read_records(Path("out/here/memory.jsonl"))} == {"out-of-memory"}
    assert "out of memory although it was counted to fit" in capsys.readouterr().err


def test_all_sizes_end_with_the_largest_in_mixed_precision(in_tmp, monkeypatch):
    monkeypatch.setattr(memory, "usable_memory", lambda device: 0)
    one_layer_each(monkeypatch, memory.MemorySettings)
    assert run("--all-sizes", "--year", "2026", "--results", "out") == 0
    records = read_records(Path("out/memory.jsonl"))
    assert len(records) == 12
    assert {record.status for record in records} == {"out-of-memory"}
    assert [r.config["precision"] for r in records] == ["fp32"] * 10 + ["bf16"] * 2
    assert {r.config["size"] for r in records[8:]} == {"10B"}


def test_segments_are_measured_beside_the_prediction(in_tmp, monkeypatch, collected):
    ways = neighbours(CONFIG, 2, 32)[2:]
    monkeypatch.setattr(memory, "neighbours", lambda *shape: ways)
    assert run(*TINY, "--segments") == 0
    records = read_records(Path("out/here/memory.jsonl"))
    assert [(r.config["recompute"], r.config["recompute_every"]) for r in records] == [("segments", 2), ("nested", 1)]
    for record, way in zip(records, ways, strict=True):
        assert record.predicted["peak_bytes"] == way.peak
        assert record.predicted["peak_by_length"] == [each.peak for each in sweep(CONFIG, 2, 32)]
        assert abs(record.metrics["peak_bytes"] - way.peak) <= one_of_each(CONFIG, 2)
    assert records[1].metrics["peak_bytes"] < records[0].metrics["peak_bytes"]
    page = measured_tables(Path("out"), "memory")
    assert "Activations at their most, tiny (2024) 2 x 32, fp32, Test CPU, 2 cores, " in page
    assert "Predicted best: segments of 1 of 4 blocks" in page
    assert page.count("| segments of 2 |") == 1


def test_residuals_are_counted_for_every_way_of_recomputing(in_tmp):
    assert run("--size", "small", "--residuals", "--results", "out/here") == 0
    records = read_records(Path("out/here/memory.jsonl"))
    config = model_preset("small")
    kept = [strategy(config, 16, 128, recompute).kept for recompute in ("none", "attention", "segments", "nested")]
    assert [record.metrics["kept_bytes"] for record in records] == kept
    assert [record.predicted["kept_bytes"] for record in records] == kept
    page = measured_tables(Path("out"), "memory")
    assert "| kept by | none | attention | segments of 1 | nested |" in page
    assert "| blocks.1 to blocks.5, each | 120.0 MiB | 108.0 MiB | 6.0 MiB | 0 B |" in page  # nested keeps 0 and 6
    assert "| none | blocks.1 | blocks.1.feed_forward.down | 2048 x 3072 | float32 | 24.0 MiB | gelu |" in page
    # With recompute the whole model's: what the loss keeps, and then inputs of the blocks that are run again.
    logits = "model | token_loss | 2048 x 10000 | float32 | 78.1 MiB | log_softmax"
    for name in ("attention", "segments of 1", "nested"):
        assert len([line for line in page.splitlines() if line.startswith(f"| {name} | model |")]) == 5
        assert f"| {name} | {logits} |" in page
    assert "| segments of 1 | model | blocks.0 | 16 x 128 x 768 | float32 | 6.0 MiB | add |" in page


def test_a_row_names_what_is_unusual():
    config = {"size": "2.7B", "year": 2024, "mode": "step", "precision": "fp32", "attention": "naive"}
    config |= {"recompute": "segments", "recompute_every": 2, "batch_size": 16, "context": 128, "norm": "layernorm"}
    figures = {"peak_memory_bytes": 2**29, "memory_by_part": {"parameters": 2**28, "activations": 2**28}}
    record = Record("memory", config | {"kernels": "triton"}, WHERE, [], {"peak_memory_bytes": 2**30}, figures)
    assert label(record) == "2.7B (2024) 16 x 128, norm layernorm, kernels triton, recompute segments of 2"
    # What a GPU does not tell by category is the prediction's; one activation of the course has 20 MiB.
    parts = "parameters 256.0 MiB, activations 256.0 MiB"
    assert peak_row(record)[3:] == ["1.0 GiB (+100.0%)", "512.0 MiB", parts, "20.0 MiB"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_for_itself():
    case = Case(CONFIG, 2, "fp32", False, torch.device("cuda"))
    found = memory.measure_peak(case, "step", False)["peak_memory_bytes"]
    assert found >= observe_passes(CONFIG, 2, 32).memory("step")["parameters"]
