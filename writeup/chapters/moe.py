"""A mixture of experts in evaluation: routed by a sort and by one-hot products, and where fairseq's time went."""

from dataclasses import replace
from typing import Any

from benchmarks.lib.expert_calls import OF_WORDS, PUBLISHED, expected, spread
from benchmarks.lib.expert_tables import arithmetic, is_published
from benchmarks.lib.expert_tables import cells as sweep_cells
from benchmarks.moe_sweep import draw as draw_sweep
from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.text import markdown_code, markdown_text
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation, facts, metric
from writeup.cells import NONE, prediction, ratio, times, timing
from writeup.errors import Unmeasured
from writeup.figures import Figure, drawn
from writeup.layer_schematics import sorted_experts
from writeup.tables import Table

# What each benchmark measures unless told otherwise.
LAYER = {"tokens": 2048, "d_model": 64, "top_k": 2, "backward": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "moe_layer": LAYER | {"experts": 512, "skew": 0.0, "link": ""},
    "moe_eval": {"size": "fairseq-moe-twin", "eval_fraction": 0.05, "context": 2048},
    "moe_sweep": LAYER | {"skew": 0.5},
}
SHAPE = "{experts} experts of {d_model} x {d_ff}, {tokens} tokens a rank, {ranks} ranks"  # of a layer
PROFILE, TIMES = "fairseq-moe-profile", "times"
COMPARE = "python -m benchmarks.moe_eval --nproc 4 --moe both --profile --words slow"


def content(book: Book) -> dict[str, Any]:
    """Tables of a layer, of evaluations, of calls and of the sweep, and the values of the commentary."""
    layer, evaluation, sweep = (book.cite(name, settings) for name, settings in SETTINGS.items())
    counted = next((record for record in evaluation.measured if is_published(record)), None)
    most = {axis: max(sweep.values(axis)) for axis in ("ranks", "experts")} if sweep else {}
    chosen = sweep.only(most)  # the figure has the others
    return {
        "arithmetic": arithmetic().markdown(0).partition("\n\n")[2],
        "layer": layer_table(book, layer),
        "evaluation": evaluation_table(book, evaluation),
        "published": published_times(book),
        "shares": published_shares(book),
        "calls": calls_table(book, evaluation, counted),
        "same_calls": same_calls(counted),
        "sweep": sweep_table(book, chosen),
        "sorted_experts": sorted_experts(),
        "sweep_picture": sweep_picture(sweep) if sweep.measured else None,
        "f": facts(lambda: spoken(sweep)),
        "layer_shape": SHAPE.format(**layer.records[0].config) if layer else "",
        "widths": [model_preset(name).d_model for name in ("fairseq-moe-15b", "fairseq-moe-twin")],
        "sweep_shape": f"{most['experts']} experts on {most['ranks']} ranks" if most else "",
    }


def layer_table(book: Book, cited: Citation) -> Table:
    """One expert layer: a row for each candidate."""
    rows = []
    for record in cited.measured:
        said = record.predicted
        sent = f"{_mb(metric(record, 'all_to_all_bytes'))} ({_mb(said['all_to_all_bytes'])})"
        rows.append({
            "<formulation": markdown_text(record.config["candidate"]), "CPU time, median": timing(book, record),
            "predicted (of measured)": prediction(record), "over sort's, pair by pair": ratio(record),
            "FLOPs": format_count(said["flops"]),
            "rows sent (predicted)": f"{metric(record, 'rows'):,.0f} ({said['rows']:,})",
            "bytes of an all-to-all (predicted)": sent,
            "memory": format_bytes(metric(record, "peak_memory_bytes") or 0),
        })  # fmt: skip
    return Table(book, rows, cited)


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
        rows.append({
            "ranks": str(config["ranks"]), "tp x ep": f"{config['tp']} x {config['ep']}",
            "<formulation": config["moe"], "<words": config["words"],
            "blocks": str(found["tokens"] // config["context"]), "a batch, median": timing(book, record),
            "tokens/s": f"{found['tokens_per_s']:,.0f}",
            "CPU an expert layer": format_seconds(found["cpu_ms_per_layer"] / 1e3),
            "all-to-all (predicted)": f"{_mb(sent)} ({_mb(due)})" if sent else NONE,
            "waiting": f"{sum(waits) / len(waits):.0%}", "loss, base 2": f"{found['loss']:.6f}",
        })  # fmt: skip
    return Table(book, rows, cited)


def sweep_table(book: Book, cited: Citation) -> Table:
    """Rows of the sweep, one for each capacity."""
    rows = []
    for cell in sweep_cells(cited.measured.records):
        sort, einsum = cell["sort"], cell.get("einsum")
        rows.append({
            "<capacity": markdown_text(sort.config["capacity"]),
            "slots": "as needed" if sort.config["slots"] is None else str(sort.config["slots"]),
            "dropped": f"{sort.metrics['dropped_share']:.1%}",
            "sort, CPU time": timing(book, sort), "predicted": prediction(sort),
            "one-hot, CPU time": timing(book, einsum), "predicted ": prediction(einsum),
            "one-hot / sort": ratio(einsum),
        })  # fmt: skip
    return Table(book, rows, cited)


def sweep_picture(cited: Citation) -> Figure:
    """The sweep in three panels."""
    return drawn(
        "moe-sweep", draw_sweep(list(cited.measured)),
        "The sweep: CPU time over experts, bytes and dropped choices over capacity.",
        "Three panels: time over the number of experts, bytes and dropped choices over capacity",
    )  # fmt: skip


def published_times(book: Book) -> Table:
    """The times of the published profile, with their share of the whole."""
    table, rows = book.published.table(PROFILE, TIMES), []
    whole = table.rows[0].values
    for each in table.rows:
        row = {"<of": markdown_code(str(each.keys["name"]))}
        for column, head in zip(table.values, ("CPU total (of all)", "GPU (of all)"), strict=True):
            value = each.values.get(column)
            row[head] = f"{value.text} ({value.value / whole[column].value:.0%})" if value else NONE
        rows.append(row)
    return Table(book, rows)


def published_shares(book: Book) -> dict[str, str]:
    """Shares that the published times make."""

    def seconds(name: str, column: str) -> float:
        value = book.published.value(PROFILE, TIMES, column, name=name)
        return value.value if value else 0.0

    wall, busy, sent = seconds("everything", "cpu"), seconds("everything", "cuda"), seconds("all-to-all", "cuda")
    layer = {name: seconds(f"TransformerDecoderLayer {name} MoE", "cuda") for name in ("with", "without")}
    return {
        "busy": f"{busy / wall:.0%}",
        "working": f"{(busy - sent) / wall:.1%}",
        "sent": f"{sent / busy:.0%}",
        "outside": f"{1 - seconds('TransformerDecoder', 'cpu') / wall:.0%}",
        "first": f"{seconds('aten::eq', 'cpu') + seconds('cudaFree', 'cpu'):.1f} s",
        "layers": times(layer["with"] / layer["without"]),
        "launch": f"{seconds('cudaLaunchKernel', 'cpu') / wall:.0%}",
    }


def calls_table(book: Book, cited: Citation, record: Record | None) -> Table:
    """The operators of the one-hot formulation, ours beside the published, and what they follow from."""
    rows = []
    if record is not None:
        config = replace(model_preset(record.config["size"]), attention="naive")
        due = expected(config, record.config["ep"], record.config["batches"])
        rows = [
            {
                "<calls": markdown_code(name), "ours, each rank": spread(metric(record, "calls")[name]),
                "published": f"{theirs:,}", "<which is": due[name][1] if name in due else "reads of words, mostly",
            }
            for name, theirs in (PUBLISHED | OF_WORDS).items()
        ]  # fmt: skip
    return Table(book, rows, Citation(cited.benchmark, COMPARE, (record,) if record else (), cited.keys))


def same_calls(record: Record | None) -> str:
    """Number of operators whose calls equal the published number."""
    if record is None:
        return ""
    calls = metric(record, "calls")
    same = [name for name, theirs in PUBLISHED.items() if set(calls[name]) == {theirs}]
    return f"{len(same)} of {len(PUBLISHED)} published call counts equal ours"


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
