"""Markdown tables of the kernels' records: how far each goal is, and how the candidates compare, shape by shape."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import fused
from benchmarks.attention import LEADERBOARD
from benchmarks.contest import OURS
from benchmarks.kernel_run import format_ms
from benchmarks.records import Record, read_records
from cs336_systems.console import format_count

GPU_MACHINE = "nvidia-h200"
GOAL_COLUMNS = range(1024, 32_769)


@dataclass(frozen=True)
class Goal:
    """What a kernel should reach on an H200, which records show it, and how they say it; `worst` of them counts."""

    what: str
    goal: str
    benchmark: str
    command: str
    selected: Callable[[dict[str, Any]], bool]
    value: Callable[[Record], float | None]
    shown: Callable[[float], str]
    worst: Callable[[Iterable[float]], float] = max

    def measured(self, folder: Path) -> str:
        """The worst of the matching records, or that there is none."""
        path = folder / f"{self.benchmark}.jsonl"
        records = read_records(path) if path.exists() else []
        ours = [r for r in records if r.status == "ok" and r.config.get("candidate", OURS) == OURS]
        values = [self.value(r) for r in ours if self.selected(r.config)]
        known = [value for value in values if value is not None]
        return self.shown(self.worst(known)) if known else f"not yet measured: `{self.command}`"


def _norm(what: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: config["pass"] == what and config["columns"] in GOAL_COLUMNS


def _attention(number: int, what: str) -> Callable[[dict[str, Any]], bool]:
    task = LEADERBOARD[number]
    shape = {"grid": task.grid, "seq": task.seq, "dim": task.dim, "causal": task.causal, "pass": what}
    return lambda config: all(config[key] == value for key, value in shape.items())


def _metric(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.metrics.get(name)


NORMS, ATTENTION, FUSED = (
    "python -m benchmarks.norms",
    "python -m benchmarks.attention --grid leaderboard",
    "python -m benchmarks.fused --kernel cross-entropy",
)
GOALS = (
    Goal(
        "RMSNorm forward, 1K to 32K columns, of a copy's speed", "95%", "norms", NORMS,
        _norm("forward"), _metric("copy_fraction_median"), "{:.0%}".format, min,
    ),
    Goal(
        "RMSNorm forward and backward (95% and 90%)", "92%", "norms", NORMS,
        _norm("forward-backward"), _metric("copy_fraction_median"), "{:.0%}".format, min,
    ),
    Goal(
        "RMSNorm's time over the best other's, any shape", "1.00", "norms", NORMS,
        lambda config: True, _metric("ratio_median"), "{:.2f}".format,
    ),
    Goal(
        "host time of an RMSNorm forward", "25 us", "norms", NORMS,
        _norm("forward"), _metric("host_us"), "{:.1f} us".format,
    ),
    Goal(
        "attention forward, 16 x 16,384 x 128, bf16", "430 TFLOP/s", "attention", ATTENTION,
        _attention(1, "forward"), _metric("flops_per_s"), lambda value: f"{format_count(value)}FLOP/s", min,
    ),
    Goal(
        "attention of the 2025 leaderboard, forward and backward", "5.36 ms", "attention", ATTENTION,
        _attention(0, "forward-backward"), _metric("median_ms"), format_ms,
    ),
    Goal(
        "fused head and loss, over its three matrix products", "1.25", "fused", FUSED,
        lambda config: config["kernel"] == "cross-entropy", _metric("floor_ratio_median"), "{:.2f}".format,
    ),
)  # fmt: skip


def goals_table(results: Path) -> str:
    """The kernels' goals on an H200 and the worst that was measured there."""
    lines = ["**Kernels, on one NVIDIA H200:**", "", "| kernel | goal | measured |", "| --- | --: | --- |"]
    lines += [f"| {goal.what} | {goal.goal} | {goal.measured(results / GPU_MACHINE)} |" for goal in GOALS]
    return "\n".join(lines)


def norm_row(record: Record) -> list[str]:
    """One candidate on one shape."""
    config, metrics = record.config, record.metrics
    start = [f"{config['rows']} x {config['columns']} {config['dtype']}", config["pass"], config["candidate"]]
    if record.status != "ok":
        return [*start, record.flags[0] if record.flags else record.status, "", "", ""]
    time = f"{format_ms(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
    copy = f"{metrics['copy_fraction_median']:.0%}" if "copy_fraction_median" in metrics else ""
    speed = f"{metrics['bytes_per_s'] / 1e9:.4g}"
    return [*start, time, format_ms(record.predicted["median_ms"]), speed, copy]


def attention_row(record: Record) -> list[str]:
    """One candidate on one shape."""
    config, metrics = record.config, record.metrics
    shape = f"{config['batch']} x {config['seq']} x {config['dim']} {config['dtype']}{' causal' * config['causal']}"
    start = [shape, config["pass"], config["candidate"]]
    if record.status != "ok":
        return [*start, record.flags[0] if record.flags else record.status, "", "", ""]
    time = f"{format_ms(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
    speed = [format_count(metrics["flops_per_s"]), f"{metrics['mfu']:.0%}"]
    return [*start, time, format_ms(record.predicted["median_ms"]), *speed]


def fused_row(record: Record) -> list[str]:
    """One candidate on one shape, against its floor: a copy of as many bytes, or the matrix products alone."""
    where, what = fused.heading(record).rsplit(", ", 1)
    start = [where, what, record.config["candidate"]]
    if record.status != "ok":
        return [*start, record.flags[0] if record.flags else record.status, "", "", ""]
    time, predicted, rate, floor, *_ = fused.cells(record)
    return [*start, time, predicted, rate, floor]


SHEETS: dict[str, tuple[tuple[str, ...], Callable[[Record], list[str]]]] = {
    "norms": (("rows x columns", "pass", "candidate", "median", "predicted", "GB/s", "of copy"), norm_row),
    "attention": (("batch x seq x dim", "pass", "candidate", "median", "predicted", "FLOP/s", "MFU"), attention_row),
    "fused": (("kernel", "pass", "candidate", "median", "predicted", "rate", "of floor"), fused_row),
}


def kernel_tables(results: Path) -> list[str]:
    """One table for each machine and benchmark that there are records of; peers that are not installed are left out."""
    tables = []
    for benchmark, (head, row) in SHEETS.items():
        for path in sorted(results.glob(f"*/{benchmark}.jsonl")):
            records = [r for r in read_records(path) if not any("not installed" in flag for flag in r.flags)]
            where = records[-1].environment
            title = f"**{where['device']}**, {where['threads']} threads, torch {where['torch']}, {benchmark}:"
            lines = [title, "", f"| {' | '.join(head)} |", f"|{' --- |' * 3}{' --: |' * (len(head) - 3)}"]
            tables.append("\n".join(lines + [f"| {' | '.join(row(record))} |" for record in records]))
    return tables
