"""Sharding the optimizer's state: the formulas for the course's models, beside what others have published."""

from functools import cache
from itertools import product
from typing import Any, Literal

import torch

from cs336_systems.comm import Event, fake_ranks, record
from cs336_systems.cost.closed_forms import zero_memory
from cs336_systems.cost.course.memory import parameters_of
from cs336_systems.host.console import format_bytes
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.optim.adamw import AdamW
from cs336_systems.presets import course_sizes, model_preset
from cs336_systems.sharded_optimizer import ShardedOptimizer
from cs336_systems.traffic import sent
from writeup.book import Book
from writeup.cells import DOUBTFUL, NONE, beside, joined, quoted
from writeup.publications import ORIGINAL
from writeup.tables import Table

YEAR, RANKS = 2024, 2
WHOLE, SHARDED = "stage 0", "stage 1"
STUDENTS = {"brandon-snider": 2025, "damek": 2025, "enzo-ding": 2026}
Traffic = list[tuple[str, int]]  # verbs and bytes of collectives
PARTS = ("parameters", "gradients", "optimizer")
MOMENTS = {"after initialisation": PARTS[:1], "before the step": PARTS[:2], "after the step": PARTS}
GIB = 2**30


def content(book: Book) -> dict[str, Any]:
    """Memory and times that others published, the formula beside them, and the collectives of each way to shard."""
    return {
        "course": course(book),
        "students": students(book),
        "their_times": their_times(book),
        "collectives": collectives(book),
        "shares": shares(book),
    }


@cache
def updates(size: str, year: int, layout: Literal["flat", "whole"]) -> list[Event]:
    """The collectives of a step of `ShardedOptimizer` for a course size in fp32, observed on one of two ranks."""
    with fake_ranks(0, RANKS), record() as events:
        model = TransformerLM(model_preset(size, year), "meta")
        optimizer = ShardedOptimizer(model.parameters(), AdamW, layout=layout)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    return events


def course(book: Book) -> Table:
    """Results of the formula for the original's sizes, beside its own figures where it has them."""
    theirs, rows = beside(book, ORIGINAL, "sharding memory", "GiB"), []
    for size, (candidate, stage) in product(course_sizes(YEAR), ((WHOLE, 0), (SHARDED, 1))):
        found = zero_memory(parameters_of(size, YEAR), 0, RANKS, stage)
        row = {"<size": size, "<state": "whole" if stage == 0 else "sharded"}
        for place, (moment, alive) in enumerate(MOMENTS.items()):
            keys = {"moment": moment, "candidate": candidate}
            measured = [theirs.cell(**keys, rank=rank) for rank in range(RANKS)] if size == "xl" else []
            row[f"{moment}, predicted"] = f"{sum(found[part] for part in alive) / GIB:.2f} GiB"
            row["2024" + " " * place] = ", ".join(each for each in measured if each != NONE) or NONE
        rows.append(row)
    return Table(book, rows, notes=theirs.notes)


def students(book: Book) -> Table:
    """Others' peaks and times of the xl model of their year, and what the formula would save on two ranks."""
    rows = []
    for source, year in STUDENTS.items():
        theirs = book.published.table(source, "sharding")
        whole, sharded = ([theirs.value(column, candidate=name, size="xl") for column in ("peak", "time")]
                          for name in (WHOLE, SHARDED))  # fmt: skip
        count = parameters_of("xl", year)
        expected = sum(zero_memory(count, 0, RANKS, 0).values()) - sum(zero_memory(count, 0, RANKS, 1).values())
        if whole[0] and whole[1] and sharded[0] and sharded[1]:
            saved = whole[0].value - sharded[0].value
            rows.append({
                "<source": f"{source}, xl of {year}", "<on": theirs.hardware,
                "peak, whole to sharded": f"{whole[0].text} to {sharded[0].text}",
                "saved": f"{saved / GIB:.1f} GiB, predicted {expected / GIB:.1f} GiB",
                "step (of whole)":
                    f"{whole[1].text} to {sharded[1].text} ({sharded[1].value / whole[1].value:.2f})",
            })  # fmt: skip
    return Table(book, rows)


def their_times(book: Book) -> Table:
    """The original's steps, whole and sharded, on one node and on two."""
    theirs, rows = beside(book, ORIGINAL, "sharding times", "ms"), []
    for size in course_sizes(YEAR):
        row = {"<size": size}
        for nodes, end in ((1, ""), (2, " ")):
            pair = [theirs.value(size=size, nodes=nodes, candidate=name) for name in (WHOLE, SHARDED)]
            whole, sharded = (quoted(book, each, "ms") for each in pair)
            sound = DOUBTFUL not in whole + sharded  # of a doubtful figure there is no ratio to quote
            share = f"{pair[1].value / pair[0].value:.2f}" if pair[0] and pair[1] and sound else NONE
            row |= {f"{nodes} node{'s' * (nodes > 1)}, whole": whole, f"sharded{end}": sharded, f"ratio{end}": share}
        rows.append(row)
    return Table(book, rows, notes=theirs.notes)


@cache
def schemes(size: str = "xl", year: int = YEAR) -> dict[str, tuple[Traffic, Traffic, float]]:
    """Each way to shard: collectives of gradients and of parameters, and the largest share over an equal one."""
    with torch.device("meta"):
        tensors = [each.numel() for each in TransformerLM(model_preset(size, year)).parameters()]
    total = sum(tensors)
    whole, flat = ([(each.verb, each.nbytes) for each in updates(size, year, layout)] for layout in ("whole", "flat"))
    padded = sum(nbytes for _, nbytes in flat)
    unequal, equal = max(nbytes for _, nbytes in whole) * RANKS / (4 * total), padded / (4 * total)
    reduced, scattered = [("all-reduce", 4 * total)], [("reduce-scatter", padded)]
    return {
        "the assignment: a broadcast for each tensor": (
            reduced,
            [("broadcast", 4 * each) for each in tensors],
            unequal,
        ),
        "ours, layout `whole`: a broadcast from each rank": (reduced, whole, unequal),
        "ours, layout `flat`: one all-gather": (reduced, flat, equal),
        "ZeRO stage 1": (scattered, flat, equal),
    }


def traffic_bytes(traffic: Traffic) -> float:
    """Bytes that a rank sends, on average over the ranks."""
    return sum(sent(verb, RANKS) * nbytes for verb, nbytes in traffic)


def collectives(book: Book) -> Table:
    """Calls and bytes of each scheme for the original's xl model."""
    rows = []
    for name, (gradients, updated, share) in schemes().items():
        sizes = {"gradients": gradients, "parameters": updated, "sent in all": gradients + updated}
        rows.append({
            "<scheme": name, "<gradients": gradients[0][0], "calls for parameters": str(len(updated)),
            **{head: format_bytes(traffic_bytes(each)) for head, each in sizes.items()},
            "largest share": f"{share:.4f}",
        })  # fmt: skip
    return Table(book, rows)


def shares(book: Book) -> str:
    """The original's two shares of the state against tensors dealt out largest first."""
    theirs = book.published.table(ORIGINAL, "sharding memory by part")
    found = [theirs.value(part="optimizer state", candidate=SHARDED, rank=rank) for rank in range(RANKS)]
    loads = [each.numel for each in updates("xl", YEAR, "whole")]
    ours = joined(f"{8 * load / GIB:.3f}" for load in sorted(loads))
    shown = joined(each.shown("GiB") for each in found if each) if any(found) else ""
    return (
        f"The original's ranks hold {shown} GiB of state; with tensors assigned largest first they would hold "
        f"{ours} GiB, and in the flat layout the same to a few bytes."
    )
