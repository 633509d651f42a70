"""The notebook's two tables, digit for digit: a roofline time for each operator, totals over the layers, and the share
of the forward time that is communication; and the notebook's mistakes and omissions.

An operator takes the longer of its arithmetic and its memory traffic, plus its collective, which nothing hides.
"""

from dataclasses import dataclass
from math import fsum
from typing import Any, Literal

from cs336_systems.cost.notebook.physics import Notebook, Operator, attention_operators, mlp_operators
from cs336_systems.cost.template import read_data

Kind = Literal["wrong", "missing", "text"]

# The notebook's columns in its order, by section, and their units.
_COLUMNS = read_data("notebook/columns")
SUMMED = tuple(_COLUMNS["summed"])
SECTIONS = tuple(tuple(section.items()) for section in _COLUMNS["section"])
UNITS = {name: unit for section in SECTIONS for name, unit in section}
COLUMNS = tuple(UNITS)


@dataclass(frozen=True)
class Table:
    """One of the two tables: a row per operator, by the names of COLUMNS; `None` where the notebook's cell is empty."""

    title: str
    rows: list[dict[str, Any]]
    depth: int

    def total(self, column: str) -> float:
        """A column's sum over this table, one layer."""
        return fsum(row[column] for row in self.rows)  # `sum` rounds otherwise from Python 3.12 on

    def totals(self) -> dict[str, float]:
        """The columns that the notebook adds up, over all layers."""
        return {column: self.total(column) * self.depth for column in SUMMED}

    @property
    def communication(self) -> float:
        """The share of the forward time that is communication."""
        return self.total("t_comm_fwd") / self.total("t_total_fwd")


def show(cell: float | str | None) -> str:
    """A cell as the notebook prints it: six decimals, without the zeros behind them; nothing for an empty cell."""
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else str(round(cell, 6))


def notebook_tables(config: Notebook) -> dict[str, Table]:
    """`mlp` and `attention` of one configuration: cells in TFLOP, GB and ms."""
    operators = {"MLP": mlp_operators(config), "self-attention": attention_operators(config)}
    tables = [Table(title, [operator_row(config, one) for one in each], config.num_layers)
              for title, each in operators.items()]  # fmt: skip
    return dict(zip(("mlp", "attention"), tables, strict=True))


def operator_row(config: Notebook, operator: Operator) -> dict[str, Any]:
    """One operator's cells by column name. The volume of a collective is the whole stream's, for either verb; a single
    GPU has none."""
    topology = "nvlink" if config.tp <= config.nvlink_size else "ib"
    link = config.nvlink_rate if topology == "nvlink" else config.network_rate
    collectives = (operator.forward_collective, operator.backward_collective) if config.tp > 1 else (None, None)
    row: dict[str, Any] = {
        "layer": operator.name,
        **{column: getattr(operator, name) * 1e-9 for column, name in _COLUMNS["bytes"].items()},
        "comm_size": float(config.tp) if any(collectives) else None,
        "comm_topology": topology if any(collectives) else None,
    }
    ways = {
        "fwd": (operator.flops_forward, operator.forward_bytes, collectives[0]),
        "bwd": (operator.flops_backward, operator.backward_bytes, collectives[1]),
    }
    for way, (operations, nbytes, collective) in ways.items():
        flops, moved, volume = operations * 1e-12, nbytes * 1e-9, config.stream_bytes * 1e-9
        compute = flops / (config.matrix_rate if operator.tensor_cores else config.vector_rate) * 1e3
        memory, send = moved / config.memory_rate * 1e3, volume / link * 1e3 if collective else 0.0
        row |= {
            f"flops_{way}": flops,
            f"total_mem_{way}": moved,
            f"comm_{way}": volume if collective else None,
            f"comm_{way}_type": collective,
            f"t_comp_{way}": compute,
            f"t_mem_{way}": memory,
            f"t_{way}": max(compute, memory),
            f"t_comm_{way}": send,
            f"t_total_{way}": max(compute, memory) + send,
            f"frac_t_comm_{way}": send / (max(compute, memory) + send),
        }
    row["intensity"] = row["t_comp_fwd"] / row["t_mem_fwd"]
    return {column: row[column] for column in COLUMNS}


def as_records(config: Notebook) -> list[dict[str, Any]]:
    """The same for a program, unrounded: a record per operator, then one of totals and share per table."""
    records: list[dict[str, Any]] = []
    for key, each in notebook_tables(config).items():
        records += [{"table": key, "kind": "operator", **row} for row in each.rows]
        records.append({"table": key, "kind": "total", **each.totals(), "communication": each.communication})
    return records


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference, at the notebook's own sizes: what it has (nothing where that is `missing`), what is right (of a
    `text` of its code: what it printed), and what that changes. Tests compute the numbers."""

    kind: Kind
    name: str
    notebook: str = ""
    right: str
    effect: str


DIFFERENCES = tuple(Difference(**each) for each in read_data("notebook/differences")["difference"])
