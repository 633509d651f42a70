"""The tables of the kernels' goals and records: the worst counts, and what was not measured is said to be so."""

from dataclasses import replace
from typing import Any

from benchmarks.records import Record, append_record
from benchmarks.tables import GOALS, GPU_MACHINE, goals_table, kernel_pages, measured_tables

STAMP = {"device": "NVIDIA H200", "threads": 1, "torch": "2.11", "commit": "abc", "dirty": False, "date": "2026-01-01"}
TIMES = {"median_ms": 1.0, "mean_ms": 1.0, "std_ms": 0.01}


def norm(
    columns: int, what: str, candidate: str = "ours", rows: int = 32_768, dtype: str = "bf16", **metrics: Any
) -> Record:
    config = {"candidate": candidate, "pass": what, "rows": rows, "columns": columns, "dtype": dtype}
    metrics = TIMES | {"bytes_per_s": 4e12, "copy_fraction_median": 0.97, "ratio_median": 0.9} | metrics
    return Record("norms", config, STAMP, [1.0], metrics, {"median_ms": 0.9})


def attention(dim: int, causal: bool, what: str, dtype: str = "bf16", **metrics: Any) -> Record:
    config = {"candidate": "ours", "pass": what, "grid": "leaderboard", "batch": 16, "seq": 16384, "dim": dim}
    config |= {"dtype": dtype, "causal": causal, "keeps": causal}
    return Record(
        "attention", config, STAMP, [1.0], TIMES | {"mfu": 0.5, "flops_per_s": 4e14} | metrics, {"median_ms": 1.0}
    )


def fused(kernel: str, what: str, dtype: str = "bf16", **metrics: Any) -> Record:
    config = {"candidate": "ours", "kernel": kernel, "pass": what, "dtype": dtype}
    sizes = {"tokens": 8, "d_model": 16, "vocab": 64} if kernel == "cross-entropy" else {"rows": 8, "columns": 64}
    config |= {"layers": 12, "d_model": 16, "vocab": 64} if kernel == "adamw" else sizes
    metrics = TIMES | {"flops": 0, "bytes_per_s": 4e12, "floor_fraction_median": 0.93} | metrics
    return Record("fused", config, STAMP, [1.0], metrics, {"median_ms": 0.9})


def write(folder, *records: Record) -> None:
    folder.mkdir(exist_ok=True)
    for record in records:
        append_record(record, folder / f"{record.benchmark}.jsonl")


def measured(folder, *records: Record) -> list[str]:
    """The third cells of the table of goals."""
    write(folder / GPU_MACHINE, *records)
    rows = [line.strip("| ").split(" | ") for line in goals_table(folder).splitlines()[4:]]
    assert [row[0] for row in rows] == [goal.what for goal in GOALS]
    return [row[2] for row in rows]


def test_the_worst_of_our_own_counts(tmp_path):
    slow = norm(2048, "forward", copy_fraction_median=0.91, host_us=21.0, ratio_median=1.1)
    other = norm(4096, "forward", candidate="liger", copy_fraction_median=0.5)
    beyond = norm(65_536, "forward", copy_fraction_median=0.6)
    failed = replace(norm(1024, "forward"), status="out-of-memory", metrics={})
    loss = fused("cross-entropy", "forward-backward", floor_ratio_median=1.2)
    exact = fused("cross-entropy", "forward-backward", dtype="fp32", floor_ratio_median=9.9)
    fast = attention(64, True, "forward-backward", median_ms=5.0)
    wide = attention(64, True, "forward-backward", dtype="fp32", median_ms=50.0)
    flash = attention(128, False, "forward", flops_per_s=4.5e14)
    found = measured(
        tmp_path, norm(1024, "forward", host_us=9.0), slow, other, beyond, failed, flash, fast, wide, loss, exact
    )
    assert found[0] == "91%"
    assert found[1].startswith("not yet measured")  # no record of forward and backward
    assert found[2:] == ["1.10", "21.0 us", "450 TFLOP/s", "5 ms", "1.20"]


def test_only_the_shapes_that_the_benchmark_names_count(tmp_path):
    good, bad = {"ratio_median": 0.8, "host_us": 9.0}, {"copy_fraction_median": 0.1, "ratio_median": 3.0}
    bad["host_us"] = 90.0
    records = []
    for what in ("forward", "forward-backward"):
        records += [norm(8192, what, rows=8, **bad), norm(8192, what, dtype="fp32", **bad), norm(1000, what, **bad)]
        records.append(norm(8192, what, rows=50_000, **bad))  # the course's, but in bf16
        records.append(norm(8192, what, rows=50_000, dtype="fp32", copy_fraction_median=0.96, **good))
        wide = {"copy_fraction_median": 0.5, "host_us": 12.0, "ratio_median": 0.85}
        records.append(norm(65_536, what, **wide))  # named, beyond 32K columns
    assert measured(tmp_path, *records)[:4] == ["96%", "96%", "0.85", "12.0 us"]


def test_records_become_rows(tmp_path):
    refused = replace(norm(2048, "forward-backward", "quack"), status="unsupported", flags=["quack is not installed"])
    write(tmp_path / "test-gpu", refused)
    (tmp_path / "test-gpu/attention.jsonl").touch()
    assert kernel_pages(tmp_path) == []  # nothing to show
    full = replace(norm(1024, "forward-backward", "torch"), status="out-of-memory", flags=["needs 2 GiB"], metrics={})
    write(tmp_path / "test-gpu", norm(1024, "forward-backward"), full, attention(64, True, "forward-backward"))
    write(tmp_path / "test-gpu", fused("swiglu", "forward-backward"))
    goals, norms, attentions, others = kernel_pages(tmp_path)
    assert norms.startswith("NVIDIA H200, 1 threads, torch 2.11, norms:")
    assert "| 32768 x 1024 bf16 | forward-backward | ours | 1 ms ± 1% | 900 us | 4000 | 97% |" in norms
    assert "| 32768 x 1024 bf16 | forward-backward | torch | needs 2 GiB |  |  |  |" in norms
    assert "| 16 x 16384 x 64 bf16 causal | forward-backward | ours | 1 ms ± 1% | 1 ms | 400 T | 50% |" in attentions
    assert "| swiglu 8 x 64 bf16 | forward-backward | ours | 1 ms ± 1% | 900 us | 4 TB/s | 93% |" in others
    assert measured_tables(tmp_path, "kernels") == f"{goals}\n\n{norms}\n\n{attentions}\n\n{others}"
