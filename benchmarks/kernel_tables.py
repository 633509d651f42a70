"""Markdown tables of the kernels' records: the distance to each goal, and the candidates shape by shape."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, fused, norms
from benchmarks.attention import Attention
from benchmarks.lib.contest import OURS, format_ms
from benchmarks.lib.kernel import FORWARD
from benchmarks.lib.sheets import pages
from benchmarks.records import read_records
from cs336_systems.host.console import format_count

GPU_MACHINE = "nvidia-h200"
GOAL_COLUMNS = range(1024, 32_769)
# Only these have a goal: at 8 rows, say, launching takes longer than the kernel.
NORM_SHAPES = {(*task.sizes, task.dtype) for task in norms.NormSettings().tasks(torch.device("cuda"))}


@dataclass(frozen=True)
class Goal:
    """Goal of a kernel on an H200, the records that show it, and how; the `worst` of them counts."""

    what: str
    goal: str
    command: str
    selected: Callable[[dict[str, Any]], bool]
    metric: str
    shown: Callable[[float], str]
    worst: Callable[[Iterable[float]], float] = max

    def measured(self, folder: Path) -> str:
        """The worst of the matching records, or that there is none."""
        path = folder / f"{self.command.split()[0]}.jsonl"
        records = read_records(path) if path.exists() else []
        ours = [r for r in records if r.status == "ok" and r.config.get("candidate", OURS) == OURS]
        known = [v for r in ours if self.selected(r.config) and (v := r.metrics.get(self.metric)) is not None]
        return self.shown(self.worst(known)) if known else f"not yet measured: `python -m benchmarks.{self.command}`"


def _named(config: dict[str, Any]) -> bool:
    return (config["rows"], config["columns"], config["dtype"]) in NORM_SHAPES


def _norm(what: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: config["pass"] == what and config["columns"] in GOAL_COLUMNS and _named(config)


def _attention(number: int, what: str) -> Callable[[dict[str, Any]], bool]:
    wanted = Attention([OURS], 1, "").config(OURS, attention.LEADERBOARD[number], what)
    return lambda config: config == wanted


GOALS = (
    Goal(
        "RMSNorm forward, 1K to 32K columns, of a copy's speed", "95%", "norms",
        _norm("forward"), "copy_fraction_median", "{:.0%}".format, min,
    ),
    Goal(
        # Forward moves 2/5 of the bytes, at 95% of a copy's speed, backward 3/5, at 90%: 1 / (0.4 / 0.95 + 0.6 / 0.9).
        "RMSNorm forward and backward, 1K to 32K columns, of a copy's speed", "92%", "norms",
        _norm("forward-backward"), "copy_fraction_median", "{:.0%}".format, min,
    ),
    Goal(
        "RMSNorm's time over the best other's, any shape", "1.00", "norms",
        _named, "ratio_median", "{:.2f}".format,
    ),
    Goal(
        "host time of an RMSNorm forward", "25 us", "norms",
        lambda config: config["pass"] == FORWARD and _named(config), "host_us", "{:.1f} us".format,
    ),
    Goal(
        "attention forward, 16 x 16,384 x 128, bf16", "430 TFLOP/s", "attention --grid leaderboard",
        _attention(1, "forward"), "flops_per_s", lambda value: f"{format_count(value)}FLOP/s", min,
    ),
    Goal(
        "attention of the 2025 leaderboard, forward and backward", "5.36 ms", "attention --grid leaderboard",
        _attention(0, "forward-backward"), "median_ms", format_ms,
    ),
    Goal(
        "fused head and loss, over its three matrix products", "1.25", "fused --kernel cross-entropy",
        lambda config: (config["kernel"], config["dtype"]) == ("cross-entropy", "bf16"),
        "floor_ratio_median", "{:.2f}".format,
    ),
)  # fmt: skip


def goals_table(results: Path) -> str:
    """The kernels' goals on an H200 and the worst that was measured there."""
    lines = ["Goals on one NVIDIA H200:", "", "| kernel | goal | measured |", "| --- | --: | --- |"]
    lines += [f"| {goal.what} | {goal.goal} | {goal.measured(results / GPU_MACHINE)} |" for goal in GOALS]
    return "\n".join(lines)


SHEETS = {"norms": norms.SHEET, "attention": attention.SHEET, "fused": fused.SHEET}


def kernel_pages(results: Path) -> list[str]:
    """The kernels' goals, then the Markdown tables of every machine; nothing without records."""
    tables = [page for name, sheet in SHEETS.items() for page in pages(results, name, sheet.page)]
    return [goals_table(results), *tables] if tables else []
