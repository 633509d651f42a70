"""The tables of the kernels' goals and records: the worst counts, and what was not measured is said to be so."""

from dataclasses import replace
from typing import Any

from benchmarks.kernel_tables import GOALS, GPU_MACHINE, goals_table, kernel_tables
from benchmarks.records import Record, append_record
from benchmarks.tables import measured_tables

STAMP = {"device": "NVIDIA H200", "threads": 1, "torch": "2.11", "commit": "abc", "dirty": False, "date": "2026-01-01"}
TIMES = {"median_ms": 1.0, "mean_ms": 1.0, "std_ms": 0.01}


def norm(columns: int, what: str, candidate: str = "ours", **metrics: Any) -> Record:
    config = {"candidate": candidate, "pass": what, "rows": 8, "columns": columns, "dtype": "bf16"}
    metrics = TIMES | {"bytes_per_s": 4e12, "copy_fraction_median": 0.97, "ratio_median": 0.9} | metrics
    return Record("norms", config, STAMP, [1.0], metrics, {"median_ms": 0.9})


def attention(dim: int, causal: bool, what: str, **metrics: Any) -> Record:
    config = {"candidate": "ours", "pass": what, "grid": "leaderboard", "batch": 16, "seq": 16384, "dim": dim}
    config |= {"dtype": "bf16", "causal": causal, "keeps": causal}
    return Record(
        "attention", config, STAMP, [1.0], TIMES | {"mfu": 0.5, "flops_per_s": 4e14} | metrics, {"median_ms": 1.0}
    )


def write(folder, *records: Record) -> None:
    folder.mkdir(exist_ok=True)
    for record in records:
        append_record(record, folder / f"{record.benchmark}.jsonl")


def measured(folder) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in goals_table(folder).splitlines()[4:]]
    assert [row[0] for row in rows] == [goal.what for goal in GOALS]
    return {row[0]: row[2] for row in rows}


def test_without_records_every_goal_says_so(tmp_path):
    for goal, found in measured(tmp_path).items():
        assert found.startswith("not yet measured: `python -m benchmarks."), goal


def test_the_worst_of_our_own_counts(tmp_path):
    slow = norm(2048, "forward", copy_fraction_median=0.91, host_us=21.0, ratio_median=1.1)
    other = norm(4096, "forward", candidate="liger", copy_fraction_median=0.5)
    beyond = norm(65_536, "forward", copy_fraction_median=0.6)
    failed = replace(norm(1024, "forward"), status="out-of-memory", metrics={})
    write(tmp_path / GPU_MACHINE, norm(1024, "forward", host_us=9.0), slow, other, beyond, failed)
    found = list(measured(tmp_path).values())
    assert found[0] == "91%"
    assert found[1].startswith("not yet measured")  # no record of forward and backward
    assert found[2:4] == ["1.10", "21.0 us"]


def test_attention_and_the_loss(tmp_path):
    loss = Record("fused", {"candidate": "ours", "kernel": "cross-entropy"}, STAMP, [1.0], {"floor_ratio_median": 1.2})
    fast = attention(64, True, "forward-backward", median_ms=5.0)
    write(tmp_path / GPU_MACHINE, attention(128, False, "forward", flops_per_s=4.5e14), fast, loss)
    assert list(measured(tmp_path).values())[4:] == ["450 TFLOP/s", "5 ms", "1.20"]


def test_records_become_rows(tmp_path):
    missing = replace(norm(1024, "forward", "quack"), status="unsupported", flags=["quack is not installed"])
    wrong = replace(norm(1024, "forward", "torch"), status="unsupported", flags=["wrong result: off"], metrics={})
    write(tmp_path / "test-gpu", norm(1024, "forward"), missing, wrong, attention(64, True, "forward"))
    norms, attentions = kernel_tables(tmp_path)
    assert norms.startswith("**NVIDIA H200**, 1 threads, torch 2.11, norms:")
    assert "| 8 x 1024 bf16 | forward | ours | 1 ms ± 1% | 900 us | 4000 | 97% |" in norms
    assert "| 8 x 1024 bf16 | forward | torch | wrong result: off |  |  |  |" in norms
    assert "quack" not in norms
    assert "| 16 x 16384 x 64 bf16 causal | forward | ours | 1 ms ± 1% | 1 ms | 400 T | 50% |" in attentions
    assert measured_tables(tmp_path, "kernels") == f"{norms}\n\n{attentions}"


def test_fused_kernels_stand_beside_their_floor(tmp_path):
    config = {
        "candidate": "ours",
        "kernel": "swiglu",
        "pass": "forward-backward",
        "rows": 8,
        "columns": 64,
        "dtype": "bf16",
    }
    metrics = TIMES | {"flops": 0, "bytes_per_s": 4e12, "floor_fraction_median": 0.93}
    write(tmp_path / "test-gpu", Record("fused", config, STAMP, [1.0], metrics, {"median_ms": 0.9}))
    (table,) = kernel_tables(tmp_path)
    assert "| swiglu 8 x 64 bf16 | both | ours | 1 ms ± 1% | 900 us | 4 TB/s | 93% |" in table


def test_a_page_without_records_says_how_to_get_them(tmp_path):
    assert measured_tables(tmp_path, "kernels").startswith("Not measured yet: `python -m benchmarks.norms`")
