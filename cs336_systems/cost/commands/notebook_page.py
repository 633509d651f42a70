"""The notebook's page: its tables, their mistakes, and the same layer by the corrected physics."""

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cs336_systems.cost.commands.request import on_command_line
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.notebook import tables as nb
from cs336_systems.cost.operator_time import timed_part
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.template import new_table, print_json
from cs336_systems.errors import UserError
from cs336_systems.host.console import console, flag
from cs336_systems.presets import ModelConfig, model_preset

SEED = "seed"  # the preset of the notebook
MACHINE = "A100-40GB"  # the machine of the notebook's data sheet
OPERATORS = 5  # side by side at most


def printed_notebook(context: click.Context, as_json: bool) -> bool:
    """Print the notebook, if its preset is asked for. Raises UserError for options beside it: it has its own sizes."""
    if context.params["size"].lower() != SEED:
        return False
    if strange := sorted(on_command_line(context) - {"size", "as_json"}):
        raise UserError(f"the notebook has sizes of its own: leave out {', '.join(map(flag, strange))}")
    if as_json:
        rows: list[dict[str, Any]] = []
        for key, each in nb.TABLES.items():
            rows += [{"table": key, "kind": "operator", **row} for row in each.rows]
            rows.append({"table": key, "kind": "total", **each.totals(), "communication": each.communication})
        print_json({"rows": rows, "differences": [asdict(each) for each in nb.DIFFERENCES], "layer": compared()})
    else:
        print_notebook(console())
    return True


def print_notebook(screen: Console) -> None:
    """Both tables with totals and shares, differences, stated at the notebook's own sizes, and one layer compared. An
    operator is a column, so that all 31 quantities fit in 120 columns."""
    screen.print(f"{', '.join(f'{name} {size}' for name, size in nb.SIZES.items())}; everything is of one GPU")
    tables = nb.TABLES.values()
    for each in tables:
        for rows in (each.rows[start : start + OPERATORS] for start in range(0, len(each.rows), OPERATORS)):
            layers = [row["layer"] for row in rows]
            shown = ", ".join(layers) if len(each.rows) > OPERATORS else "one layer, one GPU"
            grid = _grid(layers, f"{each.title}: {shown}")
            for section in nb.SECTIONS[1:]:
                for name, unit in section:
                    grid.add_row(name, unit, *(nb.show(row[name]) for row in rows), end_section=name == section[-1][0])
            screen.print(grid)
    grid = _grid([*(each.title for each in tables), "both"], f"totals of {nb.LAYERS} layers")
    for name in nb.SUMMED:
        values = [each.totals()[name] for each in tables]
        grid.add_row(name, nb.UNITS[name], *(f"{value:.6f}" for value in [*values, sum(values)]))
    screen.print(grid)
    for each in tables:
        screen.print(f"{each.title}: share of communication in the forward time {each.communication!r}")

    for kind, head in nb.KINDS.items():
        grid = Table("", *head["columns"], "effect", title=head["title"], title_justify="left", show_lines=True)
        for found in (each for each in nb.DIFFERENCES if each.kind == kind):
            grid.add_row(found.name, *(text for text in (found.notebook, found.right) if text), found.effect)
        screen.print(grid)

    lines = [[*quantity.values(), quantity["corrected"] / quantity["notebook"]] for quantity in compared()]
    columns = ["", "<unit", "the notebook:.4g", "corrected:.4g", "ratio:.2f"]
    screen.print(new_table(columns, lines, f"One layer on one GPU, corrected: an {MACHINE}"))


def _grid(columns: list[str], title: str) -> Table:
    grid = Table("quantity", "unit", title=title, title_justify="left")
    for name in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def layer() -> tuple[ModelConfig, Plan]:
    """The notebook's layer in the model's terms: scores in memory, dropout and sequence parallelism."""
    config = model_preset("gpt3-175b").override(context_length=nb.SEQ, attention="naive", dropout=0.1)
    return config, Plan(tp=nb.TP, sequence=True)


def compared() -> list[dict[str, Any]]:
    """A layer's sums by notebook and model."""
    part = timed_part(*layer(), nb.SEQ, "dense", system_preset(MACHINE))
    ahead, back, operators = part.forward, part.backward, [each.operator for each in part.operators]
    weights = sum(each.weights for each in operators) * nb.ELEMENT_BYTES
    found = [
        ("forward computes", "flops_fwd", ahead.flops * 1e-12),
        ("backward computes", "flops_bwd", back.flops * 1e-12),
        ("forward reads and writes", "total_mem_fwd", ahead.nbytes * 1e-9),
        ("backward reads and writes", "total_mem_bwd", back.nbytes * 1e-9),
        ("kept for backward", "activation_buffer", sum(each.kept for each in operators) * 1e-9),
        ("weights", "weights_mem", weights * 1e-9),
        ("forward time", "t_total_fwd", sum(each.forward.seconds for each in part.operators) * 1e3),
        ("backward time", "t_total_bwd", sum(each.backward.seconds for each in part.operators) * 1e3),
    ]
    sums = {column: sum(each.total(column) for each in nb.TABLES.values()) for _, column, _ in found}
    return [
        {"name": name, "unit": nb.UNITS[column], "notebook": sums[column], "corrected": new}
        for name, column, new in found
    ]
