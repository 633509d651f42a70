"""Differentiable collectives in conjugate pairs: the backward of each is the forward of its partner.

    copy             x on every rank                  its gradient is the sum of the ranks' gradients
    reduce           the sum of the ranks' x          its gradient is the same on every rank
    scatter          this rank's part of x            the parts of its gradient are gathered
    gather           all ranks' parts of x            its gradient is this rank's part
    gather_sequence  all ranks' parts of x            its gradient is this rank's part of the sum over the ranks
    reduce_sequence  this rank's part of the sum      the parts of its gradient are gathered
    Exchange         rows from all ranks              the rows of its gradient go back

Copy and reduce are f and g of Megatron-LM (arXiv:1909.08053, section 3), the last two g and g-bar of sequence
parallelism (arXiv:2205.05198, section 4.2.2). The computation after copy or gather_sequence differs by rank, so its
gradients are summed; after gather it is the same on every rank, so each rank's gradient is the whole gradient.

No function writes to its input or to the gradient that it is given. A group of one rank does nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.comm.group import Group
from cs336_systems.comm.verbs import Work, all_gather, all_reduce, all_to_all, reduce_scatter

Move = Callable[..., Tensor]  # of x, group, dim and label


def _same(x: Tensor, group: Group, dim: int, label: str) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group, dim: int, label: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total.view(-1), group, label, "sum").wait()
    return total


def _part(x: Tensor, group: Group, dim: int, label: str) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _whole(x: Tensor, group: Group, dim: int, label: str) -> Tensor:
    parts = x.new_empty((group.size(), *x.shape))
    parts[group.rank()] = x
    all_gather(parts.view(-1), group, label).wait()
    return torch.cat(parts.unbind(), dim)


def _part_of_sum(x: Tensor, group: Group, dim: int, label: str) -> Tensor:
    parts = torch.stack(x.chunk(group.size(), dim))
    reduce_scatter(parts.view(-1), group, label, "sum").wait()
    return parts[group.rank()].clone()


class Conjugate(torch.autograd.Function):
    """Apply one function to x in forward, and its conjugate to the gradient in backward, which can be differentiated,
    too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.ahead, ctx.back = ahead, back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Conjugate.apply(gradient, ctx.back, ctx.ahead), None, None


def _apply(x: Tensor, ahead: Move, back: Move, group: Group, dim: int, label: str) -> Tensor:
    if group.size() == 1:
        return x
    if x.shape and ahead in (_part, _part_of_sum) and x.shape[dim] % group.size():
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide over {group.size()} ranks")
    backward = partial(back, group=group, dim=dim, label=f"{label}, gradient")
    y: Tensor = Conjugate.apply(x, partial(ahead, group=group, dim=dim, label=label), backward)
    return y


def copy(x: Tensor, group: Group, label: str = "copy") -> Tensor:
    """Return x; its gradient is summed over the ranks."""
    return _apply(x, _same, _sum, group, 0, label)


def reduce(x: Tensor, group: Group, label: str = "reduce") -> Tensor:
    """Sum x over the ranks."""
    return _apply(x, _sum, _same, group, 0, label)


def scatter(x: Tensor, dim: int, group: Group, label: str = "scatter") -> Tensor:
    """Return this rank's part of x along `dim`. Raises ValueError if it does not divide."""
    return _apply(x, _part, _whole, group, dim, label)


def gather(x: Tensor, dim: int, group: Group, label: str = "gather") -> Tensor:
    """Join the ranks' parts along `dim`, for a computation that is the same on every rank."""
    return _apply(x, _whole, _part, group, dim, label)


def gather_sequence(x: Tensor, dim: int, group: Group, label: str = "gather sequence") -> Tensor:
    """Join the ranks' parts along `dim`, for a computation that differs by rank."""
    return _apply(x, _whole, _part_of_sum, group, dim, label)


def reduce_sequence(x: Tensor, dim: int, group: Group, label: str = "reduce sequence") -> Tensor:
    """Sum x over the ranks; returns this rank's part along `dim`. Raises ValueError if it does not divide."""
    return _apply(x, _part_of_sum, _whole, group, dim, label)


class Exchange:
    """An all-to-all in flight: the first given[0] rows of x (rows ...) go to rank 0 of the group, and so on; taken[r]
    rows arrive from rank r. Counts may be zero. Every rank must construct it, and run backward if any rank does.

    Computation between its two halves, the constructor and `wait()`, overlaps it: in forward and, because autograd runs
    nodes in reverse order, in backward as well. The halves are two nodes of the graph. An empty tensor, the ticket,
    connects them, because the rows that arrive may have another shape than the rows that leave.

    A record lists it under `label` with the elements that this rank sends, and its backward as `label, gradient`. A
    group of one rank sends nothing. Raises ValueError for counts that do not add up to the rows.
    """

    def __init__(self, x: Tensor, given: Sequence[int], taken: Sequence[int], group: Group, label: str) -> None:
        self.given, self.taken, self.group, self.label = list(given), list(taken), group, label
        self.under_way: list[tuple[Work, Tensor]] = []  # the graph keeps this object, so it holds no rows that arrived
        if sum(given) != len(x) or not len(given) == len(taken) == group.size():
            raise ValueError(f"counts {list(given)} of {len(x)} rows, and {list(taken)}, for {group.size()} ranks")
        begin = partial(self._begin, self.given, self.taken, label)
        self._ticket: Tensor | None = x if group.size() == 1 else Conjugate.apply(x, begin, self._end)

    def wait(self) -> Tensor:
        """Rows that arrived (rows ...), in the order of ranks. To be called once."""
        assert self._ticket is not None, "the rows have been fetched already"
        ticket, self._ticket = self._ticket, None
        begin = partial(self._begin, self.taken, self.given, f"{self.label}, gradient")
        return ticket if self.group.size() == 1 else Conjugate.apply(ticket, self._end, begin)

    def _begin(self, given: list[int], taken: list[int], label: str, x: Tensor) -> Tensor:
        """Start sending rows; returns a ticket."""
        inbox = x.new_empty((sum(taken), *x.shape[1:]))
        self.under_way.append((all_to_all(inbox, x.contiguous(), taken, given, self.group, label), inbox))
        return x.new_empty(0)

    def _end(self, ticket: Tensor) -> Tensor:
        """Rows of the transfer that started last."""
        work, inbox = self.under_way.pop()
        work.wait()
        return inbox
