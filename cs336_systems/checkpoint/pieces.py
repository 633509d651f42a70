"""Pieces of named tensors: a rank's part, in the coordinates of the whole model.

Tensor and expert parallelism give a rank a box of a matrix, ZeRO gives it a run of the box's elements in order:

    whole (6 4), tensor-parallel rank 1 of 2: start (3 0), size (3 4)       . . . .
    ZeRO rank 0 of 2 in it: first 0, count 6                                . . . .
                                                                            . . . .
                                                                            x x x x
                                                                            x x . .
                                                                            . . . .

Every layout is made of such pieces, so one format holds them all, and any can be read from any other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

RANDOM = "random/"  # begins the names of what is no parameter: the states of random number generators
VALUE = "value"  # the kind of a parameter itself; others are of its optimizer's state, such as "exp_avg"


@dataclass(frozen=True)
class Box:
    """The elements [start, start + size) along each axis of a tensor of `shape`."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def overlap(self, other: "Box") -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The common elements as slices of each of the two; None without any."""
        mine, theirs = [], []
        for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True):
            low, high = max(a, b), min(a + m, b + n)
            if low >= high:
                return None
            mine.append(slice(low - a, high - a))
            theirs.append(slice(low - b, high - b))
        return tuple(mine), tuple(theirs)


@dataclass(frozen=True)
class Piece:
    """The elements [first, first + tensor.numel()) of a box in order, of the tensor `name` and of this `kind`."""

    name: str
    kind: str
    box: Box
    first: int
    tensor: Tensor

    @property
    def key(self) -> str:
        """The piece's name in a file; a parameter has its own name, as in other safetensors files."""
        return self.name if self.kind == VALUE else f"{self.name}:{self.kind}"


def my_share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The run [first, last) of `count` elements that one of several ranks with the same tensor writes."""
    return count * rank // ranks, count * (rank + 1) // ranks
