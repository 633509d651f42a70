"""The roofline notebook: its tables, the corrected physics beside them, and the model's error on real runs."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from cs336_systems.cost.commands.notebook_page import MACHINE, compared
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.notebook.tables import DIFFERENCES, UNITS, Kind, Notebook
from cs336_systems.cost.notebook.tables import Table as NotebookTable
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plots import roofline
from cs336_systems.host.text import markdown_code, markdown_text
from cs336_systems.presets import model_preset
from writeup.book import Book
from writeup.cost_runs import Published, by_family, error_picture, far_off, published_runs
from writeup.figures import drawn
from writeup.narrow import narrowed
from writeup.tables import Table
from writeup.words import joined

SHOWN = (
    "flops_fwd", "total_mem_fwd", "intensity", "t_comp_fwd", "t_mem_fwd", "t_comm_fwd", "t_total_fwd", "t_total_bwd",
)  # fmt: skip
TOTALS = ("activation_buffer", "weights_mem", "flops_fwd", "flops_bwd", "t_total_fwd", "t_total_bwd")
HEADS: dict[Kind, tuple[str, ...]] = {
    "wrong": ("<", "<the notebook", "<right", "<effect"),
    "missing": ("<left out", "<right", "<effect"),
}


def content(book: Book) -> dict[str, Any]:
    """Both tables and their sums, one layer corrected, the differences, the pictures and the published runs."""
    notebook = Notebook()
    runs = published_runs()
    return {
        "config": notebook,
        "compared": corrected(book, notebook),
        "differences": {kind: differences(book, kind) for kind in HEADS},
        "roofline": picture(notebook),
        "wrong": far_off(runs),
        "runs_picture": error_picture("roofline-runs", runs),
    }  # fmt: skip


def operators(book: Book, table: NotebookTable) -> Table:
    """A row for each operator of one of the notebook's tables, of its columns those that make the time."""
    rows = [[markdown_code(str(row["layer"])), *(f"{row[name]:.3g}" for name in SHOWN)] for row in table.rows]
    heads = [f"{markdown_code(name)}{f', {UNITS[name]}' if UNITS[name] else ''}" for name in SHOWN]
    return Table(book, ("<layer", *heads), rows)


def sums(book: Book, tables: list[NotebookTable]) -> Table:
    """Columns that the notebook adds up over all layers, of those that give the cost of a step."""
    found = [each.totals() for each in tables]
    rows = [
        [f"{markdown_code(name)}, {UNITS[name]}", *(f"{each[name]:.4g}" for each in found),
         f"{sum(each[name] for each in found):.4g}"]
        for name in TOTALS
    ]  # fmt: skip
    return Table(book, ("<total", *(each.title for each in tables), "both"), rows)


def corrected(book: Book, notebook: Notebook) -> Table:
    """One layer's sums, the notebook's and corrected."""
    rows = [
        [each["name"], each["unit"], f"{each['notebook']:.4g}", f"{each['corrected']:.4g}",
         f"{each['corrected'] / each['notebook']:.2f}"]
        for each in compared(notebook)
    ]  # fmt: skip
    return Table(book, ("<one layer, one GPU", "<unit", "the notebook", "corrected", "ratio"), rows)


def changed(notebook: Notebook) -> str:
    """Corrected over the notebook's figures, in a clause."""
    found = {each["name"]: each["corrected"] / each["notebook"] for each in compared(notebook)}
    said = [
        f"{found[f'forward {name}']:.2f} times the {words} forward and {found[f'backward {name}']:.2f} times backward"
        for name, words in (("computes", "FLOPs"), ("reads and writes", "bytes"), ("time", "time"))
    ]
    return joined(said)


def differences(book: Book, kind: Kind) -> Table:
    """The differences of a kind."""
    rows = []
    for each in DIFFERENCES:
        if each.kind == kind:
            cells = [each.name, each.notebook, each.right, each.effect]
            rows.append([markdown_text(cell) for cell in cells if cell or kind != "missing"])
    return Table(book, HEADS[kind], rows)


def near(runs: Sequence[Published]) -> str:
    """Number of families that are predicted within 5% on average: a clause."""
    families = by_family(runs).values()
    within = [found for found in families if fmean(abs(each.error) for each in found) <= 0.05]
    return f"{len(within)} of {len(families)} families of runs within 5% on average"


def picture(notebook: Notebook) -> Any:
    """The operators of the notebook's layer under the roofs of its machine."""
    config = model_preset("gpt3-175b").override(context_length=notebook.seq, attention="naive", dropout=0.1)
    plan = Plan(tp=notebook.tp, sequence=True, micro_batch=notebook.batch, global_batch=notebook.batch)
    canvas = roofline.draw(config, plan, notebook.seq, system_preset(MACHINE))
    return drawn(
        "roofline-operators", narrowed(canvas),
        "Every operator of the notebook's layer, and the head that it leaves out, under the roofs of its machine: "
        "dashed the data sheet's, solid the attainable one. On the slope, memory limits an operator.",
        "Operators as points of FLOP/s over FLOPs a byte, under two rooflines",
    )  # fmt: skip
