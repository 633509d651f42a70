"""Tables of the records of several ranks: all-reduce, the data-parallel wrappers, ZeRO."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.collective import size_name
from benchmarks.lib.sheets import MARK, day, groups, machine, median, pages, ratio, time
from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_count
from cs336_systems.host.table import Table
from cs336_systems.presets import with_edition

KINDS = ("parameters", "gradients", "optimizer")
ALL_REDUCE = (
    *("ranks", "backend", "tensors", "size", "mean", "± std", "median", "predicted"),
    *("algbw", "busbw", "of a copy", "rank spread"),
)
ALL_REDUCE_NOTE = (
    "predicted: latency of an all-reduce of 4 KiB + 2 (ranks - 1) / ranks x size / link, where link is the speed of "
    "all ranks sending 8 MB to the next at once; both measured first. algbw: size / time; busbw: what leaves a rank; "
    "of a copy: the time in which all ranks copy a tensor of this size in their memory, as a share of the all-reduce's."
    f" {MARK}"
)
DDP = ("candidate", "step", "predicted", "/ torch DDP", "collectives", "sent", "they alone", "exposed")
DDP_NOTE = (
    "sent: bytes that leave a rank in a step. they alone: those collectives with nothing else to do, and their share "
    "of the step. exposed: what a step takes longer than one without communication, median of pairs; the rest is "
    f"hidden. {MARK}"
)
TIMES = ("candidate", "step", "predicted", "/ torch's ZeRO 1", "/ FSDP2", "reductions", "gathers", "sent")
TIMES_NOTE = (
    "reductions, gathers: the collectives of gradients and of parameters by themselves, and the share of the step that "
    f"the latter would take; sent: bytes that leave a rank in a step. {MARK}"
)
MEMORY = ("candidate", *KINDS, "in all", "by the formula", "activations")
MEMORY_NOTE = (
    "live storages of the fullest rank: after initialisation, what backward added before the step, what the first step "
    "added; activations: what forward keeps. PyTorch's DDP, and what is built on it, holds its buckets in C++, which "
    "this does not see: as much as the gradients once more."
)


def all_reduce_row(record: Record) -> list[str]:
    """One size on some ranks."""
    config, metrics, flagged = record.config, record.metrics, "*" * bool(record.flags)
    start = [str(config["ranks"]), config["backend"], config["device"], size_name(config["bytes"])]
    if record.status != "ok":
        status = "does not fit" if record.status == "out-of-memory" else record.status
        return [*start, status, *[""] * (len(ALL_REDUCE) - len(start) - 1)]
    times = [time(metrics[f"{key}_ms"]) + mark for key, mark in (("mean", ""), ("std", ""), ("median", flagged))]
    times.append(time(record.predicted["mean_ms"]))
    speeds = [f"{size_name(metrics[key])}/s" for key in ("algorithm_bytes_per_s", "bus_bytes_per_s")]
    speeds.append(f"{metrics['copy_ms'] / metrics['median_ms']:.0%}" if "copy_ms" in metrics else "-")
    return [*start, *times, *speeds, time(metrics["rank_spread_ms"])]


def ddp_row(record: Record) -> list[str]:
    """One candidate."""
    metrics = record.metrics
    cells = [record.config["candidate"], median(record), time(record.predicted["mean_ms"]), ratio(metrics)]
    cells += ["", "", ""]
    if "collectives" in metrics:
        alone = f"{time(metrics['communication_ms'])} ({metrics['communication_share']:.0%})"
        cells[-3:] = [str(metrics["collectives"]), format_bytes(metrics["bytes_sent"]), alone]
    return [*cells, time(metrics["exposed_ms"]) if "exposed_ms" in metrics else ""]


def times_row(record: Record) -> list[str]:
    """Times of one candidate of the benchmark of ZeRO."""
    metrics = record.metrics
    cells = [record.config["candidate"], median(record), time(record.predicted["mean_ms"])]
    cells += [ratio(metrics, f"{peer}_") for peer in ("zero", "fsdp")]
    if "reductions_ms" not in metrics:
        return [*cells, "", "", ""]
    sent = metrics["reductions_bytes_sent"] + metrics["gathers_bytes_sent"]
    gathers = f"{time(metrics['gathers_ms'])} ({metrics['update_share']:.0%})" * bool(sent)
    return [*cells, time(metrics["reductions_ms"]), gathers, format_bytes(sent)]


def memory_row(record: Record) -> list[str]:
    """Memory of one candidate of the benchmark of ZeRO."""
    metrics = record.metrics
    held, formula = ([part[f"{kind}_bytes"] for kind in KINDS] for part in (metrics, record.predicted))
    beside = f"{format_bytes(sum(formula))} ({sum(held) / sum(formula) - 1:+.1%})"
    cells = [*map(format_bytes, held), format_bytes(sum(held)), beside, format_bytes(metrics["activations_bytes"])]
    return [record.config["candidate"], *cells]


SHEETS = {
    "allreduce": (("All-reduce (mean) of float32", ALL_REDUCE, all_reduce_row, ALL_REDUCE_NOTE),),
    "ddp": (("Data-parallel training step", DDP, ddp_row, DDP_NOTE),),
    "zero": (
        ("ZeRO training step", TIMES, times_row, TIMES_NOTE),
        ("Memory of a rank", MEMORY, memory_row, MEMORY_NOTE),
    ),
}


def settings(record: Record) -> str:
    """Settings that a table's records share, and where they were measured."""
    config, metrics = record.config, record.metrics
    parts = []
    if "d_model" in config:
        size = with_edition(config["size"], config["year"])
        shape = f"width {config['d_model']}, {config['layers']} blocks"
        ranks = f"{config['ranks']} {config['backend']} ranks with {record.environment['threads']} thread(s) each"
        count = f", {format_count(metrics['parameters'])} parameters" if "parameters" in metrics else ""
        parts.append(f"{size}{count}, {shape}, batch {config['batch_size']} x {config['context']} a rank, {ranks}")
        parts.append(f"link {metrics['latency_ms']:.2g} ms + size / {format_count(metrics['link_bytes_per_s'])}B/s")
    if config["link"] or config["nodes"] > 1:
        parts.append(config["link"] or f"{config['nodes']} nodes")
    return "; ".join([*parts, machine(record)])


def sheets(records: Sequence[Record]) -> list[Table]:
    """Tables of a benchmark's records, apart for each shape, machine and state of the code."""
    found = []
    for group in groups(records, settings):
        group.sort(key=lambda each: (each.config["backend"], each.config["ranks"], each.config.get("bytes", 0)))
        for title, heads, row, note in SHEETS[group[0].benchmark]:
            found.append(Table(f"{title}; {settings(group[0])}, {day(group)}", heads, list(map(row, group)), note))
    return found


def parallel_tables(results: Path) -> list[str]:
    """The Markdown tables of every machine."""
    return [page for name in SHEETS for page in pages(results, name, sheets, shared=True)]
