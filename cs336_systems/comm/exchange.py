"""Uneven all-to-all of rows with autograd: the backward of an all-to-all is the all-to-all with the counts swapped.

It has two halves, `Exchange(...)` and `wait()`, so that computation between them overlaps it: in forward and, because
autograd runs nodes in reverse order, in backward as well. An empty tensor, the ticket, connects the two halves in the
graph, because rows that arrive may have another shape than rows that leave.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.comm.group import Group
from cs336_systems.comm.verbs import Work, all_to_all


class Exchange:
    """An all-to-all in flight: the first given[0] rows of x (rows ...) go to rank 0 of the group, and so on; taken[r]
    rows arrive from rank r. Counts may be zero. Every rank must construct it, and run backward if any rank does.

    A record lists it under `label` with the elements that this rank sends, and its backward as `label, gradient`. A
    group of one rank sends nothing. Raises ValueError for counts that do not add up to the rows.
    """

    def __init__(self, x: Tensor, given: Sequence[int], taken: Sequence[int], group: Group, label: str) -> None:
        self.given, self.taken, self.group, self.label = list(given), list(taken), group, label
        self.under_way: list[tuple[Work, Tensor]] = []  # the graph keeps this object, so it holds no rows that arrived
        if sum(given) != len(x) or not len(given) == len(taken) == group.size():
            raise ValueError(f"counts {list(given)} of {len(x)} rows, and {list(taken)}, for {group.size()} ranks")
        self._ticket: Tensor | None = x if group.size() == 1 else _Begin.apply(x, self)

    def wait(self) -> Tensor:
        """Rows that arrived (rows ...), in the order of ranks. To be called once."""
        assert self._ticket is not None, "the rows have been fetched already"
        ticket, self._ticket = self._ticket, None
        return ticket if self.group.size() == 1 else _End.apply(ticket, self)

    def begin(self, x: Tensor, given: list[int], taken: list[int], label: str) -> Tensor:
        """Start sending rows; returns a ticket."""
        inbox = x.new_empty((sum(taken), *x.shape[1:]))
        self.under_way.append((all_to_all(inbox, x.contiguous(), taken, given, self.group, label), inbox))
        return x.new_empty(0)

    def end(self) -> Tensor:
        """Rows of the transfer that started last."""
        work, inbox = self.under_way.pop()
        work.wait()
        return inbox


class _Begin(torch.autograd.Function):
    """Rows to a ticket: starts the transfer in forward, waits for the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(x, exchange.given, exchange.taken, exchange.label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _End(torch.autograd.Function):
    """Ticket to rows: waits in forward, starts the transfer of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        back: Exchange = ctx.exchange
        return back.begin(gradient, back.taken, back.given, f"{back.label}, gradient"), None
