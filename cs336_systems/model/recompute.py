"""Activation checkpointing: forward keeps the input of some blocks, backward runs them again (arXiv:1604.06174)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[[int, int, Tensor], Tensor], first: int, last: int, x: Tensor) -> Tensor:
    """Run blocks [first, last) and keep only x for backward."""
    return checkpoint(function, first, last, x, use_reentrant=False)


def run_nested(run: Callable[[int, int, Tensor], Tensor], first: int, last: int, x: Tensor) -> Tensor:
    """Run blocks [first, last) as two recomputed halves, each of which does the same. Not a closure in `run_blocks`:
    one that calls itself is a reference cycle, which would hold a mask until the garbage collector runs."""
    if last - first == 1:
        return run(first, last, x)
    middle = (first + last) // 2
    half = partial(run_nested, run)
    return recomputed(half, middle, last, recomputed(half, first, middle, x))
