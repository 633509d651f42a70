"""Data parallelism: when gradients are reduced, how much of it backward hides, and buckets."""

from typing import Any

from writeup.book import Book, facts
from writeup.chapters import buckets, wrappers
from writeup.schematics import wrappers as wrappers_picture


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the sections, and the values that its sentences quote."""
    found: dict[str, Any] = {"f": facts(lambda: spoken(book)), "orders": wrappers_picture()}
    for part in (wrappers, buckets):
        found |= {f"{part.__name__.rpartition('.')[2]}_{key}": value for key, value in part.content(book).items()}
    return found


def spoken(book: Book) -> dict[str, Any]:
    """Overlap by the traces of `overlapped`, and what its step exposes, over gloo and over shared memory."""
    traced = book.cite("profiling", ranks=2, wrapper="overlapped").need()
    where = {"d_model": 512, "context": 32, "link": ""}
    steps = book.cite("ddp", where)
    found = {}
    for backend in ("gloo", "shm"):
        naive, flat, overlapped = (
            steps.need(backend=backend, candidate=name).metrics["exposed_ms"]
            for name in ("naive", "flat", "overlapped")
        )
        found[backend] = {"naive": naive, "flat": flat, "overlapped": overlapped}
    sized = [each.metrics for each in book.cite("ddp", size="small", link="", backend="shm").measured]
    sized = [each for each in sized if "communication_ms" in each]
    if sized:
        found["small"] = {"share": max(each["communication_share"] for each in sized),
                          "times": min(each["exposed_ms"] / each["communication_ms"] for each in sized)}  # fmt: skip
    slow = book.cite("ddp", link=bool, backend="gloo")
    naive, overlapped = (slow.need(candidate=name).metrics["exposed_ms"] for name in ("naive", "overlapped"))
    return found | {"overlap": min(traced.metrics["overlap"]), "most": max(traced.metrics["overlap"]),
                    "alone": steps.need(backend="gloo", candidate="overlapped").metrics["communication_ms"],
                    "slow": 1 - overlapped / naive}  # fmt: skip
