"""Markdown tables of the kernels' records: the distance to each goal, and the candidates shape by shape."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, fused, norms
from benchmarks.attention import LEADERBOARD
from benchmarks.lib.contest import OURS, format_ms
from benchmarks.lib.kernel import BOTH, FORWARD
from benchmarks.lib.kernel_sheet import Sheet, time_cells
from benchmarks.lib.sheets import pages
from benchmarks.records import Record, read_records
from cs336_systems.host.console import format_count
from cs336_systems.host.table import Table

GPU_MACHINE = "nvidia-h200"
GOAL_COLUMNS = range(1024, 32_769)
# Only these have a goal: at 8 rows, say, launching takes longer than the kernel.
NORM_SHAPES = {(*task.sizes, task.dtype) for task in norms.NormSettings().tasks(torch.device("cuda"))}


@dataclass(frozen=True)
class Goal:
    """Goal of a kernel on an H200, the records that show it, and how; the `worst` of them counts."""

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


def _named(config: dict[str, Any]) -> bool:
    return (config["rows"], config["columns"], config["dtype"]) in NORM_SHAPES


def _norm(what: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: config["pass"] == what and config["columns"] in GOAL_COLUMNS and _named(config)


def _attention(number: int, what: str) -> Callable[[dict[str, Any]], bool]:
    task = LEADERBOARD[number]
    shape = {"grid": task.grid, "seq": task.seq, "dim": task.dim, "causal": task.causal, "pass": what}
    shape |= {"batch": task.batch, "dtype": task.dtype}
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
        # Forward moves 2/5 of the bytes, at 95% of a copy's speed, backward 3/5, at 90%: 1 / (0.4 / 0.95 + 0.6 / 0.9).
        "RMSNorm forward and backward, 1K to 32K columns, of a copy's speed", "92%", "norms", NORMS,
        _norm("forward-backward"), _metric("copy_fraction_median"), "{:.0%}".format, min,
    ),
    Goal(
        "RMSNorm's time over the best other's, any shape", "1.00", "norms", NORMS,
        _named, _metric("ratio_median"), "{:.2f}".format,
    ),
    Goal(
        "host time of an RMSNorm forward", "25 us", "norms", NORMS,
        lambda config: config["pass"] == FORWARD and _named(config), _metric("host_us"), "{:.1f} us".format,
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
        lambda config: (config["kernel"], config["dtype"]) == ("cross-entropy", "bf16"),
        _metric("floor_ratio_median"), "{:.2f}".format,
    ),
)  # fmt: skip


def goals_table(results: Path) -> str:
    """The kernels' goals on an H200 and the worst that was measured there."""
    lines = ["**Kernels, on one NVIDIA H200:**", "", "| kernel | goal | measured |", "| --- | --: | --- |"]
    lines += [f"| {goal.what} | {goal.goal} | {goal.measured(results / GPU_MACHINE)} |" for goal in GOALS]
    return "\n".join(lines)


def norm_shown(config: dict[str, Any]) -> bool:
    """Forward with backward; forward alone only at the course's shapes, in fp32."""
    return bool(config["pass"] == BOTH or config["dtype"] == "fp32")


def attention_shown(config: dict[str, Any]) -> bool:
    """Whole passes: forward with backward, or a forward that keeps nothing for one."""
    return bool(config["pass"] == (BOTH if config["keeps"] else FORWARD))


def fused_shown(config: dict[str, Any]) -> bool:
    """Whole passes: forward with backward, or an optimizer's step."""
    return bool(config["pass"] != FORWARD)


# A page shows the first two of a benchmark's columns.
SHEETS = {
    "norms": (norms.SHEET, norm_shown),
    "attention": (attention.SHEET, attention_shown),
    "fused": (fused.SHEET, fused_shown),
}


def row(sheet: Sheet, record: Record) -> list[str]:
    """One candidate on one shape."""
    start = [sheet.shape(record), record.config["pass"], record.config["candidate"]]
    if record.status != "ok":
        return [*start, record.flags[0] if record.flags else record.status, "", "", ""]
    return [*start, *time_cells(record), *(cell(record) for _, cell in sheet.columns[:2])]


def sheets(records: list[Record]) -> list[Table]:
    """One benchmark's whole passes on one machine, without the candidates that cannot do them."""
    if not records:
        return []
    (sheet, whole), where = SHEETS[records[0].benchmark], records[-1].environment
    title = f"{where['device']}, {where['threads']} threads, torch {where['torch']}, {records[0].benchmark}"
    heads = (sheet.what, "pass", "candidate", "median", "predicted", *(head for head, _ in sheet.columns[:2]))
    rows = [row(sheet, record) for record in records if record.status != "unsupported" and whole(record.config)]
    return [Table(title, heads, rows)] if rows else []


def kernel_tables(results: Path) -> list[str]:
    """The Markdown tables of every machine."""
    return [page for benchmark in SHEETS for page in pages(results, benchmark, sheets)]
