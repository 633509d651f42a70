"""The roofline notebook that this model grew from, digit for digit: the FLOPs of each operator of a transformer layer,
the bytes that it reads, writes, keeps and sends on one GPU of a tensor-parallel group, a roofline time for each, totals
over the layers, and the share of the forward time that is communication; its mistakes and omissions.

It has only closed forms, nothing is fitted. An operator takes the longer of its arithmetic and its memory traffic, plus
its collective, which nothing hides. `differences.toml` lists what is wrong; `cost/` is the corrected model. The
notebook is `transformer_estimates.ipynb` of github.com/ShashankSubramanian/transformer-perf-estimates in its state of
January 2024, later arXiv:2410.00273.
"""

from dataclasses import dataclass, replace
from math import fsum
from typing import Any, Literal

from cs336_systems.cost.template import read_data

Collective = Literal["allgather", "reducescatter"]
Kind = Literal["wrong", "missing", "text"]

# The notebook's columns in its order, by section, and their units.
_COLUMNS = read_data("notebook/columns")
SUMMED = tuple(_COLUMNS["summed"])
SECTIONS = tuple(tuple(section.items()) for section in _COLUMNS["section"])
UNITS = {name: unit for section in SECTIONS for name, unit in section}
COLUMNS = tuple(UNITS)


@dataclass(frozen=True)
class Notebook:
    """Inputs of the notebook: one layer's sizes, the degree of tensor parallelism, and a GPU's data sheet.

    The defaults are its own: GPT-3's layer, one sequence of 2048 tokens, four A100s of 40 GB in one node. Rates are
    per GPU, in TFLOP/s and GB/s, with 1 GB = 1e9 bytes.
    """

    batch: int = 1
    seq: int = 2048
    d_model: int = 12_288
    d_ff: int = 49_152
    num_heads: int = 96
    num_layers: int = 96
    tp: int = 4
    element_bytes: int = 2  # half precision, weights and activations alike
    mask_bytes: int = 1  # an element of a dropout mask
    matrix_rate: float = 312.0  # TFLOP/s of tensor cores, half precision
    vector_rate: float = 78.0  # TFLOP/s of the other cores, half precision
    memory_rate: float = 1555.0  # GB/s
    nvlink_rate: float = 600.0  # GB/s
    network_rate: float = 100.0  # GB/s, for groups that leave the node
    nvlink_size: int = 4  # GPUs of a node

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def stream_bytes(self) -> int:
        """Bytes of the whole stream between operators, `batch seq d_model`."""
        return self.batch * self.seq * self.d_model * self.element_bytes


@dataclass(frozen=True)
class Operator:
    """One operator on one GPU. FLOPs are exact counts; everything else is in bytes.

    Forward reads `read`, `read_other` (a second operand or a mask) and `weights`, and writes `written`. It keeps `kept`
    for backward, which reads that, and reads or writes `gradients` of activations. The weights' gradients are as large
    as the weights, and a matrix product (`tensor_cores`) reads its weights again.
    """

    name: str
    flops_forward: int
    flops_backward: int
    read: int
    written: int
    kept: int
    gradients: int
    read_other: int = 0
    weights: int = 0
    tensor_cores: bool = False
    forward_collective: Collective | None = None
    backward_collective: Collective | None = None

    @property
    def forward_bytes(self) -> int:
        return self.read + self.read_other + self.written + self.weights

    @property
    def backward_bytes(self) -> int:
        return self.kept + self.gradients + self.weights * (2 if self.tensor_cores else 1)


def _product(rows: int, inner: int, columns: int) -> int:
    """FLOPs of a matrix product: `inner` multiplications per element, and one addition less."""
    return rows * columns * (2 * inner - 1)


def linear(config: Notebook, name: str, inputs: int, outputs: int, bias: bool) -> Operator:
    """`(batch seq) inputs -> (batch seq) outputs` with a matrix `inputs outputs`, here this GPU's part of it. Backward
    is two products of the same size: dX = dY W^T and dW = X^T dY."""
    rows = config.batch * config.seq
    x, y, w = (config.element_bytes * n for n in (rows * inputs, rows * outputs, (inputs + bias) * outputs))
    ahead = _product(rows, inputs, outputs) + bias * rows * outputs
    back = _product(rows, outputs, inputs) + _product(inputs, rows, outputs) + bias * rows * outputs
    return Operator(name, ahead, back, x, y, kept=x, gradients=x + y, weights=w, tensor_cores=True)


def elementwise(config: Notebook, name: str, elements: int, masked: bool = True) -> Operator:
    """Dropout, a product with a mask, which is what is kept; or GELU, without one, counted as one FLOP per element.
    Only one of dX and dY is counted as moved."""
    size, mask = elements * config.element_bytes, elements * config.mask_bytes * masked
    return Operator(name, elements, elements, size, size, kept=mask or size, gradients=size, read_other=mask)


def layer_norm(config: Notebook, name: str, rows: int) -> Operator:
    """`rows d_model`, each row normalised, scaled and shifted. Backward is not counted as reading the scale."""
    elements = rows * config.d_model
    size, flops = elements * config.element_bytes, (9 * elements, 13 * elements - 4 * rows)
    weights = 2 * config.d_model * config.element_bytes
    return Operator(name, *flops, read=size, written=size, kept=size, gradients=2 * size, weights=weights)


def softmax(config: Notebook, name: str, rows: int) -> Operator:
    """`rows seq`, one row per query of a head."""
    elements = rows * config.seq
    size, flops = elements * config.element_bytes, (3 * elements - rows, 4 * elements - rows)
    return Operator(name, *flops, read=size, written=size, kept=size, gradients=2 * size)


def logits(config: Notebook, name: str, heads: int) -> Operator:
    """`(batch heads) seq head_dim` queries with as many keys -> `(batch heads) seq seq`, no mask, whole in memory."""
    pairs, seq, dim = config.batch * heads, config.seq, config.head_dim
    scores, q = (pairs * seq * width * config.element_bytes for width in (seq, dim))
    flops = pairs * _product(seq, dim, seq), 2 * pairs * _product(seq, seq, dim)
    return Operator(name, *flops, q, scores, kept=2 * q, gradients=scores + 2 * q, read_other=q, tensor_cores=True)


def attend(config: Notebook, name: str, heads: int) -> Operator:
    """`(batch heads) seq seq` probabilities with the values -> `(batch heads) seq head_dim`. Reading dY is left out."""
    pairs, seq, dim = config.batch * heads, config.seq, config.head_dim
    scores, v = (pairs * seq * width * config.element_bytes for width in (seq, dim))
    flops = pairs * _product(seq, seq, dim), pairs * (_product(seq, dim, seq) + _product(seq, seq, dim))
    return Operator(name, *flops, scores, v, kept=scores + v, gradients=scores + v, read_other=v, tensor_cores=True)


def mlp_operators(config: Notebook) -> tuple[Operator, ...]:
    """The feed-forward on one GPU: columns of the first matrix, rows of the second, and sequence-parallel dropout
    (Korthikanti et al., arXiv:2205.05198). Its layer norm is `layer_norm_2` of the other table."""
    rows, hidden = config.batch * config.seq, config.d_ff // config.tp
    return (
        replace(linear(config, "fc1", config.d_model, hidden, bias=True), backward_collective="reducescatter"),
        elementwise(config, "act", rows * hidden, masked=False),
        elementwise(config, "dpr1", rows * hidden),
        replace(linear(config, "fc2", hidden, config.d_model, bias=True), forward_collective="reducescatter"),
        replace(elementwise(config, "dpr2", rows // config.tp * config.d_model), backward_collective="allgather"),
    )


def attention_operators(config: Notebook) -> tuple[Operator, ...]:
    """Self-attention on one GPU: `num_heads / tp` heads, between sequence-parallel norms and dropout."""
    rows, heads = config.batch * config.seq, config.num_heads // config.tp
    own_rows, own_width = rows // config.tp, config.d_model // config.tp
    return (
        replace(layer_norm(config, "layer_norm_1", own_rows), forward_collective="allgather"),
        replace(linear(config, "qkv_proj", config.d_model, 3 * own_width, False), backward_collective="reducescatter"),
        logits(config, "logits", heads),
        softmax(config, "softmax", config.batch * heads * config.seq),
        elementwise(config, "dropout_softmax", config.batch * heads * config.seq**2),
        attend(config, "attend", heads),
        replace(linear(config, "v_proj", own_width, config.d_model, True), forward_collective="reducescatter"),
        replace(elementwise(config, "dropout", own_rows * config.d_model), backward_collective="allgather"),
        replace(layer_norm(config, "layer_norm_2", own_rows), forward_collective="allgather"),
    )


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
    found = {"mlp": ("MLP", mlp_operators(config)), "attention": ("self-attention", attention_operators(config))}
    rows = {key: (title, [operator_row(config, one) for one in each]) for key, (title, each) in found.items()}
    return {key: Table(*each, config.num_layers) for key, each in rows.items()}


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


_TEXTS = read_data("notebook/differences")
KINDS: dict[Kind, Any] = _TEXTS["kinds"]  # title and columns of the table of a kind
DIFFERENCES = tuple(Difference(**each) for each in _TEXTS["difference"])
