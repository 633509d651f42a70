"""What the notebook gets wrong, what it leaves out, and where its code says other things than it printed.

Each difference is stated at the notebook's own sizes, with its effect computed from the same closed forms.
"""

from dataclasses import asdict, dataclass, replace
from math import fsum
from typing import Any, Literal

from cs336_systems.cost.notebook.physics import Notebook, Operator, attention_operators, layer_norm, mlp_operators
from cs336_systems.cost.notebook.tables import SUMMED, Table, notebook_tables, number, table
from cs336_systems.presets import model_preset

Kind = Literal["wrong", "missing", "text"]
MEASURED_MFU = 0.514  # GPT-3 175B on 64 A100s, tp 8 and pp 8 (arXiv:2205.05198, table 5)
A100_MEMORY = 40.0  # GB of the card with 1555 GB/s (NVIDIA A100 data sheet)
VECTOR_RATE_FP32 = 19.5  # TFLOP/s (the same); the notebook names it and never uses it
RING_STEP = 2.5e-3  # ms, latency within a node in its authors' later code
MASTER_BYTES = 12  # of a parameter in mixed precision: fp32 weight and two moments (arXiv:1910.02054, section 3.1)
ADAMW_BYTES = 28  # of a parameter in a step: those read and written, and gradient and weight in half precision
VOCABULARY = model_preset("gpt3-175b").vocab_size


@dataclass(frozen=True)
class Difference:
    """One difference: what the notebook has, what is right (`text`: what it printed), and what that changes."""

    kind: Kind
    name: str
    notebook: str
    right: str
    effect: str


class _Sums:
    """The notebook's own tables and their sums over both, one layer unless said otherwise."""

    def __init__(self) -> None:
        self.config = Notebook()
        self.operators = {each.name: each for each in _layer(self.config)}
        self.tables = notebook_tables(self.config)
        self.totals = {name: fsum(each.totals()[name] for each in self.tables.values()) for name in SUMMED}
        self.milliseconds = self.totals["t_total_fwd"] + self.totals["t_total_bwd"]
        self.teraflops = self.totals["flops_fwd"] + self.totals["flops_bwd"]
        self.parameters = self.totals["weights_mem"] * 1e9 / self.config.element_bytes

    @property
    def whole(self) -> Table:
        """Both tables as one."""
        return Table("layer", tuple(row for each in self.tables.values() for row in each.rows), self.config.num_layers)

    def row(self, name: str) -> dict[str, Any]:
        """One operator's row."""
        return next(row for row in self.whole.rows if row["layer"] == name)

    def slower(self, changed: dict[str, Operator]) -> float:
        """How many ms backward takes longer in all layers, if operators are other ones."""
        operators = {**self.operators, **changed}
        new = table("", self.config, tuple(operators.values())).totals()["t_total_bwd"]
        return new - self.totals["t_total_bwd"]


def _layer(config: Notebook) -> tuple[Operator, ...]:
    return (*mlp_operators(config), *attention_operators(config))


def corrected_gradients(config: Notebook) -> dict[str, Operator]:
    """The operators whose backward moves more than the notebook says: element-wise ones read dY and write dX, attention
    reads dY, a layer norm reads its scale.
    """
    changed = {}
    for each in _layer(config):
        scale = each.weights // 2 if each.name.startswith("layer_norm") else 0
        if each.name == "act" or each.name.startswith(("dpr", "dropout")):
            changed[each.name] = replace(each, gradients=2 * each.read)
        elif each.name == "attend":
            changed[each.name] = replace(each, gradients=each.gradients + each.written)
        elif scale:
            changed[each.name] = replace(each, gradients=each.gradients + scale)
    return changed


def differences() -> tuple[Difference, ...]:
    """Every difference, at the notebook's own sizes."""
    sums = _Sums()
    return (*_wrong_links(sums), *_wrong_memory(sums), *_wrong_totals(sums), *_missing(sums), *_text(sums))


def _wrong_links(sums: _Sums) -> list[Difference]:
    config, row = sums.config, sums.row("fc2")
    part = (config.tp - 1) / config.tp
    volume, shown, direction = config.stream_bytes * 1e-9, row["t_comm_fwd"], config.nvlink_rate / 2
    honest = volume * part / direction * 1e3
    longer = (honest / shown - 1) * (sums.totals["t_comm_fwd"] + sums.totals["t_comm_bwd"])
    sends = fsum(bool(each.forward_collective) + bool(each.backward_collective) for each in sums.operators.values())
    sends *= config.num_layers
    return [
        Difference(
            "wrong",
            "NVLink's rate",
            f"{config.nvlink_rate:g} GB/s",
            f"that counts both directions; a ring sends {direction:g} GB/s in one",
            f"with the next line, a collective takes {honest:.6f} ms, not {shown:.6f}: {honest / shown:.2f} times as "
            f"long, {longer:.1f} ms more in all",
        ),
        Difference(
            "wrong",
            "volume of a collective",
            f"the whole stream, {volume:.6f} GB",
            f"(tp - 1) / tp of it, {volume * part:.6f} GB: a rank has its own part already",
            f"{1 / part:.2f} times too much, which leaves {honest / shown:.2f} of the rate's factor of 2",
        ),
        Difference(
            "wrong",
            "latency",
            "none",
            f"each of {sends:.0f} collectives is {config.tp - 1} steps of a ring, each with its own",
            f"{sends * (config.tp - 1) * RING_STEP:.1f} ms more at its authors' later {RING_STEP * 1e3:g} us a step",
        ),
    ]


def _wrong_memory(sums: _Sums) -> list[Difference]:
    old, new = sums.operators, corrected_gradients(sums.config)

    def moved(name: str) -> str:
        return f"{name} {old[name].backward_bytes * 1e-9:.6f}, right {new[name].backward_bytes * 1e-9:.6f} GB"

    elementwise = {name: each for name, each in new.items() if name != "attend" and not each.weights}
    attend = {"attend": new["attend"]}
    norms = {name: each for name, each in new.items() if each.weights}
    scale = norms["layer_norm_1"].backward_bytes - old["layer_norm_1"].backward_bytes
    vector = [sums.row(name)["intensity"] for name, each in old.items() if not each.tensor_cores]
    slower = max(vector) * sums.config.vector_rate / VECTOR_RATE_FP32
    return [
        Difference(
            "wrong",
            "backward of GELU and dropout",
            "one of dX and dY",
            "reads dY and writes dX",
            f"{moved('act')}; {moved('dropout_softmax')}; {sums.slower(elementwise):.1f} ms more in all",
        ),
        Difference(
            "wrong",
            "backward of attend",
            "writes the gradients of probabilities and values",
            "reads dY as well",
            f"{moved('attend')}; {sums.slower(attend):.1f} ms more in all",
        ),
        Difference(
            "wrong",
            "backward of a layer norm",
            "writes the gradients of scale and shift",
            "reads the scale as well",
            f"{scale * 1e-6:.3f} MB a norm, {sums.slower(norms):.3f} ms in all",
        ),
        Difference(
            "wrong",
            "rate of norms and softmax",
            f"{sums.config.vector_rate:g} TFLOP/s, in half precision",
            f"they compute in fp32: {VECTOR_RATE_FP32:g} TFLOP/s, which it names and never uses",
            f"none here: even so arithmetic takes {slower:.2f} of the time of memory at most",
        ),
    ]


def _wrong_totals(sums: _Sums) -> list[Difference]:
    config = sums.config
    seconds = sums.milliseconds * 1e-3
    rate = sums.teraflops / seconds
    norm, mlp = sums.row("layer_norm_2"), sums.tables["mlp"]
    attention = sums.tables["attention"]
    moved = [
        (each.total("t_comm_fwd") + sign * norm["t_comm_fwd"])
        / (each.total("t_total_fwd") + sign * norm["t_total_fwd"])
        for each, sign in ((mlp, 1), (attention, -1))
    ]
    shares = [sums.whole.total(f"t_comm_{each}") / sums.whole.total(f"t_total_{each}") for each in ("fwd", "bwd")]
    kept, weights = sums.totals["activation_buffer"], sums.totals["weights_mem"]
    return [
        Difference(
            "wrong",
            "efficiency",
            f"100% of peak and of bandwidth: {sums.teraflops:.1f} TFLOP in {seconds:.3f} s, {rate:.0f} TFLOP/s, "
            f"{rate / config.matrix_rate:.0%} of peak",
            f"{MEASURED_MFU:.1%} was measured for this model with tp 8 and pp 8, waiting for the pipeline included",
            f"{rate / config.matrix_rate / MEASURED_MFU:.1f} times too fast",
        ),
        Difference(
            "wrong",
            "whether it fits",
            f"adds up {kept:.1f} GB of activations and never asks",
            f"the GPU with {config.memory_rate:g} GB/s has {A100_MEMORY:g} GB",
            f"with {weights:.1f} GB of weights and as much of gradients it is "
            f"{(kept + 2 * weights) / A100_MEMORY:.1f} GPUs' memory on one",
        ),
        Difference(
            "wrong",
            "shares of communication",
            f"MLP {mlp.communication:.2%}, self-attention {attention.communication:.2%}",
            f"the MLP's norm stands in the other table; with it moved {moved[0]:.2%} and {moved[1]:.2%}",
            f"the sums hold; forward alone is shown: {shares[0]:.2%} of the layer, {shares[1]:.2%} of its backward",
        ),
    ]


def _missing(sums: _Sums) -> list[Difference]:
    config, op = sums.config, sums.operators
    layers, own = config.num_layers, config.stream_bytes // config.tp
    head = 6 * config.batch * config.seq * config.d_model * VOCABULARY / config.tp * 1e-12
    words = VOCABULARY * config.d_model * config.element_bytes / config.tp * 1e-9
    products = fsum(op[name].flops_forward + op[name].flops_backward for name in ("logits", "attend")) * 1e-12 * layers
    scores = fsum((op["softmax"].kept, op["dropout_softmax"].kept, op["attend"].read)) * 1e-9 * layers
    inputs = 2 * (config.stream_bytes - own) * 1e-9 * layers
    again = 2 * layers * sums.row("fc2")["t_comm_fwd"]
    state, kept = MASTER_BYTES * sums.parameters * 1e-9, sums.totals["activation_buffer"]
    adds, update = (size * 1e-6 / config.memory_rate for size in (layers * 12 * own, ADAMW_BYTES * sums.parameters))
    whole = sums.teraflops
    rows = [
        ("residual additions", "two a layer and pass, each reading two tensors and writing one", f"{adds:.1f} ms more"),
        (
            "embedding, head and loss",
            f"{VOCABULARY:,} words of GPT-3",
            f"{head:.1f} TFLOP ({head / whole:.1%} more) and {words:.2f} GB of weights",
        ),
        (
            "optimizer",
            f"{MASTER_BYTES} bytes of state a parameter, {ADAMW_BYTES} moved in a step",
            f"{state:.0f} GB more, and {update * 1e-3:.2f} s a step on these GPUs",
        ),
        ("causal mask", "half of the scores are needed", f"{products / 2:.1f} of {whole:.1f} TFLOP need not be done"),
        (
            "fused attention",
            "FlashAttention keeps no matrix of scores (arXiv:2205.14135)",
            f"{scores:.1f} of {kept:.1f} GB of activations need not be kept",
        ),
        (
            "gathering norms' outputs again in backward",
            "keep 1 / tp of them and gather again (arXiv:2205.05198, section 4.2.2); it keeps them whole",
            f"{inputs:.1f} GB less for {again:.1f} ms more, at its own rate",
        ),
        (
            "data and pipeline parallelism",
            "it trains on 64 GPUs and more, not on 4",
            "no gradient reduction, no bubble",
        ),
    ]
    return [Difference("missing", name, "", right, effect) for name, right, effect in rows]


def _text(sums: _Sums) -> list[Difference]:
    config, op = sums.config, sums.operators
    part = (config.tp - 1) / config.tp
    volume = config.stream_bytes * 1e-9
    flops = op["fc2"].flops_forward * 1e-12
    additions = part * config.stream_bytes / config.element_bytes * 1e-12
    wide, narrow = op["dpr1"].flops_forward * config.tp * 1e-12, number(sums.row("dpr2")["flops_fwd"])
    norm = layer_norm(config, "", config.batch * config.seq).flops_forward * 1e-12
    rows = [
        ("indentation", "the attention function does not parse", "two tables", "the code cannot have printed them"),
        ("arguments", "depth lands in element_size, which is given twice", "two tables", "a TypeError"),
        ("names of degrees", "passes m1 and m2, reads sequence and tensor", "tp 4", "next, a KeyError"),
        ("volume", f"(tp - 1) / tp: {volume * part:.6f} GB", f"the whole: {volume:.6f} GB", "see above"),
        (
            "additions of reduce-scatters",
            f"counted; that of v_proj in backward, where none is: fc2 {flops + additions:.6f} TFLOP",
            f"not counted: fc2 {flops:.6f} TFLOP",
            f"{additions:.6f} TFLOP a reduce-scatter, {additions / flops:.4%} of fc2",
        ),
        (
            "order of the MLP",
            f"a norm first ({norm:.6f} TFLOP), and last a second dpr1 on all of d_ff ({wide:.6f} TFLOP)",
            f"no norm, and last dpr2 on the stream's own rows ({narrow:.6f} TFLOP)",
            "the dropout of the code has the wrong width",
        ),
        ("end of attention", "dropout", "layer_norm_2", "the MLP's norm in the other table"),
        (
            "backward all-gather of the MLP",
            "written into the row of fc2, whose dictionary is still at hand",
            "in the row of dpr2",
            "replaces the size of fc2's own group, and the dropout sends nothing",
        ),
        ("columns of attention", "its own order", "that of the MLP's table", "none but the look"),
    ]
    return [Difference("text", *row) for row in rows]


DIFFERENCES = differences()


def difference_records() -> list[dict[str, Any]]:
    """The differences for a program."""
    return [asdict(each) for each in DIFFERENCES]
