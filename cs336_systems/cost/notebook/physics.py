"""The roofline notebook that this model grew from, with the numbers that it printed: the FLOPs of each operator of one
transformer layer, and the bytes that it reads, writes, keeps and sends, on one GPU of a tensor-parallel group.

It has only closed forms, nothing is fitted. `differences.toml` lists the mistakes and omissions of its physics;
`cost/` is the corrected model. The notebook is `transformer_estimates.ipynb` of
github.com/ShashankSubramanian/transformer-perf-estimates in its state of January 2024, later arXiv:2410.00273.
"""

from dataclasses import dataclass, replace
from typing import Literal

Collective = Literal["allgather", "reducescatter"]


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


def activation(config: Notebook, name: str, elements: int) -> Operator:
    """GELU, counted as one FLOP per element. Only one of dX and dY is counted as moved."""
    size = elements * config.element_bytes
    return Operator(name, elements, elements, read=size, written=size, kept=size, gradients=size)


def dropout(config: Notebook, name: str, elements: int) -> Operator:
    """A product with a mask, which is what is kept. Only one of dX and dY is counted as moved."""
    size, mask = elements * config.element_bytes, elements * config.mask_bytes
    return Operator(name, elements, elements, read=size, read_other=mask, written=size, kept=mask, gradients=size)


def layer_norm(config: Notebook, name: str, rows: int) -> Operator:
    """`rows d_model`, each row normalised, scaled and shifted. Backward is not counted as reading the scale."""
    elements = rows * config.d_model
    size, flops = elements * config.element_bytes, (9 * elements, 13 * elements - 4 * rows)
    weights = 2 * config.d_model * config.element_bytes
    return Operator(name, *flops, read=size, written=size, kept=size, gradients=2 * size, weights=weights)


def softmax(config: Notebook, name: str, rows: int) -> Operator:
    """`rows seq`, one row a query of a head."""
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
        activation(config, "act", rows * hidden),
        dropout(config, "dpr1", rows * hidden),
        replace(linear(config, "fc2", hidden, config.d_model, bias=True), forward_collective="reducescatter"),
        replace(dropout(config, "dpr2", rows // config.tp * config.d_model), backward_collective="allgather"),
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
        dropout(config, "dropout_softmax", config.batch * heads * config.seq**2),
        attend(config, "attend", heads),
        replace(linear(config, "v_proj", own_width, config.d_model, True), forward_collective="reducescatter"),
        replace(dropout(config, "dropout", own_rows * config.d_model), backward_collective="allgather"),
        replace(layer_norm(config, "layer_norm_2", own_rows), forward_collective="allgather"),
    )
