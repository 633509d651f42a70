"""Predicting a step: the cost model's error on runs left out of its fit, and what a roofline leaves out."""

from statistics import mean, median
from typing import Any

from cs336_systems.cost.runs import PUBLISHED, read_runs
from writeup.book import Book, sections
from writeup.chapters import roofline
from writeup.cost_runs import families_table, published_runs

NEAR = 0.1


def content(book: Book) -> dict[str, Any]:
    """The error on runs left out of the fit, the families, and the roofline notebook beside what corrects it."""
    return {
        "f": left_out(),
        "families": families_table(book, published_runs()),
    } | sections(book, roofline)


def left_out() -> dict[str, Any]:
    """Errors of predicted over measured time, each run predicted by constants fitted without its family."""
    found = {run.id: run.given["left_out"] for run in read_runs(PUBLISHED)}
    errors = {name: 1 / ratio - 1 for name, ratio in found.items()}
    sizes = sorted(map(abs, errors.values()))
    return {
        "count": len(errors), "mean": mean(sizes), "median": median(sizes), "near": sum(e <= NEAR for e in sizes),
        "worst": max(found.values()), "tail": sizes[int(0.9 * len(sizes))],
    }  # fmt: skip
