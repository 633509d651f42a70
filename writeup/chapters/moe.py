"""A mixture of experts in evaluation: routed by a sort and by one-hot products, and where fairseq's time went."""

from collections.abc import Sequence
from typing import Any

from benchmarks.expert_tables import arithmetic, is_published
from benchmarks.moe_sweep_plot import draw as draw_sweep
from benchmarks.moe_sweep_table import cells as sweep_cells
from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation, facts, metric, Unmeasured
from writeup.cells import NONE, median_ms, prediction, ratio, timing
from writeup.figures import Figure, drawn
from writeup.moe_profile import calls_table, published_shares, published_times, same_calls
from writeup.narrow import narrowed
from writeup.tables import Table
from writeup.words import error_of, joined, times

# What each benchmark measures unless told otherwise.
SETTINGS: dict[str, dict[str, Any]] = {
    "moe_layer": {
        "experts": 512,
        "tokens": 2048,
        "d_model": 64,
        "top_k": 2,
        "skew": 0.0,
        "backward": False,
        "link": "",
    },
    "moe_eval": {"size": "fairseq-moe-twin", "eval_fraction": 0.05, "context": 2048},
    "moe_sweep": {"tokens": 2048, "d_model": 64, "top_k": 2, "skew": 0.5, "backward": False},
}


def content(book: Book) -> dict[str, Any]:
    """Tables of a layer, of evaluations, of calls and of the sweep, and what the commentary is made of."""
    layer, evaluation, sweep = (book.cite(name, settings) for name, settings in SETTINGS.items())
    counted = next((record for record in evaluation.measured if is_published(record)), None)
    chosen = largest_cells(sweep)
    return {
        "arithmetic": arithmetic().markdown(0).partition("\n\n")[2],
        "layer": layer_table(book, layer),
        "evaluation": evaluation_table(book, evaluation),
        "agreement": agreement(evaluation.measured.records),
        "bytes": bytes_said(evaluation.measured.records),
        "in_turn": in_turn(evaluation.measured.records),
        "published": published_times(book),
        "shares": published_shares(book),
        "calls": calls_table(book, evaluation, counted),
        "same_calls": same_calls(counted),
        "sweep": sweep_table(book, chosen),
        "sweep_picture": sweep_picture(sweep) if sweep.measured else None,
        "f": facts(lambda: spoken(sweep)),
        "layer_shape": _layer_shape(layer),
        "layer_counts": layer_counts(layer),
        "widths": [model_preset(name).d_model for name in ("fairseq-moe-15b", "fairseq-moe-twin")],
        "sweep_shape": f"{chosen.values('experts')[0]} experts on {chosen.values('ranks')[0]} ranks" if chosen else "",
        "layer_said": layer_said(layer),
    }


def layer_table(book: Book, cited: Citation) -> Table:
    """One expert layer: a row for each candidate."""
    rows = [
        [
            markdown_text(record.config["candidate"]), timing(book, record), prediction(record), ratio(record),
            format_count(record.predicted["flops"]), f"{metric(record, 'rows'):,.0f} ({record.predicted['rows']:,})",
            f"{_mb(metric(record, 'all_to_all_bytes'))} ({_mb(record.predicted['all_to_all_bytes'])})",
            format_bytes(metric(record, "peak_memory_bytes") or 0),
        ]
        for record in cited.measured
    ]  # fmt: skip
    columns = (
        "<formulation", "CPU time, median", "predicted (of measured)", "over sort's, pair by pair", "FLOPs",
        "rows sent (predicted)", "bytes of an all-to-all (predicted)", "memory",
    )  # fmt: skip
    return Table(book, columns, rows, cited)


def _layer_shape(cited: Citation) -> str:
    if not cited:
        return ""
    config = cited.records[0].config
    return (
        f"{config['experts']} experts of {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens a rank, "
        f"{config['ranks']} ranks"
    )


def _mb(nbytes: float | None) -> str:
    return NONE if nbytes is None else f"{nbytes / 1e6:.3g} MB"


def evaluation_table(book: Book, cited: Citation) -> Table:
    """A row for each evaluation: layout, formulation, speed, bytes, waiting, loss."""
    order = sorted(
        cited.measured, key=lambda r: (r.config["ranks"], r.config["tp"], r.config["moe"], r.config["words"])
    )
    rows = []
    for record in order:
        config, found, waits = record.config, record.metrics, metric(record, "waiting")
        sent, due = found["bytes_per_all_to_all"], record.predicted.get("bytes_per_all_to_all")
        rows.append([
            str(config["ranks"]), f"{config['tp']} x {config['ep']}", config["moe"], config["words"],
            str(found["tokens"] // config["context"]), timing(book, record), f"{found['tokens_per_s']:,.0f}",
            format_seconds(found["cpu_ms_per_layer"] / 1e3), f"{_mb(sent)} ({_mb(due)})" if sent else NONE,
            f"{sum(waits) / len(waits):.0%}", f"{found['loss']:.6f}",
        ])  # fmt: skip
    columns = (
        "ranks", "tp x ep", "<formulation", "<words", "blocks", "a batch, median", "tokens/s",
        "CPU an expert layer", "all-to-all (predicted)", "waiting", "loss, base 2",
    )  # fmt: skip
    return Table(book, columns, rows, cited)


def agreement(records: Sequence[Record]) -> list[str]:
    """How far the losses of the same blocks lie apart, over layouts and formulations."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(int(metric(record, "tokens")), []).append(record)
    said = []
    for tokens, found in groups.items():
        losses = [float(metric(record, "loss")) for record in found]
        if len(found) > 1:
            ways = joined(dict.fromkeys(record.config["moe"] for record in found))
            apart = (max(losses) - min(losses)) / min(losses)
            said.append(f"{len(found)} evaluations ({ways}) of {tokens:,} tokens: losses apart by {apart:.1e} at most")
    return said


def bytes_said(records: Sequence[Record]) -> list[str]:
    """Bytes of an all-to-all: measured over predicted, and over predicted less what was dropped."""
    einsum: list[tuple[float, float, float]] = []  # sent, predicted, share kept
    sort: list[tuple[float, float, float]] = []
    for record in records:
        due, sent = record.predicted.get("bytes_per_all_to_all"), record.metrics.get("bytes_per_all_to_all")
        if due and sent:
            kept = 1 - record.metrics["dropped"] if record.config["moe"] == "sort" else 1.0
            (sort if record.config["moe"] == "sort" else einsum).append((sent, due, kept))
    said = []
    if einsum:
        off = max(abs(sent - due) for sent, due, _ in einsum)
        said.append("one-hot: " + ("equal to the prediction, to the byte" if not off else f"{off:,.0f} bytes off"))
    if sort:
        low, high = min(s / d for s, d, _ in sort), max(s / d for s, d, _ in sort)
        off = max(abs(sent - due * kept) for sent, due, kept in sort)
        said.append(
            f"sort: {low:.3f} to {high:.3f} of the prediction, which is for a balanced router; what is dropped is not "
            "sent, and the prediction less the share that was dropped "
            + ("is what was sent, to the byte" if off < 0.5 else f"is off by {off:,.0f} bytes")
        )
    return said


def in_turn(records: Sequence[Record]) -> list[str]:
    """One-hot over sort, of the evaluation in which both took turns."""
    found: dict[str, float] = next((r.metrics["ratios"] for r in records if r.metrics.get("ratios")), {})
    words = {
        "cpu_per_layer": "the CPU time of an expert layer", "cpu_per_batch": "the CPU time of a batch",
        "seconds": "the time by the clock", "bytes_per_all_to_all": "the bytes of an all-to-all",
    }  # fmt: skip
    return [f"{times(value)} {words[name]}" for name, value in found.items()]


def sweep_table(book: Book, cited: Citation) -> Table:
    """Rows of the sweep, one for each capacity."""
    rows = []
    for cell in sweep_cells(cited.measured.records):
        sort, einsum = cell["sort"], cell.get("einsum")
        config, found = sort.config, sort.metrics
        slots = "as needed" if config["slots"] is None else str(config["slots"])
        rows.append([
            markdown_text(config["capacity"]), slots, f"{found['dropped_share']:.1%}", timing(book, sort),
            prediction(sort), timing(book, einsum), prediction(einsum), ratio(einsum),
        ])  # fmt: skip
    columns = (
        "<capacity", "slots", "dropped", "sort, CPU time", "predicted", "one-hot, CPU time", "predicted",
        "one-hot / sort",
    )  # fmt: skip
    return Table(book, columns, rows, cited)


def largest_cells(cited: Citation) -> Citation:
    """Of the sweep, the cells with the most experts on the most ranks; the figure has the others."""
    if not cited:
        return cited
    return cited.only(ranks=max(cited.values("ranks")), experts=max(cited.values("experts")))


def sweep_picture(cited: Citation) -> Figure:
    """The sweep in three panels."""
    return drawn(
        "moe-sweep", narrowed(draw_sweep(list(cited.measured))),
        "The sweep: CPU time over experts, bytes over capacity, and what is dropped over capacity.",
        "Three panels: time over the number of experts, bytes and dropped choices over capacity",
    )  # fmt: skip


def spoken(cited: Citation) -> dict[str, Any]:
    """CPU time of one-hot over sort, over all settings of the sweep. Raises Unmeasured without any."""
    found = [
        float(metric(cell["einsum"], "ratio_median"))
        for cell in sweep_cells(cited.measured.records)
        if {"sort", "einsum"} <= cell.keys()
    ]
    if not found:
        raise Unmeasured(cited.command)
    return {"cells": len(found), "more": sum(each > 1 for each in found), "low": min(found), "high": max(found)}


def layer_said(cited: Citation) -> str:
    """One-hot against sort in a layer, in a clause."""
    one, other = (next((r for r in cited.measured if r.config["candidate"] == n), None) for n in ("einsum", "sort"))
    if not (one and other):
        return ""
    flops = one.predicted["flops"] / other.predicted["flops"]
    share = metric(one, "system_ms") / median_ms(one)
    return (
        f"one-hot needs {times(metric(one, 'ratio_median'))} the CPU time of sort for {times(flops)} the FLOPs, and "
        f"{share:.0%} of that is the operating system's, which finds new pages for large tensors"
    )


def layer_counts(cited: Citation) -> str:
    """How many of a layer's counts are as predicted, beside its times: a sentence, or nothing."""
    names = ("rows", "all_to_all_bytes")
    pairs = [(metric(r, name), r.predicted[name]) for r in cited.measured for name in names if r.predicted.get(name)]
    if not pairs:
        return ""
    same = sum(abs(seen - due) < 0.5 for seen, due in pairs if seen is not None)
    return (
        f"Of {len(pairs)} counts of rows and bytes {same} are as predicted, exactly; of its times, {error_of(cited)}."
    )
