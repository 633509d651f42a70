"""Decisions: the fastest layout for some models and machines, as `cost search` finds it, and the loss with others."""

from functools import cache
from typing import Any, NamedTuple

from cs336_systems.cost.domain import time_range
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.search import Search, search
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.presets import model_preset
from writeup.book import Book
from writeup.tables import Table

LIMIT = 600  # configurations of a search: enough for every layout, so that a build stays short


class Case(NamedTuple):
    """A model on a number of GPUs of a system, with a global batch in sequences."""

    size: str
    gpus: int
    batch: int
    system: str = "H100"


CASES = (Case("llama-8b", 8, 128), Case("llama-8b", 64, 512), Case("llama-70b", 64, 256), Case("llama-70b", 512, 1024))


def content(book: Book) -> dict[str, Any]:
    """The winner of each case, and the price of every tensor-parallel degree."""
    found = {case: searched(case) for case in CASES}
    return {"table": winners(book, found), "losses": losses(book, found), "f": spoken(found)}


@cache
def searched(case: Case) -> Search:
    """The layouts of one case."""
    config = model_preset(case.size)
    return search(config, config.context_length, system_preset(case.system), case.gpus, case.batch, limit=LIMIT)


def spoken(found: dict[Case, Search]) -> dict[str, Any]:
    """Factors that the highest degree of tensor parallelism within a node costs."""
    price = [loss.factor for each in found.values() for loss in each.losses if loss.axis == "tp" and loss.value == 8]
    return {"price": [each for each in price if each > 1]}


def winners(book: Book, found: dict[Case, Search]) -> Table:
    """Model, machine, the fastest layout that fits, its time with its range, and memory."""
    rows = []
    for case, each in found.items():
        best = each.best[0]
        plan, (low, high) = best.plan, time_range(best.step)
        degrees = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "dp": plan.dp}
        layout = " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        spread = f"{format_seconds(low)} to {format_seconds(high)}"
        rows.append([case.size, f"{case.gpus} x {case.system}", str(case.batch), layout, str(plan.zero),
                     str(best.step.config.recompute), format_seconds(best.step.total), spread, f"{best.step.mfu:.0%}",
                     format_bytes(best.memory)])  # fmt: skip
    heads = ("<model", "<on", "sequences", "<fastest layout", "ZeRO", "<recompute", "step", "range", "MFU", "memory")
    return Table(book, heads, rows)


def losses(book: Book, found: dict[Case, Search]) -> Table:
    """Time of the best layout with another degree of tp, of pp or ZeRO stage, over the winner's."""
    rows = []
    for case, each in found.items():
        for axis in ("tp", "pp", "zero"):
            cells = [
                f"{loss.value}: {loss.factor:.2f}" if loss.best else f"{loss.value}: does not fit"
                for loss in each.losses
                if loss.axis == axis
            ]
            rows.append([f"{case.size}, {case.gpus} x {case.system}", axis, ", ".join(cells)])
    return Table(book, ("<model and machine", "<choice", "<value: time over the winner's"), rows)
