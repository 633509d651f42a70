"""Grids of ranks, simulated: blocks are really moved, and every element from another rank is counted."""

import numpy as np
import pytest

from cs336_systems.cost.__main__ import main
from cs336_systems.cost.notebook.summa import Grid, block_cost, grids, product_cost
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_count, run_command

M, K, N = 24, 16, 32


class Ranks:
    """The multiplications and arrivals of all ranks."""

    def __init__(self) -> None:
        self.received = 0
        self.flops: dict[object, int] = {}

    def get(self, block: np.ndarray, source: object, rank: object) -> np.ndarray:
        """A block of one rank, at another."""
        self.received += block.size * (source != rank)
        return block

    def multiply(self, rank: object, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.flops[rank] = self.flops.get(rank, 0) + 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b


def blocks(matrix: np.ndarray, rows: int, columns: int) -> list[list[np.ndarray]]:
    return [np.split(part, columns, axis=1) for part in np.split(matrix, rows, axis=0)]


def square(ranks: Ranks, a: list, b: list, q: int, layer: int, steps: range) -> list[list[np.ndarray]]:
    """SUMMA's steps on one layer: rank (i, j) has block (i, j) of either."""
    out = [[np.zeros((a[0][0].shape[0], b[0][0].shape[1])) for _ in range(q)] for _ in range(q)]
    for step in steps:
        for i in range(q):
            for j in range(q):
                here = (i, j, layer)
                left = ranks.get(a[i][step], (i, step, layer), here)
                above = ranks.get(b[step][j], (step, j, layer), here)
                out[i][j] += ranks.multiply(here, left, above)
    return out


def line(ranks: Ranks, grid: Grid, a: np.ndarray, b: np.ndarray, gathers: bool) -> np.ndarray:
    p = grid.side
    if gathers:
        parts = []
        for rank, columns in enumerate(np.split(b, p, axis=1)):
            rows = [ranks.get(part, source, rank) for source, part in enumerate(np.split(a, p))]
            parts.append(ranks.multiply(rank, np.concatenate(rows), columns))
        return np.concatenate(parts, axis=1)
    partial = [
        ranks.multiply(r, left, below)
        for r, (left, below) in enumerate(zip(np.split(a, p, axis=1), np.split(b, p), strict=True))
    ]
    # In a ring each rank's rows pass all the others, a sum arriving at every one of p - 1 steps.
    rows = [[np.split(each, p)[rank] for each in partial] for rank in range(p)]
    return np.concatenate([around_a_ring(ranks, parts, rank) for rank, parts in enumerate(rows)])


def around_a_ring(ranks: Ranks, parts: list[np.ndarray], last: object) -> np.ndarray:
    """The sum of parts, one a rank, ending at one of them."""
    result = parts[0]
    for part in parts[1:]:
        result = ranks.get(result, "the one before", last) + part
    return result


def layered(ranks: Ranks, grid: Grid, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    q, depth = grid.side, grid.depth
    left, right = blocks(a, q, q), blocks(b, q, q)
    sums = []
    for layer in range(depth):
        for i in range(q):
            for j in range(q):
                for each in (left, right):
                    ranks.get(each[i][j], (i, j, 0), (i, j, layer))
        steps = range(layer * q // depth, (layer + 1) * q // depth)
        sums.append(square(ranks, left, right, q, layer, steps))
    out = [[around_a_ring(ranks, [each[i][j] for each in sums], (i, j)) for j in range(q)] for i in range(q)]
    return np.block(out)


def tesseract(ranks: Ranks, grid: Grid, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    q = grid.side
    parts = [
        np.block(square(ranks, blocks(rows, q, q), blocks(b, q, q), q, layer, range(q)))
        for layer, rows in enumerate(np.split(a, grid.depth))
    ]
    return np.concatenate(parts)


def cube(ranks: Ranks, grid: Grid, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    q = grid.side
    left, right = blocks(a, q, q), blocks(b, q, q)
    out = [[[] for _ in range(q)] for _ in range(q)]
    for i, j, last in np.ndindex(q, q, q):
        # Rank (i, j, last) has the j-th share of A's block (i, last), and the i-th of B's (last, j).
        here = (i, j, last)
        shares = [ranks.get(each, (i, n, last), here) for n, each in enumerate(np.split(left[i][last], q))]
        below = [ranks.get(each, (n, j, last), here) for n, each in enumerate(np.split(right[last][j], q))]
        out[i][j].append(ranks.multiply(here, np.concatenate(shares), np.concatenate(below)))

    def scattered(parts: list[np.ndarray]) -> np.ndarray:
        pieces = [np.split(part, q) for part in parts]
        return np.concatenate([around_a_ring(ranks, [each[n] for each in pieces], n) for n in range(q)])

    return np.block([[scattered(parts) for parts in row] for row in out])


def simulate(grid: Grid, gathers: bool) -> tuple[Ranks, np.ndarray, np.ndarray]:
    ranks, random = Ranks(), np.random.default_rng(0)
    a, b = (random.integers(-3, 4, shape).astype(float) for shape in ((M, K), (K, N)))
    if grid.kind == "1d":
        return ranks, line(ranks, grid, a, b, gathers), a @ b
    run = {"2d": layered, "2.5d": layered, "tesseract": tesseract, "3d": cube}[grid.kind]
    return ranks, run(ranks, grid, a, b), a @ b


@pytest.mark.parametrize(
    ("grid", "gathers"),
    [
        (Grid("1d", 4), True),
        (Grid("1d", 4), False),
        (Grid("2d", 2), True),
        (Grid("2d", 4), True),
        (Grid("2.5d", 4, 2), True),
        (Grid("2.5d", 4, 4), True),
        (Grid("tesseract", 2, 3), True),
        (Grid("tesseract", 4, 2), True),
        (Grid("3d", 2), True),
    ],
)
def test_what_arrives_and_is_multiplied(grid, gathers):
    ranks, result, expected = simulate(grid, gathers)
    np.testing.assert_array_equal(result, expected)
    cost = product_cost(grid, M, K, N, gathers)
    assert len(ranks.flops) == grid.ranks
    assert set(ranks.flops.values()) == {cost.flops}
    assert cost.received == ranks.received


def test_what_a_rank_holds():
    a, b, c = M * K, K * N, M * N

    def held(grid: Grid, gathers: bool = True) -> tuple[int, int]:
        cost = product_cost(grid, M, K, N, gathers)
        return cost.held, cost.buffers

    assert held(Grid("1d", 4)) == ((a + b + c) // 4, 3 * a // 4)  # and the rest of A
    assert held(Grid("1d", 4), False) == ((a + b + c) // 4, 3 * c // 4)  # and the rest of its sum
    assert held(Grid("2d", 2)) == ((a + b + c) // 4, (a + b) // 4)  # and a block of another rank of either
    assert held(Grid("2.5d", 4, 2)) == ((a + b + c) // 16, (a + b) // 16)
    # 24 ranks: rows of 24 / (2 x 3) = 4, and B four times smaller, thrice there
    assert held(Grid("tesseract", 2, 3)) == (4 * 8 + 8 * 16 + 4 * 16, 4 * 8 + 8 * 16)
    assert held(Grid("3d", 2)) == ((a + b + c) // 8, (a + b + c) // 8)  # a block of each, of which it has a half


def test_a_block_by_hand():
    rows, width = 4096, 1024
    stream, square_ = rows * width, width**2
    for side in (2, 4, 8):
        # A block of each of the four inputs, 7 r e in all, and of the 12 e^2 weights, from q - 1 other ranks.
        two = block_cost(Grid("2d", side), rows, width, 4 * width)
        assert two.received / side**2 == (7 * stream + 12 * square_) * (side - 1) / side**2
        # Megatron: 4 (p - 1) / p bsh, as two all-reduces or as four halves of them.
        one = block_cost(Grid("1d", side**2), rows, width, 4 * width)
        assert one.received / side**2 == 4 * (side**2 - 1) / side**2 * stream
        assert one.flops == two.flops == 2 * rows * 12 * square_ // side**2
    assert one.held == two.held
    assert one.buffers == 63 * stream // 64
    assert two.buffers == (4 * stream + 4 * square_) // 64  # of fc2


def test_grids_of_so_many_ranks():
    assert grids(8) == (Grid("1d", 8), Grid("2.5d", 2, 2), Grid("tesseract", 2, 2), Grid("3d", 2))
    assert grids(12) == (Grid("1d", 12), Grid("tesseract", 2, 3))
    assert grids(16) == (Grid("1d", 16), Grid("2d", 4), Grid("tesseract", 2, 4))
    assert all(grid.ranks == ranks for ranks in range(1, 65) for grid in grids(ranks))


def test_what_cannot_be_laid_out_gets_one_line():
    with pytest.raises(UserError, match=r"^m = 6 must be a positive multiple of 4 on a 2d grid of 4$"):
        product_cost(Grid("2d", 4), 6, 8, 8)


def test_every_grid_has_a_row(capsys):
    assert run_command(main, ["explain", "grids", "--ranks", "64", "--tokens", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[4:10]
    assert [row.split(":")[0] for row in rows] == [grid.kind for grid in grids(64)]
    for row, grid in zip(rows, grids(64), strict=True):
        cost = block_cost(grid, 4096, 12_288, 49_152)
        assert format_count(cost.received / 64) in row
        assert format_count(cost.flops) in row
    assert run_command(main, ["explain", "grids", "--ranks", "7", "--tokens", "4096"]) == 0
    assert "must be a positive multiple of 7" in capsys.readouterr().out
