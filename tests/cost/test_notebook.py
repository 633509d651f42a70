"""The notebook's printed tables, cell for cell, and its stated mistakes."""

import io
import json
import re
from pathlib import Path

from rich.console import Console

from cs336_systems.cost.commands.notebook_page import print_notebook
from cs336_systems.cost.notebook.tables import COLUMNS, DIFFERENCES, MEMORY_RATE, SUMMED, TABLES, show

DATA = Path(__file__).resolve().parents[1] / "files"


def printed(name: str) -> dict:
    return json.loads((DATA / f"notebook_{name}.json").read_text())


def test_every_printed_cell_total_and_share():
    kinds = {"number": 0, "text": 0, "empty": 0}
    totals = 0
    for name, table in TABLES.items():
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


def test_every_digit_is_on_the_screen():
    out = io.StringIO()
    print_notebook(Console(width=120, file=out, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
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


def effect(name: str) -> str:
    return next(f"{each.notebook} | {each.right} | {each.effect}" for each in DIFFERENCES if each.name == name)


def test_the_differences_numbers():
    """From the notebook's own tables, whose sums are of 96 layers on four GPUs, with 1 GB = 1e9 bytes."""
    both = {name: sum(each.totals()[name] for each in TABLES.values()) for name in SUMMED}
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
    rows = {row["layer"]: row for row in TABLES["attention"].rows}
    hidden = sum(rows[name][f"flops_{way}"] for name in ("logits", "attend") for way in ("fwd", "bwd"))
    assert f"{hidden * 96 / 2:.1f} of {work:.1f} TFLOP" in effect("causal mask")
    assert f"48.3 of {kept:.1f} GB" in effect("fused attention")  # (0.2013 + 0.1007 + 0.2013) x 96
    assert "7.2 GB less for 16.1 ms" in effect("gathering norms' outputs again in backward")
    assert "(tp - 1) / tp: 0.037749 GB | the whole: 0.050332 GB" in effect("volume")
    assert "fc2 0.618494 TFLOP | not counted: fc2 0.618475" in effect("additions of reduce-scatters")
    assert {each.kind for each in DIFFERENCES} == {"wrong", "missing", "text"}
    # Backward of element-wise operators reads dY and writes dX: at 1555 GB/s another 2 bytes of each number.
    elements = 2 * 2048 * 12_288 + 24 * 2048**2 + 2 * 512 * 12_288  # act and dpr1, dropout_softmax, both of the stream
    assert f"{elements * 2 * 96 / MEMORY_RATE * 1e-6:.1f} ms" in effect("backward of GELU and dropout")
    assert f"{24 * 2048 * 128 * 2 * 96 / MEMORY_RATE * 1e-6:.1f} ms" in effect("backward of attend")
    assert "0.025 MB per norm, 0.003 ms" in effect("backward of a layer norm")
