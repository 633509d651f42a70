"""Sharding the optimizer's state: memory saved, time added, and the difference from ZeRO stage 1."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.host.text import markdown_text
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, age, prediction, ratio, timing
from writeup.chapters import sharding_published as published
from writeup.chapters.sharding_published import MOMENTS, PARTS, SHARDED, WHOLE
from writeup.figures import COLOURS, Figure, draw
from writeup.rank_runs import ZERO, model_of, runs_of
from writeup.tables import Table, missing
from writeup.words import faster

TORCH = "torch ZeroRedundancyOptimizer"
CANDIDATES = (WHOLE, SHARDED, "stage 1, whole", TORCH)


def content(book: Book) -> dict[str, Any]:
    """Memory at three points, ours and predicted for the course's sizes; times; collectives; the commentary."""
    cited = book.cite("zero", link="", candidate=CANDIDATES, command=ZERO)
    runs = runs_of(cited)
    return {
        "memory": [(model_of(run), memory(book, run)) for run in runs],
        "times": [(model_of(run), measured_times(book, run)) for run in runs],
        "missing": missing([cited]),
        "picture": picture(runs[0]) if runs else None,
        "course": published.course(book),
        "parts": published.parts(book),
        "students": published.students(book),
        "their_times": published.their_times(book),
        "collectives": published.collectives(book),
        "shares": published.shares(book),
        "said": [line for run in runs for line in commentary(run)],
        "command": ZERO,
    }


def at(record: Record, moment: str, predicted: bool = False) -> float:
    """Bytes on the fullest rank at one of the three points."""
    source = record.predicted if predicted else record.metrics
    return float(sum(source[f"{part}_bytes"] for part in MOMENTS[moment]))


def memory(book: Book, run: Citation) -> Table:
    """The three points, in brackets predicted over measured, then the parts that they add."""
    rows = []
    for record in run:
        found = {moment: (at(record, moment), at(record, moment, True)) for moment in MOMENTS}
        cells = [f"{format_bytes(there)}{age(book, record)} ({said / there:.2f})" for there, said in found.values()]
        cells += [format_bytes(metric(record, f"{part}_bytes")) for part in (*PARTS[1:], "activations")]
        rows.append([markdown_text(str(record.config["candidate"])), *cells])
    columns = ("<optimizer", *MOMENTS, *PARTS[1:], "activations")
    return Table(book, columns, rows, run)


def measured_times(book: Book, run: Citation) -> Table:
    """A step with whole and with sharded state, and what the collectives take alone."""
    rows = []
    for record in run:
        found = record.metrics
        alone = [NONE] * 3
        if "reductions_ms" in found:
            bytes_sent = found["reductions_bytes_sent"] + found["gathers_bytes_sent"]
            alone = [format_seconds(found["reductions_ms"] / 1e3), NONE, format_bytes(bytes_sent)]
        if found.get("gathers_ms"):
            alone[1] = f"{format_seconds(found['gathers_ms'] / 1e3)} ({found['update_share']:.0%})"
        name = markdown_text(str(record.config["candidate"]))
        rows.append([name, timing(book, record), prediction(record), ratio(record, "zero_ratio"), *alone])
    columns = ("<optimizer", "step", "predicted (of measured)", "over torch's", "all-reduces alone",
               "gathers alone (of step)", "sent")  # fmt: skip
    return Table(book, columns, rows, run)


def picture(run: Citation) -> Figure:
    """The three points as stacked bars, whole and sharded."""

    def into(axes: Any) -> None:
        for place, name in zip(axes, (WHOLE, SHARDED), strict=True):
            record, floor = run.one(candidate=name), [0.0] * len(MOMENTS)
            for colour, part in zip(COLOURS, PARTS, strict=False):
                size = metric(record, f"{part}_bytes") / 2**20 if record else 0.0
                heights = [size if part in MOMENTS[moment] else 0.0 for moment in MOMENTS]
                place.bar(list(MOMENTS), heights, bottom=floor, color=colour, label=part)
                floor = [low + height for low, height in zip(floor, heights, strict=True)]
            expected = [at(record, moment, True) / 2**20 if record else 0.0 for moment in MOMENTS]
            place.plot(list(MOMENTS), expected, "k_", markersize=16, label="predicted")
            place.set(ylabel="MiB on a rank", title={WHOLE: "whole state", SHARDED: "sharded state"}[name])
            place.tick_params(axis="x", labelsize=7)
        axes[1].sharey(axes[0])
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

    return draw(
        "optimizer-sharding-memory", "Memory of a rank at three points of the first step; a stroke is the prediction.",
        "Stacked bars of parameters, gradients and optimizer state at three points, whole and sharded", into, columns=2,
    )  # fmt: skip


def commentary(run: Citation) -> list[str]:
    """Memory saved and time added by sharding in one run."""
    whole, sharded, other = (run.one(candidate=name) for name in (WHOLE, SHARDED, "stage 1, whole"))
    if not whole or not sharded:
        return []
    saved = at(whole, "after the step") - at(sharded, "after the step")
    expected = at(whole, "after the step", True) - at(sharded, "after the step", True)
    width = f"At width {whole.config['d_model']}"
    said = [
        f"{width}, sharding saves {format_bytes(saved)} after the step ({format_bytes(expected)} predicted) and "
        f"{format_bytes(at(whole, 'before the step') - at(sharded, 'before the step'))} before the first.",
        f"{width}, {faster('the sharded optimizer', sharded, 'the whole one', whole)}; its gather alone takes "
        f"{metric(sharded, 'update_share'):.0%} of the step.",
    ]
    if other:
        more = at(other, "after the step") - at(sharded, "after the step")
        said.append(
            f"{width}, of the layouts, {faster('`flat`', sharded, '`whole`', other)}; the fullest rank holds "
            f"{format_bytes(more)} more with whole tensors, which cannot be dealt out evenly."
        )
    if torch := run.one(candidate=TORCH):
        said.append(f"{width}, {faster('our sharded optimizer', sharded, 'the one of PyTorch', torch)}.")
    return said
