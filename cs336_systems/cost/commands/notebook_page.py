"""The notebook's page: its tables, what is wrong with them, and the same layer by the corrected physics."""

from typing import Any

from rich.console import Console
from rich.table import Table

from cs336_systems.cost.large.operator_time import timed_group
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.systems import system_preset
from cs336_systems.cost.notebook.differences import difference_records
from cs336_systems.cost.notebook.page import print_notebook
from cs336_systems.cost.notebook.physics import Notebook
from cs336_systems.cost.notebook.tables import as_records, notebook_tables
from cs336_systems.presets import model_preset

MACHINE = "A100-40GB"  # whose data sheet the notebook has
UNITS = {
    "forward computes": "TFLOP",
    "backward computes": "TFLOP",
    "forward reads and writes": "GB",
    "backward reads and writes": "GB",
    "kept for backward": "GB",
    "weights": "GB",
    "forward time": "ms",
    "backward time": "ms",
}


def print_page(screen: Console, notebook: Notebook) -> None:
    """Tables, differences, and one layer compared."""
    print_notebook(screen, notebook)
    title = f"One layer on one GPU, corrected: an {MACHINE}"
    table = Table("", "unit", title=title, title_justify="left")
    for name in ("the notebook", "corrected", "ratio"):
        table.add_column(name, justify="right")
    for each in compared(notebook):
        ratio = each["corrected"] / each["notebook"]
        table.add_row(each["name"], each["unit"], f"{each['notebook']:.4g}", f"{each['corrected']:.4g}", f"{ratio:.2f}")
    screen.print(table)


def notebook_records(notebook: Notebook) -> dict[str, Any]:
    """All of it for a program."""
    return {"rows": as_records(notebook), "differences": difference_records(), "layer": compared(notebook)}


def compared(notebook: Notebook) -> list[dict[str, Any]]:
    """A layer's sums by both: its scores in memory, dropout and sequence parallelism, as the notebook has them."""
    one = model_preset("gpt3-175b").override(
        num_layers=1,
        d_model=notebook.d_model,
        d_ff=notebook.d_ff,
        num_heads=notebook.num_heads,
        context_length=notebook.seq,
        attention="naive",
        dropout=0.1,
    )
    plan = Plan(tp=notebook.tp, sequence=notebook.tp > 1, micro_batch=notebook.batch, global_batch=notebook.batch)
    timed = timed_group(one, plan, notebook.seq, "dense", system_preset(MACHINE))
    tables = notebook_tables(notebook).values()
    columns = ("flops_fwd", "flops_bwd", "total_mem_fwd", "total_mem_bwd", "activation_buffer", "weights_mem")
    old = [sum(each.total(name) for each in tables) for name in (*columns, "t_total_fwd", "t_total_bwd")]
    new = [
        sum(each.forward.flops for each in timed) * 1e-12,
        sum(each.backward.flops for each in timed) * 1e-12,
        sum(each.forward.nbytes for each in timed) * 1e-9,
        sum(each.backward.nbytes for each in timed) * 1e-9,
        sum(each.operator.kept for each in timed) * 1e-9,
        sum(each.operator.weights for each in timed) * notebook.element_bytes * 1e-9,
        sum(each.forward.seconds for each in timed) * 1e3,
        sum(each.backward.seconds for each in timed) * 1e3,
    ]
    return [
        {"name": name, "unit": unit, "notebook": before, "corrected": after}
        for (name, unit), before, after in zip(UNITS.items(), old, new, strict=True)
    ]
