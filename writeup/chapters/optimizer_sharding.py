"""Sharding the optimizer's state: memory saved, time added, and the difference from ZeRO stage 1."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text
from writeup.book import Book, Citation, metric
from writeup.cells import age
from writeup.chapters import sharding_published as published
from writeup.chapters.sharding_published import MOMENTS, PARTS, SHARDED, WHOLE
from writeup.figures import COLOURS, Figure, draw
from writeup.tables import Table

TORCH = "torch ZeroRedundancyOptimizer"
CANDIDATES = (WHOLE, SHARDED, "stage 1, whole", TORCH)


def content(book: Book) -> dict[str, Any]:
    """Memory at three points, ours and predicted for the course's sizes; times; collectives; the commentary."""
    return {
        "course": published.course(book),
        "parts": published.parts(book),
        "students": published.students(book),
        "their_times": published.their_times(book),
        "collectives": published.collectives(book),
        "shares": published.shares(book),
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
