"""Sharding the optimizer, the gradients and the parameters: ZeRO and FSDP."""

from statistics import median
from typing import Any

from writeup.book import Book, facts, sections
from writeup.chapters import fsdp, optimizer_sharding
from writeup.layer_schematics import gather_ahead
from writeup.schematics import resting
from writeup.words import pair_ratios


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the sections, and the values that its sentences quote."""
    found = {"f": facts(lambda: spoken(book)), "resting": resting(), "gather_ahead": gather_ahead()}
    return found | sections(book, optimizer_sharding, fsdp)


def spoken(book: Book) -> dict[str, Any]:
    """Bytes at rest of each stage against stage 0 and against the prediction, and times over stage 0 and over FSDP2, of
    the course's `small` over shared memory and over a slow link."""
    run, slow = (book.cite("zero", size="small", **where) for where in ({"link": "", "backend": "shm"}, {"link": bool}))
    stages, apart = ([each.need(candidate=f"stage {stage}") for stage in range(4)] for each in (run, slow))
    rest = [fsdp.total(each) for each in stages]
    exact = [fsdp.total(each, True) / fsdp.total(each) for each in stages]
    ratios, on_link = ([median(pair_ratios(each, ours[0])) for each in ours] for ours in (stages, apart))
    peers = [median(pair_ratios(each.need(candidate="stage 3"), each.need(candidate="torch FSDP2")))
             for each in (run, slow)]  # fmt: skip
    sent = fsdp.sent_bytes(apart[3]) / fsdp.sent_bytes(apart[0])
    return {"rest": [each / rest[0] for each in rest], "low": min(exact), "high": max(exact), "ratios": ratios,
            "on_link": on_link, "peers": peers, "sent": sent}  # fmt: skip
