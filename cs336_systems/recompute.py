"""Activation checkpointing: keep a segment's input, and run the segment again when backward wants the rest.

(Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.)
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[[int, int, Tensor], Tensor], first: int, last: int, x: Tensor) -> Tensor:
    """Run blocks [first, last) keeping only x: backward runs them again."""
    return checkpoint(function, first, last, x, use_reentrant=False)


def run_nested(run: Callable[[int, int, Tensor], Tensor], first: int, last: int, x: Tensor) -> Tensor:
    """Run blocks [first, last) as two halves that are recomputed, and each half likewise.

    Not inside `run_blocks`: a function that calls itself is a cycle with all that it refers to, a mask for example, and
    would hold that until the garbage collector comes round.
    """
    if last - first == 1:
        return run(first, last, x)
    middle = (first + last) // 2
    half = partial(run_nested, run)
    x = recomputed(half, first, middle, x)
    return recomputed(half, middle, last, x)
