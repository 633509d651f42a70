"""Decisions: the fastest layout for some models and machines, as `cost search` finds it, and the loss with others."""

from functools import cache
from itertools import product
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
    """Factors that the highest degree of tensor parallelism within a node costs, and (tp, pp, ZeRO stage) of the
    fastest layouts by model."""
    price = [loss.factor for each in found.values() for loss in each.losses if loss.axis == "tp" and loss.value == 8]
    best: dict[str, list[tuple[int, int, int]]] = {}
    for case, each in found.items():
        plan = each.best[0].plan
        best.setdefault(case.size, []).append((plan.tp, plan.pp, plan.zero))
    return {"price": [each for each in price if each > 1], "best": best}


def winners(book: Book, found: dict[Case, Search]) -> Table:
    """Model, machine, the fastest layout that fits, its time with its range, and memory."""
    rows = []
    for case, each in found.items():
        best = each.best[0]
        plan, (low, high) = best.plan, time_range(best.step)
        degrees = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "dp": plan.dp}
        rows.append({
            "<model": case.size, "<on": f"{case.gpus} x {case.system}", "sequences": str(case.batch),
            "<fastest layout": " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1),
            "ZeRO": str(plan.zero), "<recompute": str(best.step.config.recompute),
            "step": format_seconds(best.step.total), "range": f"{format_seconds(low)} to {format_seconds(high)}",
            "MFU": f"{best.step.mfu:.0%}", "memory": format_bytes(best.memory),
        })  # fmt: skip
    return Table(book, rows)


def losses(book: Book, found: dict[Case, Search]) -> Table:
    """Time of the best layout with another degree of tp, of pp or ZeRO stage, over the winner's."""
    rows = []
    for (case, each), axis in product(found.items(), ("tp", "pp", "zero")):
        cells = [
            f"{loss.value}: {loss.factor:.2f}" if loss.best else f"{loss.value}: does not fit"
            for loss in each.losses
            if loss.axis == axis
        ]
        name = f"{case.size}, {case.gpus} x {case.system}"
        rows.append({"<model and machine": name, "<choice": axis, "<value: time over the winner's": ", ".join(cells)})
    return Table(book, rows)
