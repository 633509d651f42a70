"""The tables of the kernels' goals and records: the worst counts, and what was not measured is said to be so."""

from dataclasses import replace
from typing import Any

from benchmarks.records import Record, append_record
from benchmarks.tables import GOALS, GPU_MACHINE, goals_table

STAMP = {"device": "NVIDIA H200", "threads": 1, "torch": "2.11", "commit": "abc", "dirty": False, "date": "2026-01-01"}


def record(benchmark: str, what: str, config: dict[str, Any], metrics: dict[str, Any]) -> Record:
    config, metrics = {"candidate": "ours", "pass": what} | config, {"median_ms": 1.0} | metrics
    return Record(benchmark, config, STAMP, [1.0], metrics, {"median_ms": 0.9})


def norm(columns: int, what: str, candidate: str = "ours", rows: int = 32_768, dtype="bf16", **metrics: Any) -> Record:
    config = {"candidate": candidate, "rows": rows, "columns": columns, "dtype": dtype}
    return record("norms", what, config, {"copy_fraction_median": 0.97, "ratio_median": 0.9} | metrics)


def attention(dim: int, causal: bool, what: str, dtype: str = "bf16", **metrics: Any) -> Record:
    config = {"grid": "leaderboard", "batch": 16, "seq": 16384, "dim": dim, "dtype": dtype, "causal": causal}
    return record("attention", what, config | {"keeps": causal}, {"mfu": 0.5, "flops_per_s": 4e14} | metrics)


def loss(dtype: str, ratio: float) -> Record:
    config = {"kernel": "cross-entropy", "dtype": dtype, "tokens": 8, "d_model": 16, "vocab": 64}
    return record("fused", "forward-backward", config, {"floor_ratio_median": ratio})


def measured(folder, *records: Record) -> list[str]:
    """The third cells of the table of goals."""
    (folder / GPU_MACHINE).mkdir()
    for each in records:
        append_record(each, folder / GPU_MACHINE / f"{each.benchmark}.jsonl")
    rows = [line.strip("| ").split(" | ") for line in goals_table(folder).splitlines()[4:]]
    assert [row[0] for row in rows] == [goal.what for goal in GOALS]
    return [row[2] for row in rows]


def test_the_worst_of_our_own_counts(tmp_path):
    slow = norm(2048, "forward", copy_fraction_median=0.91, host_us=21.0, ratio_median=1.1)
    other = norm(4096, "forward", candidate="liger", copy_fraction_median=0.5)
    beyond = norm(65_536, "forward", copy_fraction_median=0.6)
    failed = replace(norm(1024, "forward"), status="out-of-memory", metrics={})
    fast = attention(64, True, "forward-backward", median_ms=5.0)
    wide = attention(64, True, "forward-backward", dtype="fp32", median_ms=50.0)
    flash = attention(128, False, "forward", flops_per_s=4.5e14)
    norms = [norm(1024, "forward", host_us=9.0), slow, other, beyond, failed]
    found = measured(tmp_path, *norms, flash, fast, wide, loss("bf16", 1.2), loss("fp32", 9.9))
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
