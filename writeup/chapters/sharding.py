"""Sharding the optimizer, the gradients and the parameters: ZeRO and FSDP."""

from statistics import median
from typing import Any

from writeup.book import Book, facts
from writeup.chapters import fsdp, optimizer_sharding
from writeup.schematics import resting
from writeup.words import pair_ratios


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the sections, and the values that its sentences quote."""
    found: dict[str, Any] = {"f": facts(lambda: spoken(book)), "resting": resting()}
    for part in (optimizer_sharding, fsdp):
        found |= {f"{part.__name__.rpartition('.')[2]}_{key}": value for key, value in part.content(book).items()}
    return found


def spoken(book: Book) -> dict[str, Any]:
    """Bytes at rest of each stage against stage 0 and against the prediction, and times over stage 0."""
    run = book.cite("zero", link="", d_model=512, context=32, backend="gloo")
    stages = [run.need(candidate=f"stage {stage}") for stage in range(4)]
    rest = [fsdp.total(each) for each in stages]
    exact = [fsdp.total(each, True) / fsdp.total(each) for each in stages]
    ratios = [median(pair_ratios(each, stages[0])) for each in stages]
    peer = median(pair_ratios(stages[3], run.need(candidate="torch FSDP2")))
    return {"rest": [each / rest[0] for each in rest], "low": min(exact), "high": max(exact), "ratios": ratios,
            "peer": peer}  # fmt: skip
