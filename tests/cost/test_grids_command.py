"""`explain grids` prints what `summa.py` computes."""

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.notebook.summa import block_cost, grids, rows_for_summa
from cs336_systems.host.console import format_count, run_command


def test_every_grid_has_a_row(capsys):
    assert run_command(main, ["explain", "grids", "--ranks", "64", "--tokens", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[4:10]
    assert [row.split(":")[0] for row in rows] == [grid.kind for grid in grids(64)]
    for row, grid in zip(rows, grids(64), strict=True):
        cost = block_cost(grid, 4096, 12_288, 49_152)
        assert format_count(cost.received_by_each) in row
        assert format_count(cost.flops) in row
    assert f"from {rows_for_summa(12_288, 49_152, 8):,.0f} tokens on" in lines[-1]


def test_what_does_not_divide_says_so(capsys):
    assert run_command(main, ["explain", "grids", "--ranks", "7", "--tokens", "4096"]) == 0
    assert "must be a positive multiple of 7" in capsys.readouterr().out
