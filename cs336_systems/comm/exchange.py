"""Rows to other ranks and, in backward, their gradients back: an uneven all-to-all that autograd knows.

The backward of an all-to-all is the all-to-all with the counts exchanged. It is in two halves, `Exchange(...)` and
`wait()`, so that what is computed between them hides it: forward and, because autograd runs the nodes made last first,
backward as well.

    forward     begin  ...  wait             what is computed between begin and wait
    backward    wait   ...  begin            has its backward between begin and wait, too

Between the halves the graph has a ticket, an empty tensor: as many rows leave in backward as came in forward, and what
comes is of another shape than what lay there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.comm.group import Group
from cs336_systems.comm.verbs import Work, all_to_all


class Exchange:
    """Rows under way: the first given[0] of x (rows ...) go to rank 0 of the group, and so on; taken[r] come from rank
    r. Counts may be zero, also all of them. Every rank must make it, and run backward if any rank does.

    A record lists it under `label` with the elements that this rank gives, and backward as `label, gradient`. A group
    of one rank sends nothing. Raises ValueError for counts that do not add up to the rows.
    """

    def __init__(self, x: Tensor, given: Sequence[int], taken: Sequence[int], group: Group, label: str) -> None:
        self.route = Route(list(given), list(taken), group, label)
        if sum(given) != len(x) or not len(given) == len(taken) == group.size():
            raise ValueError(f"counts {list(given)} of {len(x)} rows, and {list(taken)}, for {group.size()} ranks")
        self._ticket: Tensor | None = x if group.size() == 1 else _Begin.apply(x, self.route)

    def wait(self) -> Tensor:
        """What has come (rows ...), in the order of the ranks. To be called once."""
        assert self._ticket is not None, "the rows have been fetched already"
        ticket, self._ticket = self._ticket, None
        return ticket if self.route.group.size() == 1 else _End.apply(ticket, self.route)


@dataclass
class Route:
    """How many rows go where, and those that are under way. The graph keeps it, but it keeps nothing that has come."""

    given: list[int]
    taken: list[int]
    group: Group
    label: str
    under_way: list[tuple[Work, Tensor]] = field(default_factory=list)

    def begin(self, x: Tensor, back: bool = False) -> Tensor:
        """Send rows, there or back; returns a ticket."""
        given, taken = (self.taken, self.given) if back else (self.given, self.taken)
        inbox = x.new_empty((sum(taken), *x.shape[1:]))
        label = f"{self.label}, gradient" if back else self.label
        self.under_way.append((all_to_all(inbox, x.contiguous(), taken, given, self.group, label), inbox))
        return x.new_empty(0)

    def end(self) -> Tensor:
        """What has come of the sending that began last."""
        work, inbox = self.under_way.pop()
        work.wait()
        return inbox


class _Begin(torch.autograd.Function):
    """Rows to a ticket: begins to send forward, waits for the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.begin(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None]:
        return ctx.route.end(), None


class _End(torch.autograd.Function):
    """A ticket to rows: waits forward, begins to send the gradient backward."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.route.begin(gradient, back=True), None
