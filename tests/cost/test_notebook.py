"""The notebook's printed tables, cell for cell, its closed forms against sums that are counted one by one, and its
stated mistakes."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cs336_systems.cost.commands.notebook_page import print_notebook
from cs336_systems.cost.notebook import tables as nb
from cs336_systems.cost.notebook.tables import COLUMNS, DIFFERENCES, SUMMED, notebook_tables, show

DATA = Path(__file__).resolve().parents[1] / "files"
SMALL = nb.Notebook(batch=2, seq=10, d_model=12, d_ff=28, num_heads=4, num_layers=3, tp=2)


def printed(name: str) -> dict:
    return json.loads((DATA / f"notebook_{name}.json").read_text())


def test_every_printed_cell_total_and_share():
    kinds = {"number": 0, "text": 0, "empty": 0}
    totals = 0
    for name, table in notebook_tables(nb.Notebook()).items():
        expected = printed(name)
        assert list(COLUMNS) == expected["columns"]
        assert [[show(row[column]) for column in COLUMNS] for row in table.rows] == expected["cells"]
        assert {key: f"{value:.6f}" for key, value in table.totals().items()} == expected["totals"]
        assert repr(table.communication) == expected["communication"]
        totals += len(expected["totals"])
        for cell in (cell for row in expected["cells"] for cell in row):
            kinds["empty" if not cell else "number" if cell[0].isdigit() else "text"] += 1
    assert kinds == {"number": 352, "text": 30, "empty": 52}
    assert totals == 18


@pytest.mark.parametrize("width", [120, 140])
def test_every_digit_is_on_the_screen(width):
    out = io.StringIO()
    print_notebook(Console(width=width, file=out, highlight=False), nb.Notebook())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]
    for name in ("mlp", "attention"):
        cells = printed(name)["cells"]
        for group in (cells[:5], cells[5:]):
            if group:
                head = shown.index(["quantity", "unit", *(row[0] for row in group)])
                table = {row[0]: row[2:] for row in shown[head : head + 38] if len(row) == 2 + len(group)}
                del table["quantity"]
                assert table == {key: [row[n] for row in group] for n, key in enumerate(COLUMNS) if n}
        assert any(line.endswith(printed(name)["communication"]) for line in lines)
    for key, value in printed("mlp")["totals"].items():
        assert any([row[0], *row[2:4]] == [key, value, printed("attention")["totals"][key]] for row in shown if row)


class Counted:
    """A number that counts what is done to it."""

    done = 0

    def __add__(self, other: "Counted") -> "Counted":
        Counted.done += 1
        return self

    __mul__ = __sub__ = __truediv__ = __add__

    def exp(self) -> "Counted":
        return self + self


def array(*shape: int) -> np.ndarray:
    return np.full(shape, Counted(), dtype=object)


def counted(function) -> int:
    Counted.done = 0
    function()
    return Counted.done


def summed(terms: np.ndarray) -> np.ndarray:
    return np.add.reduce(terms, axis=-1, keepdims=True)


def test_products_are_counted_one_by_one():
    rows, inputs, outputs = SMALL.batch * SMALL.seq, 3, 5
    x, w, y, bias = array(rows, inputs), array(inputs, outputs), array(rows, outputs), array(1, outputs)
    for with_bias in (False, True):
        linear = nb.linear(SMALL, "", inputs, outputs, with_bias)
        assert linear.flops_forward == counted(lambda: x @ w) + with_bias * counted(lambda: y + bias)
        # A bias's gradient is the sum of dY over the rows, counted as if it began at zero.
        assert linear.flops_backward == counted(lambda: (y @ w.T, x.T @ y)) + with_bias * y.size
        assert linear.weights == 2 * (w.size + with_bias * outputs)
        assert linear.forward_bytes == 2 * (x.size + y.size) + linear.weights
        assert linear.backward_bytes == 2 * (2 * x.size + y.size) + 2 * linear.weights
        assert linear.kept == 2 * x.size

    q = v = array(SMALL.batch * 2, SMALL.seq, SMALL.head_dim)
    scores = array(SMALL.batch * 2, SMALL.seq, SMALL.seq)

    def t(matrix):
        return matrix.swapaxes(1, 2)

    logits, attend = nb.logits(SMALL, "", heads=2), nb.attend(SMALL, "", heads=2)
    assert logits.flops_forward == counted(lambda: q @ t(q))
    assert logits.flops_backward == counted(lambda: (scores @ q, t(scores) @ q))
    assert attend.flops_forward == counted(lambda: scores @ v)
    assert attend.flops_backward == counted(lambda: (v @ t(v), t(scores) @ v))
    assert (logits.forward_bytes, logits.backward_bytes) == (
        2 * (scores.size + 2 * q.size),
        2 * (scores.size + 4 * q.size),
    )
    assert (attend.forward_bytes, attend.kept) == (2 * (scores.size + 2 * v.size), 2 * (scores.size + v.size))


def test_softmax_is_counted_one_by_one_and_a_norm_by_row():
    rows = 6
    x = array(rows, SMALL.seq)
    softmax = nb.softmax(SMALL, "", rows)
    exp = np.frompyfunc(Counted.exp, 1, 1)
    assert softmax.flops_forward == counted(lambda: exp(x) / summed(x))
    assert softmax.flops_backward == counted(lambda: x * (x - summed(x * x)))
    assert softmax.forward_bytes == 2 * 2 * x.size
    # A norm's four sums along each row have an addition less than elements.
    norm = nb.layer_norm(SMALL, "", rows)
    assert (norm.flops_forward, norm.flops_backward) == (9 * rows * 12, 13 * rows * 12 - 4 * rows)
    assert softmax.backward_bytes == 3 * 2 * x.size


def test_the_ranks_of_a_group_share_the_work():
    alone, eight = nb.Notebook(tp=1), nb.Notebook(tp=8)
    for table in notebook_tables(alone).values():
        assert table.communication == 0
        assert {row[name] for row in table.rows for name in ("comm_size", "comm_topology", "comm_fwd", "comm_bwd")} == {
            None
        }
    whole, part = notebook_tables(alone)["attention"], notebook_tables(eight)["attention"]
    for first, second in zip(whole.rows, part.rows, strict=True):
        if first["layer"] in ("logits", "softmax", "dropout_softmax", "attend", "dropout"):
            assert first["flops_fwd"] == pytest.approx(8 * second["flops_fwd"], rel=1e-15)
            assert first["total_mem_bwd"] == pytest.approx(8 * second["total_mem_bwd"], rel=1e-15)
    # Eight GPUs do not fit in a node of four: the network's 100 GB/s instead of 600.
    row = part.rows[0]
    assert row["comm_topology"] == "ib"
    assert row["t_comm_fwd"] == pytest.approx(1 * 2048 * 12288 * 2 / 100e9 * 1e3, rel=1e-15)


def effect(name: str) -> str:
    return next(f"{each.notebook} | {each.right} | {each.effect}" for each in DIFFERENCES if each.name == name)


def test_the_differences_numbers():
    """From the notebook's own tables, whose sums are of 96 layers on four GPUs, with 1 GB = 1e9 bytes."""
    tables, config = notebook_tables(nb.Notebook()), nb.Notebook()
    both = {name: sum(each.totals()[name] for each in tables.values()) for name in SUMMED}
    volume = 2048 * 12_288 * 2e-9
    honest = volume * 3 / 4 / 300 * 1e3  # three quarters of it at 300 GB/s
    sent = both["t_comm_fwd"] + both["t_comm_bwd"]
    longer = f"takes {honest:.6f} ms, not 0.083886: {honest / 0.083886:.2f} times as long, "
    assert f"{longer}{sent * (honest / (volume / 600 * 1e3) - 1):.1f} ms more" in effect("NVLink's rate")
    right = f"(tp - 1) / tp of it, {volume * 3 / 4:.6f} GB"
    assert f"{volume:.6f} GB | {right}" in effect("volume of a collective")
    assert f"each of {(4 + 4) * 96} collectives is 3 steps" in effect("latency")
    assert f"{768 * 3 * 2.5e-3:.1f} ms more" in effect("latency")
    seconds, work = (both["t_total_fwd"] + both["t_total_bwd"]) / 1e3, both["flops_fwd"] + both["flops_bwd"]
    shown = f"{work:.1f} TFLOP in {seconds:.3f} s, {work / seconds:.0f} TFLOP/s, {work / seconds / 312:.0%} of peak"
    assert f"{shown} | 51.4%" in effect("efficiency")
    kept, weights = both["activation_buffer"], both["weights_mem"]
    assert f"{kept:.1f} GB of activations" in effect("whether it fits")
    assert f"{(kept + 2 * weights) / 40:.1f} GPUs' memory" in effect("whether it fits")
    assert "takes 0.18 of" in effect("rate of norms and softmax")  # 0.044768 x 78 / 19.5
    # 16.106127 / 414.188 and 16.106127 / 293.796 ms: norm_2's 8.053 of 9.610 ms moved over.
    assert "with it moved 3.89% and 5.48%" in effect("shares of communication")
    of_layer = [both[f"t_comm_{way}"] / both[f"t_total_{way}"] for way in ("fwd", "bwd")]
    assert f"{of_layer[0]:.2%} of the layer, {of_layer[1]:.2%} of its backward" in effect("shares of communication")
    assert f"| {2 * 2 * 3 * volume / 4 * 96 / 1.555:.1f} ms more" in effect("residual additions")
    head = 6 * 2048 * 12_288 * 50_257 / 4 * 1e-12
    assert f"{head:.1f} TFLOP ({head / work:.1%} more)" in effect("embedding, head and loss")
    parameters = weights / 2  # 10^9 on a GPU
    assert f"{12 * parameters:.0f} GB more, and {28 * parameters / 1555:.2f} s" in effect("optimizer")
    rows = {row["layer"]: row for row in tables["attention"].rows}
    hidden = sum(rows[name][f"flops_{way}"] for name in ("logits", "attend") for way in ("fwd", "bwd"))
    assert f"{hidden * 96 / 2:.1f} of {work:.1f} TFLOP" in effect("causal mask")
    assert f"48.3 of {kept:.1f} GB" in effect("fused attention")  # (0.2013 + 0.1007 + 0.2013) x 96
    assert "7.2 GB less for 16.1 ms" in effect("gathering norms' outputs again in backward")
    assert "(tp - 1) / tp: 0.037749 GB | the whole: 0.050332 GB" in effect("volume")
    assert "fc2 0.618494 TFLOP | not counted: fc2 0.618475" in effect("additions of reduce-scatters")
    assert {each.kind for each in DIFFERENCES} == {"wrong", "missing", "text"}
    # Backward of element-wise operators reads dY and writes dX: at 1555 GB/s another 2 bytes of each number.
    elements = 2 * 2048 * 12_288 + 24 * 2048**2 + 2 * 512 * 12_288  # act and dpr1, dropout_softmax, both of the stream
    assert f"{elements * 2 * 96 / config.memory_rate * 1e-6:.1f} ms" in effect("backward of GELU and dropout")
    assert f"{24 * 2048 * 128 * 2 * 96 / config.memory_rate * 1e-6:.1f} ms" in effect("backward of attend")
    assert "0.025 MB per norm, 0.003 ms" in effect("backward of a layer norm")
