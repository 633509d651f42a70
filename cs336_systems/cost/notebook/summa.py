"""Tensor parallelism on grids of ranks: traffic and memory of one product `(m k) x (k n)` with both operands cut,
in 2D, 2.5D and 3D, beside Megatron's 1D. With more dimensions a rank receives less, if matrices are large enough.

- `1d` (Shoeybi et al., arXiv:1909.08053): p ranks cut the weight only; with sequence parallelism (Korthikanti et al.,
  arXiv:2205.05198) the stream is gathered before, or reduced and scattered after.
- `2d` (SUMMA, van de Geijn and Watts 1997; Optimus, arXiv:2104.05343): q x q ranks. In step t of q, rank (i, t) sends
  its block of A to its row and rank (t, j) its block of B to its column; all add one product of blocks to their C.
- `2.5d` (Solomonik and Demmel 2011): q x q x c ranks. Every layer gets a copy of A and B and takes q / c of the steps;
  the layers' sums are added up.
- `tesseract` (Wang et al., arXiv:2105.14500): q x q x c ranks. A layer has 1 / c of the rows of A and all of B, so
  forward adds nothing up between layers: data parallelism of SUMMAs.
- `3d` (Agarwal et al. 1995; Bian et al., arXiv:2105.14450): q x q x q ranks. Rank (i, j, l) multiplies block (i, l) of
  A by block (l, j) of B; either is gathered from the q ranks that share it, and C is reduced and scattered over l.

All counts are in elements. Received elements are counted once, as a broadcast in a pipeline or a ring costs; a tree
takes log2 q rounds instead of (q - 1) / q. Dimensions of a grid must divide those of the matrices.
"""

from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal, NamedTuple

from cs336_systems.errors import UserError

Kind = Literal["1d", "2d", "2.5d", "tesseract", "3d"]


@dataclass(frozen=True)
class Grid:
    """Ranks in a line of `side` (1d), a square (2d), `depth` squares (2.5d, tesseract) or a cube (3d). Layers of
    2.5d share the steps, so `depth` divides `side` there; the others have no depth."""

    kind: Kind
    side: int
    depth: int = 1

    @property
    def sizes(self) -> list[int]:
        """Ranks along each dimension."""
        dimensions = {"1d": 1, "3d": 3}.get(self.kind, 2)
        return [self.side] * dimensions + [self.depth] * (self.kind in ("2.5d", "tesseract"))

    @property
    def name(self) -> str:
        """`2.5d: 4 x 4 x 2`."""
        return f"{self.kind}: {' x '.join(map(str, self.sizes))}"

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    @property
    def cuts(self) -> tuple[int, int, int]:
        """Number of pieces, at most, into which it cuts m, k and n."""
        q, depth = self.side, self.depth
        return {"1d": (q, q, q), "3d": (q * q, q * q, q), "tesseract": (q * depth, q, q)}.get(self.kind, (q, q, q))


class Cost(NamedTuple):
    """One product or several, in elements and FLOPs."""

    flops: int  # on a rank
    received: int  # from other ranks, by all ranks together: not all layers of a 2.5d grid receive the same
    held: int  # on a rank: its parts of both operands and the result
    buffers: int  # further elements while a rank computes, for the largest product


def product_cost(grid: Grid, m: int, k: int, n: int, gathers: bool = True) -> Cost:
    """Cost of `(m k) x (k n)` on a grid. `gathers` is of 1d only: whether A is gathered and B cut by columns, or B cut
    by rows and C reduced and scattered. Raises UserError if the grid does not divide the sizes."""
    for name, size, cut in zip("mkn", (m, k, n), grid.cuts, strict=True):
        if size < 1 or size % cut:
            where = f"on a {grid.kind} grid of {grid.side}"
            raise UserError(f"{name} = {size} must be a positive multiple of {cut} {where}")
    a, b, c, q, depth = m * k, k * n, m * n, grid.side, grid.depth
    every, sent = a + b + c, a if gathers else c
    # A 2.5d grid sends A and B to its other layers, and their sums back; a 2d grid has one.
    square = (q - 1) * (a + b) + (depth - 1) * every, every // q**2, (a + b) // q**2
    received, held, buffers = {
        "1d": ((q - 1) * sent, every // q, sent - sent // q),
        "tesseract": ((q - 1) * (a + depth * b), (a // depth + b + c // depth) // q**2, (a // depth + b) // q**2),
        "3d": ((q - 1) * every, every // q**3, every // q**2 - every // q**3),
    }.get(grid.kind, square)
    return Cost(2 * m * k * n // grid.ranks, received, held, buffers)


def block_cost(grid: Grid, rows: int, d_model: int, d_ff: int) -> Cost:
    """The four products of a transformer block's forward, over `rows` tokens: queries, keys and values, the projection
    behind attention, and a feed-forward of two matrices.

    Attention itself sends nothing if a line divides its heads, or a square's rows divide the batch and its columns the
    heads. Left out: the sums of norms over rows that are cut, two numbers per row.
    """
    shapes = ((d_model, 3 * d_model), (d_model, d_model), (d_model, d_ff), (d_ff, d_model))
    each = [product_cost(grid, rows, k, n, gathers=not index % 2) for index, (k, n) in enumerate(shapes)]
    flops, received, held, buffers = zip(*each, strict=True)
    return Cost(sum(flops), sum(received), sum(held), max(buffers))


def grids(ranks: int) -> tuple[Grid, ...]:
    """Every grid of these ranks: a line always, layers of squares of at least 2 x 2, a cube if there is one."""
    found = [Grid("1d", ranks)]
    for side in (each for each in range(isqrt(ranks), 1, -1) if ranks % each**2 == 0):
        depth = ranks // side**2
        if depth == 1:
            found.append(Grid("2d", side))
        else:
            kinds: tuple[Kind, ...] = ("2.5d", "tesseract") if side % depth == 0 else ("tesseract",)
            found += [Grid(kind, side, depth) for kind in kinds] + [Grid("3d", side)] * (depth == side)
    return tuple(found)
