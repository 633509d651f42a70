"""The roofline notebook that this model grew from, digit for digit, and its mistakes.

An operator takes the longer of its arithmetic and its memory traffic, plus its collective, which nothing hides.
`differences.toml` lists what is wrong; `cost/` is the corrected model. The notebook is `transformer_estimates.ipynb` of
github.com/ShashankSubramanian/transformer-perf-estimates in its state of January 2024, later arXiv:2410.00273.
"""

from dataclasses import dataclass
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

# GPT-3's layer, one sequence, and what one of four A100s of 40 GB in one node has of it.
SIZES = {"batch": 1, "seq": 2048, "d_model": 12_288, "d_ff": 49_152, "num_heads": 96, "num_layers": 96, "tp": 4}
_, SEQ, WIDTH, _, _, LAYERS, TP = SIZES.values()
HIDDEN, HEADS, HEAD_WIDTH = 49_152 // TP, 96 // TP, WIDTH // 96
ELEMENT_BYTES, MASK_BYTES = 2, 1  # half precision, weights and activations alike; an element of a dropout mask
TENSOR_CORES, OTHER_CORES = 312.0, 78.0  # TFLOP/s in half precision
MEMORY_RATE, NVLINK_RATE = 1555.0, 600.0  # GB/s, with 1 GB = 1e9 bytes


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
    ahead: Collective | None = None  # of forward
    back: Collective | None = None  # of backward

    def cells(self) -> dict[str, Any]:
        """The row of the notebook's table, by the names of COLUMNS, `None` where a cell is empty. The volume of a
        collective is the whole stream's, for either verb."""
        sends = self.ahead or self.back
        row: dict[str, Any] = {
            "layer": self.name,
            **{column: getattr(self, name) * 1e-9 for column, name in _COLUMNS["bytes"].items()},
            "comm_size": float(TP) if sends else None,
            "comm_topology": "nvlink" if sends else None,
        }
        ahead = self.read + self.read_other + self.written + self.weights
        back = self.kept + self.gradients + self.weights * (2 if self.tensor_cores else 1)
        ways = (("fwd", self.flops_forward, ahead, self.ahead), ("bwd", self.flops_backward, back, self.back))
        for way, operations, nbytes, collective in ways:
            flops, moved, volume = operations * 1e-12, nbytes * 1e-9, SEQ * WIDTH * ELEMENT_BYTES * 1e-9
            compute = flops / (TENSOR_CORES if self.tensor_cores else OTHER_CORES) * 1e3
            memory, send = moved / MEMORY_RATE * 1e3, volume / NVLINK_RATE * 1e3 if collective else 0.0
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


def _product(rows: int, inner: int, columns: int) -> int:
    """FLOPs of a matrix product: `inner` multiplications per element, and one addition less."""
    return rows * columns * (2 * inner - 1)


def linear(name: str, inputs: int, outputs: int, bias: bool, **sends: Any) -> Operator:
    """`seq inputs -> seq outputs` with a matrix `inputs outputs`, here this GPU's part of it. Backward is two products
    of the same size: dX = dY W^T and dW = X^T dY."""
    x, y, w = (ELEMENT_BYTES * n for n in (SEQ * inputs, SEQ * outputs, (inputs + bias) * outputs))
    ahead = _product(SEQ, inputs, outputs) + bias * SEQ * outputs
    back = _product(SEQ, outputs, inputs) + _product(inputs, SEQ, outputs) + bias * SEQ * outputs
    return Operator(name, ahead, back, x, y, kept=x, gradients=x + y, weights=w, tensor_cores=True, **sends)


def elementwise(name: str, elements: int, masked: bool = True, **sends: Any) -> Operator:
    """Dropout, a product with a mask, which is what is kept; or GELU, without one, counted as one FLOP per element.
    Only one of dX and dY is counted as moved."""
    size, mask = elements * ELEMENT_BYTES, elements * MASK_BYTES * masked
    return Operator(name, elements, elements, size, size, kept=mask or size, gradients=size, read_other=mask, **sends)


def rowwise(name: str, elements: int, flops: tuple[int, int], weights: int = 0, **sends: Any) -> Operator:
    """A softmax or a layer norm of rows, which keeps its input. Backward is not counted as reading a norm's scale."""
    size = elements * ELEMENT_BYTES
    return Operator(name, *flops, read=size, written=size, kept=size, gradients=2 * size, weights=weights, **sends)


def layer_norm(name: str) -> Operator:
    """This GPU's rows of the stream, each normalised, scaled and shifted."""
    rows, elements = SEQ // TP, SEQ // TP * WIDTH
    flops = 9 * elements, 13 * elements - 4 * rows
    return rowwise(name, elements, flops, 2 * WIDTH * ELEMENT_BYTES, ahead="allgather")


def attention_products() -> tuple[Operator, Operator]:
    """`heads seq head_width` queries with as many keys -> `heads seq seq`, no mask, whole in memory; and these with the
    values. Of the second backward, reading dY is left out."""
    scores, q = (HEADS * SEQ * width * ELEMENT_BYTES for width in (SEQ, HEAD_WIDTH))
    wide, narrow = HEADS * _product(SEQ, HEAD_WIDTH, SEQ), HEADS * _product(SEQ, SEQ, HEAD_WIDTH)
    return (
        Operator("logits", wide, 2 * narrow, q, scores, 2 * q, scores + 2 * q, read_other=q, tensor_cores=True),
        Operator("attend", narrow, wide + narrow, scores, q, *2 * (scores + q,), read_other=q, tensor_cores=True),
    )


def mlp_operators() -> tuple[Operator, ...]:
    """The feed-forward on one GPU: columns of the first matrix, rows of the second, and sequence-parallel dropout
    (Korthikanti et al., arXiv:2205.05198). Its layer norm is `layer_norm_2` of the other table."""
    return (
        linear("fc1", WIDTH, HIDDEN, bias=True, back="reducescatter"),
        elementwise("act", SEQ * HIDDEN, masked=False),
        elementwise("dpr1", SEQ * HIDDEN),
        linear("fc2", HIDDEN, WIDTH, bias=True, ahead="reducescatter"),
        elementwise("dpr2", SEQ // TP * WIDTH, back="allgather"),
    )


def attention_operators() -> tuple[Operator, ...]:
    """Self-attention on one GPU: its heads, between sequence-parallel norms and dropout."""
    logits, attend = attention_products()
    scores, rows = HEADS * SEQ**2, HEADS * SEQ
    return (
        layer_norm("layer_norm_1"),
        linear("qkv_proj", WIDTH, 3 * WIDTH // TP, bias=False, back="reducescatter"),
        logits,
        rowwise("softmax", scores, (3 * scores - rows, 4 * scores - rows)),
        elementwise("dropout_softmax", scores),
        attend,
        linear("v_proj", WIDTH // TP, WIDTH, bias=True, ahead="reducescatter"),
        elementwise("dropout", SEQ // TP * WIDTH, back="allgather"),
        layer_norm("layer_norm_2"),
    )


@dataclass(frozen=True)
class Table:
    """One of the two tables: the cells of each operator."""

    title: str
    rows: list[dict[str, Any]]

    def total(self, column: str) -> float:
        """A column's sum over this table, one layer."""
        return fsum(row[column] for row in self.rows)  # `sum` rounds otherwise from Python 3.12 on

    def totals(self) -> dict[str, float]:
        """The columns that the notebook adds up, over all layers."""
        return {column: self.total(column) * LAYERS for column in SUMMED}

    @property
    def communication(self) -> float:
        """The share of the forward time that is communication."""
        return self.total("t_comm_fwd") / self.total("t_total_fwd")


def show(cell: float | str | None) -> str:
    """A cell as the notebook prints it: six decimals, without the zeros behind them; nothing for an empty cell."""
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else str(round(cell, 6))


# In TFLOP, GB and ms.
TABLES = {
    "mlp": Table("MLP", [each.cells() for each in mlp_operators()]),
    "attention": Table("self-attention", [each.cells() for each in attention_operators()]),
}


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
