"""Markdown tables of the records of several ranks: all-reduce, the data-parallel wrappers, ZeRO."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.collective import size_name
from benchmarks.records import Record, read_records
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.text import markdown_row, markdown_text

Row = Callable[[Record], list[str]]
KINDS = ("parameters", "gradients", "optimizer")


def milliseconds(value: float) -> str:
    """A time in the unit that suits it."""
    return format_seconds(value / 1e3)


def measured(record: Record) -> str:
    """The median and the relative standard deviation, with a mark if that is large."""
    metrics = record.metrics
    spread = f"{metrics['std_ms'] / metrics['mean_ms']:.0%}" + ("*" if record.flags else "")
    return f"{milliseconds(metrics['median_ms'])} ± {spread}"


def all_reduce_row(record: Record) -> list[str]:
    """One size on some ranks."""
    config, metrics = record.config, record.metrics
    start = [f"{config['ranks']} {config['backend']} {config['device']}", size_name(config["bytes"])]
    if record.status != "ok":
        return [*start, record.status, "", "", "", ""]
    speeds = [f"{size_name(metrics[key])}/s" for key in ("algorithm_bytes_per_s", "bus_bytes_per_s")]
    spread = milliseconds(metrics["rank_spread_ms"])
    return [*start, measured(record), milliseconds(record.predicted["mean_ms"]), *speeds, spread]


def ddp_row(record: Record) -> list[str]:
    """One candidate."""
    metrics = record.metrics
    ratio = f"{metrics['ratio_median']:.3f} ({metrics['ratio_low']:.3f} to {metrics['ratio_high']:.3f})"
    cells = [record.config["candidate"], measured(record), milliseconds(record.predicted["mean_ms"])]
    if "collectives" not in metrics:
        exposed = milliseconds(metrics["exposed_ms"]) if "exposed_ms" in metrics else ""
        return [*cells, ratio, "", "", exposed]
    alone = f"{milliseconds(metrics['communication_ms'])} ({metrics['communication_share']:.0%})"
    return [*cells, ratio, str(metrics["collectives"]), alone, f"{metrics['exposed_ms']:.0f} ms"]


def zero_row(record: Record) -> list[str]:
    """One candidate: time, then memory."""
    metrics, predicted = record.metrics, record.predicted
    cells = [record.config["candidate"], measured(record), milliseconds(predicted["mean_ms"])]
    for peer in ("zero", "fsdp"):
        low, high = metrics[f"{peer}_ratio_low"], metrics[f"{peer}_ratio_high"]
        cells.append(f"{metrics[f'{peer}_ratio_median']:.3f} ({low:.3f} to {high:.3f})")
    cells.append(f"{metrics['update_share']:.0%}" if "update_share" in metrics else "")
    held = [metrics[f"{kind}_bytes"] for kind in KINDS]
    formula = sum(predicted[f"{kind}_bytes"] for kind in KINDS)
    cells += [format_bytes(each) for each in held]
    return [*cells, f"{format_bytes(sum(held))} ({sum(held) / formula - 1:+.1%})"]


TABLES: dict[str, tuple[str, tuple[str, ...], Row]] = {
    "allreduce": (
        "All-reduce of float32",
        ("ranks", "size", "measured", "predicted", "algorithm", "bus", "rank spread"),
        all_reduce_row,
    ),
    "ddp": (
        "Data-parallel training step",
        ("candidate", "step", "predicted", "/ torch DDP", "collectives", "they alone", "exposed"),
        ddp_row,
    ),
    "zero": (
        "ZeRO training step and memory of a rank",
        (
            *("candidate", "step", "predicted", "/ ZeroRedundancyOptimizer", "/ FSDP2", "gathers' share"),
            *("parameters", "gradients", "optimizer", "in all (against the formula)"),
        ),
        zero_row,
    ),
}


def heading(name: str, record: Record) -> str:
    """Settings that a table's records share."""
    config, where = record.config, record.environment
    commit = f"{str(where['commit'])[:7]}{' with changes' if where['dirty'] else ''}"
    parts = [f"{where['device']}, {where['cores']} cores, torch {where['torch']}"]
    if "d_model" in config:
        shape = (
            f"width {config['d_model']}, {config['layers']} blocks, batch {config['batch_size']} x {config['context']}"
        )
        parts.append(
            f"{shape} a rank, {config['ranks']} {config['backend']} ranks with {where['threads']} thread(s) each"
        )
        link = f"{record.metrics['latency_ms']:.2g} ms + size / {format_count(record.metrics['link_bytes_per_s'])}B/s"
        parts.append(f"link {link}")
    if config["link"]:
        parts.append(config["link"])
    return "; ".join([f"**{TABLES[name][0]}**", *map(markdown_text, [*parts, f"commit {commit}"])])


def markdown(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A Markdown table under its heading, first column to the left."""
    lines = [f"{title}:", "", f"| {' | '.join(columns)} |", f"| --- |{' --: |' * (len(columns) - 1)}"]
    return "\n".join([*lines, *(markdown_row(row) for row in rows)])


def order(config: dict[str, Any]) -> tuple[str, int, int]:
    """Place of a record in its table: by backend, ranks and size; candidates stay as they are."""
    return config["backend"], config["ranks"], config.get("bytes", 0)


def parallel_tables(results: Path) -> list[str]:
    """One table for each benchmark, machine, shape and state of the code that there are records of."""
    tables = []
    for name, (_, columns, row) in TABLES.items():
        for path in sorted(results.glob(f"*/{name}.jsonl")):
            groups: dict[str, list[Record]] = {}
            for record in read_records(path):
                groups.setdefault(heading(name, record), []).append(record)
            for title, group in groups.items():
                group.sort(key=lambda each: order(each.config))
                tables.append(markdown(title, columns, list(map(row, group))))
    return tables
