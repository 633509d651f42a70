"""Rows sent to other ranks, and their gradients sent back, against a permutation in one process; traffic, refusals."""

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.comm import Exchange
from tests.comm.test_pairs import compare, drawn
from tests.support import ranks

# Rows that rank r gives to rank s are counts[r][s].
COUNTS = {
    1: [[[3]], [[0]]],
    2: [
        [[2, 1], [3, 4]],  # uneven
        [[0, 5], [0, 2]],  # all to one rank
        [[0, 0], [3, 1]],  # the first rank has none
        [[0, 3], [0, 0]],  # the first rank gets none, the second gives none
        [[0, 0], [0, 0]],  # nothing at all
    ],
    4: [
        [[1, 2, 0, 3], [4, 0, 1, 1], [0, 0, 0, 0], [2, 5, 1, 0]],
        [[0, 0, 3, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 1, 0]],
        [[0] * 4] * 4,
    ],
}


def permuted(xs: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
    """Rows that each rank should get, computed in one process."""
    parts = [x.split(row) for x, row in zip(xs, counts, strict=True)]
    return [torch.cat([mine[rank] for mine in parts]) for rank in range(len(xs))]


def exchange_case(group) -> None:
    size, me = group.size(), group.rank()
    for counts in COUNTS[size]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for which in range(3 if dtype == torch.float64 else 1):
                check(group, counts, dtype, which)
    uneven = COUNTS[size][0]
    check_inverse(group, uneven)
    check_kept(group, uneven)
    mine, theirs = uneven[me], [row[me] for row in uneven]
    for rows, given, taken in ((1, mine, theirs), (0, [*mine, 0], theirs), (0, mine, [*theirs, 0])):
        with pytest.raises(ValueError, match="counts"):
            Exchange(torch.zeros(sum(given) + rows, 1), given, taken, group, "wrong")


def check(group, counts: list[list[int]], dtype: torch.dtype, which: int) -> None:
    """The record lists what was sent, there and back."""
    size, me = group.size(), group.rank()
    given, taken = counts[me], [row[me] for row in counts]
    xs = [drawn(rank, sum(row), 2, 3).to(dtype) for rank, row in enumerate(counts)]

    def call(x: Tensor) -> Tensor:
        return Exchange(x, given, taken, group, "rows").wait()

    events = compare(call, lambda xs: permuted(xs, counts), xs, (which, which), (me, me))
    listed = [(event.verb, event.label, event.nbytes, event.ranks) for event in events]
    both = zip(("rows", "rows, gradient"), (sum(given), sum(taken)), strict=True)
    assert listed == [("all-to-all", label, 6 * rows * dtype.itemsize, size) for label, rows in both if size > 1]


def check_inverse(group, counts: list[list[int]]) -> None:
    """There and back is the identity, value and gradient; so it is for the second of two that are under way at once."""
    me = group.rank()
    given, taken = counts[me], [row[me] for row in counts]
    x = drawn(me, sum(given), 4).requires_grad_()
    other = drawn(50 + me, sum(given), 2)
    first, second = Exchange(x, given, taken, group, "one"), Exchange(other, given, taken, group, "two")
    back = Exchange(second.wait(), taken, given, group, "two, back")
    there = first.wait()
    y = Exchange(there, taken, given, group, "one, back").wait()
    g = drawn(200 + me, *y.shape)
    assert torch.equal(y, x)
    assert torch.equal(back.wait(), other)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], g)


def check_kept(group, counts: list[list[int]]) -> None:
    """An exchange whose rows were fetched does not hold them, and is freed by the count of references alone: with a
    cycle, what came would stay until the garbage collector comes round."""
    me = group.rank()
    given, taken = counts[me], [row[me] for row in counts]
    gc.disable()
    try:
        exchange = Exchange(drawn(me, sum(given), 4).requires_grad_() * 2, given, taken, group, "kept")
        y = exchange.wait()
        memory, route = StorageWeakRef(y.untyped_storage()), weakref.ref(exchange)
        del y
        for _ in range(1000):  # gloo's own thread lets go a moment later
            if memory.expired():
                break
            time.sleep(0.001)
        assert memory.expired()
        del exchange
        assert route() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", COUNTS)
def test_an_exchange_is_a_permutation_that_autograd_knows(size):
    ranks.run(exchange_case, size)
