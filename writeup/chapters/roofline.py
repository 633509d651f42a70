"""The roofline notebook: its tables, the corrected physics beside them, and the model's error on real runs."""

from typing import Any

from cs336_systems.cost.commands.notebook_page import MACHINE, compared, layer
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.notebook.tables import DIFFERENCES, SEQ, SIZES, Kind
from cs336_systems.cost.plots import roofline
from cs336_systems.host.text import markdown_text
from writeup.book import Book
from writeup.cost_runs import error_picture, far_off, published_runs
from writeup.figures import drawn
from writeup.tables import Table

KINDS: tuple[Kind, ...] = ("wrong", "missing")


def content(book: Book) -> dict[str, Any]:
    """Both tables and their sums, one layer corrected, the differences, the pictures and the published runs."""
    runs = published_runs()
    return {
        "config": SIZES,
        "compared": corrected(book),
        "differences": {kind: differences(book, kind) for kind in KINDS},
        **picture(),
        "wrong": far_off(runs),
        "runs_picture": error_picture("roofline-runs", runs),
    }  # fmt: skip


def corrected(book: Book) -> Table:
    """One layer's sums, the notebook's and corrected."""
    rows = [
        {
            "<one layer, one GPU": each["name"], "<unit": each["unit"], "the notebook": f"{each['notebook']:.4g}",
            "corrected": f"{each['corrected']:.4g}", "ratio": f"{each['corrected'] / each['notebook']:.2f}",
        }
        for each in compared()
    ]  # fmt: skip
    return Table(book, rows)


def differences(book: Book, kind: Kind) -> Table:
    """The differences of a kind; of those missing there is nothing that the notebook has."""
    rows = []
    for each in DIFFERENCES:
        if each.kind == kind:
            says = {"<": each.name, "<the notebook": each.notebook} if kind == "wrong" else {"<left out": each.name}
            cells = says | {"<right": each.right, "<effect": each.effect}
            rows.append({head: markdown_text(cell) for head, cell in cells.items()})
    return Table(book, rows)


def picture() -> dict[str, Any]:
    """The operators of the notebook's layer under the roofs of its machine, and the least share of the attainable rate
    that those reach which memory does not limit."""
    (config, plan), system = layer(), system_preset(MACHINE)
    _, attainable = roofline.roofs(plan, system)
    found = roofline.points(config, plan, SEQ, system)
    canvas = roofline.draw(config, plan, SEQ, system)
    shown = drawn(
        "roofline-operators", canvas,
        "Every operator of the notebook's layer, and the head that it leaves out, under the roofs of its machine: "
        "dashed the data sheet's, solid the attainable one. On the slope, memory limits an operator.",
        "Operators as points of FLOP/s over FLOPs a byte, under two rooflines",
    )  # fmt: skip
    unlimited = [each.rate for each in found if each.intensity > attainable.ridge]
    return {"picture": shown, "reached": min(unlimited) / attainable.flops}
