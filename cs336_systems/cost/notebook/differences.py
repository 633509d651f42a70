"""Errors and omissions of the notebook, and differences between its code and its printed output.

`differences.txt` states each difference: its kind and name, then lines for what the notebook has (none for `missing`),
what is right (for `text`: what it printed), and what that changes. This file has the numbers, from the notebook's own
closed forms at its own sizes.
"""

from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, Literal

from cs336_systems.cost.notebook.physics import Notebook, Operator, attention_operators, layer_norm, mlp_operators
from cs336_systems.cost.notebook.tables import SUMMED, Table, notebook_tables, number, table
from cs336_systems.cost.template import fill
from cs336_systems.presets import model_preset

Kind = Literal["wrong", "missing", "text"]
MEASURED_MFU = 0.514  # GPT-3 175B on 64 A100s, tp 8 and pp 8 (arXiv:2205.05198, table 5)
A100_MEMORY = 40.0  # GB of the card with 1555 GB/s (NVIDIA A100 data sheet)
VECTOR_RATE_FP32 = 19.5  # TFLOP/s (the same); the notebook names it and never uses it
RING_STEP = 2.5e-3  # ms, latency within a node in its authors' later code
MASTER_BYTES = 12  # per parameter in mixed precision: fp32 weight and two moments (arXiv:1910.02054, section 3.1)
ADAMW_BYTES = 28  # per parameter in a step: those read and written, and gradient and weight in half precision
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
        self.whole = Table("layer", sum((each.rows for each in self.tables.values()), ()), self.config.num_layers)
        self.rows: dict[Any, Any] = {row["layer"]: row for row in self.whole.rows}
        self.volume = self.config.stream_bytes * 1e-9  # GB
        self.sent = self.volume * (self.config.tp - 1) / self.config.tp

    def slower(self, changed: dict[str, Operator]) -> float:
        """Milliseconds that backward of all layers takes longer with these operators instead."""
        operators = {**self.operators, **changed}
        new = table("", self.config, tuple(operators.values())).totals()["t_total_bwd"]
        return new - self.totals["t_total_bwd"]


def _layer(config: Notebook) -> tuple[Operator, ...]:
    return (*mlp_operators(config), *attention_operators(config))


def corrected_gradients(config: Notebook) -> dict[str, Operator]:
    """The operators whose backward moves more than the notebook says: element-wise ones read dY and write dX, attention
    reads dY, a layer norm reads its scale."""
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
    numbers = {"config": sums.config, "tables": sums.tables, "teraflops": sums.teraflops}
    numbers |= _links(sums) | _memory(sums) | _totals(sums) | _missing(sums) | _text(sums)
    template = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    found: list[list[Any]] = []
    for line in fill(template, numbers, format):
        if line.startswith("# "):
            kind, _, name = line[2:].partition(": ")
            found.append([kind, name, *[""] * (kind == "missing")])
        else:
            found[-1].append(line)
    return tuple(Difference(*each) for each in found)


def _links(sums: _Sums) -> dict[str, Any]:
    """Rate, volume and latency of collectives."""
    config, shown, direction = sums.config, sums.rows["fc2"]["t_comm_fwd"], sums.config.nvlink_rate / 2
    honest = sums.sent / direction * 1e3
    sends = sum(bool(each.forward_collective) + bool(each.backward_collective) for each in sums.operators.values())
    return {
        "direction": direction,
        "honest": honest,
        "shown": shown,
        "rate_ratio": honest / shown,
        "longer": (honest / shown - 1) * (sums.totals["t_comm_fwd"] + sums.totals["t_comm_bwd"]),
        "volume": sums.volume,
        "sent": sums.sent,
        "volume_ratio": sums.volume / sums.sent,
        "collectives": sends * config.num_layers,
        "others": config.tp - 1,
        "latency": sends * config.num_layers * (config.tp - 1) * RING_STEP,
        "ring_step": RING_STEP * 1e3,
    }


def _memory(sums: _Sums) -> dict[str, Any]:
    """Bytes that backward moves, and arithmetic beside them."""
    old, new = sums.operators, corrected_gradients(sums.config)
    norms = {name: each for name, each in new.items() if each.weights}
    changed = {
        "elementwise": {name: each for name, each in new.items() if name != "attend" and not each.weights},
        "attend": {"attend": new["attend"]},
        "norms": norms,
    }
    vector = [sums.rows[name]["intensity"] for name, each in old.items() if not each.tensor_cores]
    return {
        "old": {name: each.backward_bytes * 1e-9 for name, each in old.items()},
        "new": {name: each.backward_bytes * 1e-9 for name, each in new.items()},
        "slower": {name: sums.slower(each) for name, each in changed.items()},
        "scale": (norms["layer_norm_1"].backward_bytes - old["layer_norm_1"].backward_bytes) * 1e-6,
        "vector_rate_fp32": VECTOR_RATE_FP32,
        "arithmetic": max(vector) * sums.config.vector_rate / VECTOR_RATE_FP32,
    }


def _totals(sums: _Sums) -> dict[str, Any]:
    """Efficiency, memory and shares of communication."""
    config, norm, seconds = sums.config, sums.rows["layer_norm_2"], sums.milliseconds * 1e-3
    rate = sums.teraflops / seconds
    kept, weights = sums.totals["activation_buffer"], sums.totals["weights_mem"]
    return {
        "seconds": seconds,
        "rate": rate,
        "of_peak": rate / config.matrix_rate,
        "measured": MEASURED_MFU,
        "too_fast": rate / config.matrix_rate / MEASURED_MFU,
        "kept": kept,
        "memory": A100_MEMORY,
        "weights": weights,
        "gpus": (kept + 2 * weights) / A100_MEMORY,
        "moved": {
            name: (each.total("t_comm_fwd") + sign * norm["t_comm_fwd"])
            / (each.total("t_total_fwd") + sign * norm["t_total_fwd"])
            for (name, each), sign in zip(sums.tables.items(), (1, -1), strict=True)
        },
        "shares": {
            way: sums.whole.total(f"t_comm_{way}") / sums.whole.total(f"t_total_{way}") for way in ("fwd", "bwd")
        },
    }


def _missing(sums: _Sums) -> dict[str, Any]:
    """Work, bytes and seconds of what the notebook leaves out."""
    config, op, layers = sums.config, sums.operators, sums.config.num_layers
    own = config.stream_bytes // config.tp
    parameters = sums.totals["weights_mem"] * 1e9 / config.element_bytes
    head = 6 * config.batch * config.seq * config.d_model * VOCABULARY / config.tp * 1e-12
    products = fsum(op[name].flops_forward + op[name].flops_backward for name in ("logits", "attend")) * 1e-12
    scores = fsum((op["softmax"].kept, op["dropout_softmax"].kept, op["attend"].read)) * 1e-9
    return {
        "additions": layers * 12 * own * 1e-6 / config.memory_rate,
        "vocabulary": VOCABULARY,
        "head": head,
        "head_share": head / sums.teraflops,
        "head_weights": VOCABULARY * config.d_model * config.element_bytes / config.tp * 1e-9,
        "master": MASTER_BYTES,
        "adamw": ADAMW_BYTES,
        "state": MASTER_BYTES * parameters * 1e-9,
        "update": ADAMW_BYTES * parameters * 1e-9 / config.memory_rate,
        "hidden": products * layers / 2,
        "scores": scores * layers,
        "inputs": 2 * (config.stream_bytes - own) * 1e-9 * layers,
        "again": 2 * layers * sums.rows["fc2"]["t_comm_fwd"],
    }


def _text(sums: _Sums) -> dict[str, Any]:
    """FLOPs by the notebook's code, beside those that it printed."""
    config, op = sums.config, sums.operators
    fc2, added = op["fc2"].flops_forward * 1e-12, sums.sent / config.element_bytes * 1e-3
    return {
        "fc2": fc2,
        "fc2_added": fc2 + added,
        "added": added,
        "added_share": added / fc2,
        "norm": layer_norm(config, "", config.batch * config.seq).flops_forward * 1e-12,
        "wide": op["dpr1"].flops_forward * config.tp * 1e-12,
        "narrow": number(sums.rows["dpr2"]["flops_fwd"]),
    }


DIFFERENCES = differences()
