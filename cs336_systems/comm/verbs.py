"""The verbs. Each works in place on a flat tensor, returns at once, and is done when `Work.wait` returns.

The algorithm is chosen by backend: gloo's own reduce-scatter and all-gather are slower than its all-reduce although
they move half as much, so there both are exchanges of slices.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.comm import flight
from cs336_systems.comm.events import Event, log
from cs336_systems.comm.group import CommError, Group, count, occurrence, parted, sequence
from cs336_systems.text import printable

Reduction = Literal["mean", "sum", "max"]
REDUCTIONS = {"mean": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Work:
    """A collective under way; `wait` returns when its result is in place, and may be called again."""

    def __init__(
        self,
        event: Event,
        group: Group,
        start: Callable[[], Sequence[dist.Work | None]] = tuple,
        finish: Callable[[], object] | None = None,
        number: int | None = None,
    ) -> None:
        self.event, self.group, self.finish = event, group, finish
        self.number = sequence(group) if number is None else number
        self.turn = -1
        if start is not tuple:
            name, dtype = group.group_name, str(event.dtype)[6:]  # without "torch."
            self.turn = flight.launch(event.verb, name, event.label, event.nbytes, dtype, self.number)
        try:
            with event.annotate("launch", self.number, group.group_name):
                self.pending = [work for work in start() if work is not None]
        except RuntimeError as error:  # a connection that is known to be broken
            raise self._explained(error) from error

    def wait(self) -> None:
        """Returns when the result is in place. Raises CommError if it never will be."""
        pending, self.pending = self.pending, []
        finish, self.finish = self.finish, None
        if not pending and finish is None:
            return
        flight.advance(self.turn, flight.WAITING)
        try:
            with self.event.annotate("wait", self.number, self.group.group_name):
                for work in pending:
                    work.wait()
        except RuntimeError as error:
            raise self._explained(error) from error
        if finish:
            finish()
        flight.advance(self.turn, flight.FINISHED)

    def _explained(self, error: RuntimeError) -> CommError:
        """The failure, and what every other rank says that it was doing."""
        event = self.event
        what = f"{event.verb} no. {self.number} ({event.label or 'no label'}, {event.nbytes:,} bytes)"
        doing = printable(f"waited in {what}{flight.of_step(flight.current_step())}")
        cause = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])[:120]  # without gloo's file and line
        return parted(doing, self.group, f" ({cause})")


def send(tensor: Tensor, to: int, group: Group, label: str) -> Work:
    """Give a contiguous tensor to the group's rank `to`, which must `receive` it by the same label."""
    return _message("send", tensor, group.rank(), to, group, label)


def receive(tensor: Tensor, source: int, group: Group, label: str) -> Work:
    """Fill a contiguous tensor with what the group's rank `source` sends by the same label."""
    return _message("receive", tensor, source, group.rank(), group, label)


def _message(verb: str, tensor: Tensor, source: int, target: int, group: Group, label: str) -> Work:
    event = Event(verb, label, tensor.numel(), tensor.dtype, 2, verb)
    log(event)
    # Its number counts messages of the label between the two, since a group's collectives are counted on all its ranks.
    kind = f"message {source} to {target} {label} {tensor.numel()} {tensor.dtype}"
    number = occurrence(kind, group)
    tag = zlib.crc32(f"{kind} {number}".encode()) >> 1
    if verb == "send":
        return Work(event, group, lambda: [dist.isend(tensor, group=group, tag=tag, group_dst=target)], number=number)
    return Work(event, group, lambda: [dist.irecv(tensor, group=group, tag=tag, group_src=source)], number=number)


def _begin(verb: str, label: str, numel: int, tensor: Tensor, group: Group, algorithm: str = "") -> Event:
    event = Event(verb, label, numel, tensor.dtype, group.size(), algorithm or verb)
    count(group)
    log(event)
    return event


def _tag(event: Event, group: Group) -> int:
    """A tag that only the same collective has: gloo would take another one, even of another size, for it silently.

    It counts how often this verb had this label, so ranks that do the same work in another order still meet.
    """
    kind = f"{event.verb} {event.label} {event.numel} {event.dtype}"
    return zlib.crc32(f"{kind} {occurrence(kind, group)}".encode()) >> 1


def _by_slices(tensor: Tensor, group: Group) -> bool:
    """Whether slices are exchanged by send and receive, which gloo offers for CPU tensors only."""
    return dist.get_backend(group) == "gloo" and tensor.device.type == "cpu"


def all_reduce(flat: Tensor, group: Group, label: str = "", reduction: Reduction = "mean") -> Work:
    """Every rank gets the mean (or sum, or largest) over all ranks, in place. A largest value may lose NaN."""
    event = _begin("all-reduce", label, flat.numel(), flat, group)
    if group.size() == 1:
        return Work(event, group)
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    how = REDUCTIONS[reduction]
    return Work(event, group, lambda: [dist.all_reduce(flat, how, group=group, async_op=True)])


def reduce_scatter(flat: Tensor, group: Group, label: str = "", reduction: Literal["mean", "sum"] = "mean") -> Work:
    """Rank r gets the mean (or sum) over all ranks of the r-th of equal slices, in place; the others are then void.

    On gloo the terms are added in the order of the ranks, so the result does not depend on how tensors were grouped.
    """
    ranks, me, how = group.size(), group.rank(), REDUCTIONS[reduction]
    slices = flat.chunk(ranks)
    assert flat.numel() % ranks == 0
    direct = _by_slices(flat, group)
    staged = dist.get_backend(group) == "gloo" and not direct
    event = _begin("reduce-scatter", label, flat.numel(), flat, group, "all-reduce" if staged else "")
    if ranks == 1:
        return Work(event, group)
    if staged:
        return Work(event, group, lambda: [dist.all_reduce(flat, how, group=group, async_op=True)])
    if not direct:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Work(event, group, lambda: [scatter(slices[me], flat, how, group=group, async_op=True)])
    inbox = [slices[me] if rank == me else torch.empty_like(slices[me]) for rank in range(ranks)]
    tag = _tag(event, group)

    def add() -> None:
        total = inbox[0]
        for rank in range(1, ranks):
            if rank == me:
                total = slices[me].add_(total)
            else:
                total.add_(inbox[rank])
        if reduction == "mean":
            torch.div(total, ranks, out=slices[me])

    return Work(event, group, lambda: _exchange(list(slices), inbox, group, tag), add)


def all_gather(flat: Tensor, group: Group, label: str = "") -> Work:
    """Every rank gets all slices: before, rank r has only the r-th of equal slices of the same flat tensor."""
    ranks, me = group.size(), group.rank()
    slices = list(flat.chunk(ranks))
    assert flat.numel() % ranks == 0
    event = _begin("all-gather", label, flat.numel(), flat, group)
    if ranks == 1:
        return Work(event, group)
    if _by_slices(flat, group):
        tag = _tag(event, group)
        return Work(event, group, lambda: _exchange([slices[me]] * ranks, slices, group, tag))
    if dist.get_backend(group) == "gloo":
        send = partial(dist.broadcast, group=group, async_op=True)
        return Work(event, group, lambda: [send(slice_, group_src=rank) for rank, slice_ in enumerate(slices)])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Work(event, group, lambda: [gather(flat, slices[me], group=group, async_op=True)])


def broadcast(tensor: Tensor, source: int, group: Group, label: str = "") -> Work:
    """Every rank gets the tensor of the group's rank `source`, in place."""
    event = _begin("broadcast", label, tensor.numel(), tensor, group)
    if group.size() == 1 or not tensor.numel():
        return Work(event, group)
    sent = tensor.contiguous()
    start = partial(dist.broadcast, sent, group=group, async_op=True, group_src=source)
    return Work(event, group, lambda: [start()], None if sent is tensor else lambda: tensor.copy_(sent))


def all_to_all(
    output: Tensor, given: Tensor, output_rows: Sequence[int], given_rows: Sequence[int], group: Group, label: str = ""
) -> Work:
    """Rows to every rank: the first given_rows[0] of `given` (rows ...) go to rank 0, and so on; `output` is filled
    with output_rows[r] rows from each rank r in order. The counts may be uneven or zero."""
    event = _begin("all-to-all", label, given.numel(), given, group)
    arguments = (output, given, list(output_rows), list(given_rows), group)
    if group.size() == 1:
        output.copy_(given)
        return Work(event, group)
    return Work(event, group, lambda: [dist.all_to_all_single(*arguments, async_op=True)])


def _exchange(outbox: list[Tensor], inbox: list[Tensor], group: Group, tag: int) -> list[dist.Work | None]:
    """Send outbox[r] to every other rank r and receive inbox[r] from it, starting with the next rank."""
    ranks, me = group.size(), group.rank()
    around = range(1, ranks)
    if not outbox[0].numel():
        return []
    receive = [dist.irecv(inbox[(me - i) % ranks], group=group, tag=tag, group_src=(me - i) % ranks) for i in around]
    send = [dist.isend(outbox[(me + i) % ranks], group=group, tag=tag, group_dst=(me + i) % ranks) for i in around]
    return [*receive, *send]
