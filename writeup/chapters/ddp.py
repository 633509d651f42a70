"""Data parallelism: when gradients are reduced, how much of it backward hides, and buckets."""

from typing import Any

from writeup.book import Book, Citation, facts, sections
from writeup.cells import median_ms
from writeup.chapters import buckets, wrappers
from writeup.errors import Unmeasured
from writeup.schematics import wrappers as wrappers_picture


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the sections, and the values that its sentences quote."""
    found = {"f": facts(lambda: spoken(book)), "orders": wrappers_picture()}
    return found | sections(book, wrappers, buckets)


def spoken(book: Book) -> dict[str, Any]:
    """Overlap by the traces of `overlapped`, and what steps expose: of a small model over gloo and over shared memory,
    and of the course's `small` over shared memory and between two nodes."""
    traced = book.cite("profiling", ranks=2, wrapper="overlapped").need()
    steps = book.cite("ddp", d_model=512, context=32, link="")
    own, slow = (book.cite("ddp", size="small", **where) for where in ({"link": "", "backend": "shm"}, {"link": bool}))
    sized = [each.metrics for each in own.measured if "communication_ms" in each.metrics]
    alone, naive = (slow.need(candidate=name) for name in (wrappers.ALONE, "naive"))
    return {
        "gloo": exposed(steps.only(backend="gloo")), "shm": exposed(steps.only(backend="shm")), "slow": exposed(slow),
        "least": [min(found, key=found.__getitem__) for found in (exposed(own), exposed(slow))],
        "overlap": min(traced.metrics["overlap"]), "most": max(traced.metrics["overlap"]),
        "alone": steps.need(backend="gloo", candidate="overlapped").metrics["communication_ms"],
        "longer": naive.metrics["communication_ms"] / median_ms(alone),
        "share": max(each["communication_share"] for each in sized),
        "times": min(each["exposed_ms"] / each["communication_ms"] for each in sized),
    }  # fmt: skip


def exposed(cited: Citation) -> dict[str, float]:
    """Milliseconds of communication that each of our wrappers exposes."""
    if not (found := {each.config["candidate"]: each.metrics for each in cited.measured}):
        raise Unmeasured(cited.command)
    return {name: each["exposed_ms"] for name, each in found.items() if "communication_ms" in each}
