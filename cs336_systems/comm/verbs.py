"""Collectives and messages. Each starts in place on a flat tensor; `Work.wait` completes it.

Each backend has its algorithms. Over shared memory (shared_verbs.py) a rank moves data only while it launches or waits,
not while it computes; gloo and NCCL transfer in the background. gloo's reduce-scatter and all-gather are slower than
its all-reduce although they move half as much, so with gloo both are built from sends and receives of slices.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from cs336_systems.comm import shared_verbs
from cs336_systems.comm.agreement import CommError, comm_error
from cs336_systems.comm.events import Event, is_profiling, records
from cs336_systems.comm.flight_recorder import FINISHED, WAITING, of_step, recorder
from cs336_systems.comm.group import Group, add_to_history, count, in_flight
from cs336_systems.comm.shared_memory import Key, transport
from cs336_systems.comm.shared_verbs import Reduction
from cs336_systems.comm.store import first_line
from cs336_systems.host.text import printable

REDUCTIONS = {"mean": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
UNNAMED = nullcontext()


class Work:
    """A collective or message in flight; `wait` returns when its result is in place, and may be called again.

    `launching` encloses the call that starts it. A group of one rank starts nothing, and its work is done at once.
    A collective without a tag is matched with the next one that each other rank launches. So that a mismatch is found,
    its `history` (a hash, not 0) is compared with those of this machine's ranks, before and after.
    """

    def __init__(self, event: Event, group: Group, number: int, history: int = 0) -> None:
        self.event, self.group, self.number, self.history, self.entry = event, group, number, history, -1
        self.pending: Sequence[Any] = ()  # torch's Works
        self.finish: Callable[[], object] | None = None
        for events in records:
            events.append(event)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Enter the launch in the flight recorder and in a profile. Raises CommError for a broken connection."""
        event = self.event
        words = event.verb, event.group, event.label, event.nbytes, str(event.dtype)[6:], self.number, self.history
        self.entry = recorder.mine.launch(*words)
        if not transport.on:
            self._compare()
        with self._explaining("launch"):
            yield
        while (first := next(iter(in_flight), None)) and all(each.is_completed() for each in first.pending):
            del in_flight[first]
        in_flight[self] = None
        if not self.pending:  # an empty tensor is not sent
            recorder.mine.advance(self.entry, FINISHED)

    def next_key(self) -> Key:
        """Key by which ranks that share memory match their parts of a collective without a tag."""
        return Key(count(self.group, "collectives without a tag"), self.history, self._compare)

    def __str__(self) -> str:
        return f"{self.event.verb} no. {self.number} ({self.event.label or 'no label'}, {self.event.nbytes:,} bytes)"

    def wait(self) -> None:
        """Wait until the result is in place. Raises CommError if it never will be."""
        in_flight.pop(self, None)
        pending, finish, self.pending, self.finish = self.pending, self.finish, (), None
        if not pending and finish is None:
            return
        recorder.mine.advance(self.entry, WAITING)
        with self._explaining("wait"):
            for work in pending:
                work.wait()
        if not transport.on:  # shared memory compares the ranks' histories before it moves anything
            self._compare()
        if finish:
            finish()
        recorder.mine.advance(self.entry, FINISHED)

    def _compare(self) -> None:
        """Raises CommError if another rank of this machine has launched different collectives, up to this number."""
        for rank, ring in recorder.others.items() if self.history else ():
            if (other := ring.other(self.event.group, self.number, self.history)) is not None:
                theirs = f"{other.verb} no. {other.number} ({other.label or 'no label'}, {other.nbytes:,} bytes"
                headline = (
                    f"rank {recorder.rank}'s {self} {str(self.event.dtype)[6:]} meets rank {rank}'s {theirs}) "
                    f"{other.dtype}, or one before it met another: launch the same ones in the same order on all ranks"
                )
                raise comm_error(f"refused {self}", self.group, silent=(), headline=headline)

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """Name a block in a profile, for instance `wait all-reduce 0#3 bucket 1` for the third collective of group 0;
        traces of several ranks are matched by this name. Raises CommError, which says what every other rank was doing,
        instead of torch's errors."""
        e = self.event
        name = f"{what} {e.verb} {e.group}#{self.number} {e.label}" if is_profiling() else ""
        try:
            with record_function(name.rstrip()) if name else UNNAMED:
                yield
        except CommError:
            raise
        except RuntimeError as error:
            doing = printable(f"waited in {self}{of_step(recorder.mine.step)}")
            raise comm_error(doing, self.group, f" ({first_line(error)})") from error


def send(tensor: Tensor, to: int, group: Group, label: str) -> Work:
    """Send a contiguous tensor to the group's rank `to`, which must `receive` it with the same label."""
    return _message("send", group.rank(), to, tensor, group, label, partial(dist.isend, group_dst=to))


def receive(tensor: Tensor, source: int, group: Group, label: str) -> Work:
    """Fill a contiguous tensor with the message that the group's rank `source` sends with the same label."""
    return _message("receive", source, group.rank(), tensor, group, label, partial(dist.irecv, group_src=source))


def _message(
    verb: str, source: int, to: int, tensor: Tensor, group: Group, label: str, begin: Callable[..., Any]
) -> Work:
    _require_rank(to if verb == "send" else source, group)
    # Counted by sender, receiver and label, not in the group's own count, which must stay equal on all its ranks.
    number, tag = _tag(f"message {source} to {to} {label} {tensor.numel()} {tensor.dtype}", group)
    work = Work(Event(verb, label, tensor.numel(), tensor.dtype, 2, verb, group.group_name), group, number)
    with work.launching():
        if transport.serves(group, tensor):
            work.pending = [shared_verbs.message(tensor, source, to, group, Key(tag))]
        else:
            work.pending = [begin(tensor, group=group, tag=tag)]
    return work


def _tag(kind: str, group: Group) -> tuple[int, int]:
    """Count a collective or message of this kind in a group; returns its number and a tag that no other has.

    gloo matches any two operations with the same tag, even of different sizes, without an error. A kind names verb,
    label and size, so ranks that launch the same work in different orders still match."""
    number = count(group, kind)
    return number, zlib.crc32(f"{kind} {number}".encode()) >> 1


@contextmanager
def _collective(
    verb: str, tensor: Tensor, group: Group, label: str, algorithm: str = "", alike: object = ""
) -> Iterator[Work]:
    """Count a collective, which the block starts unless the group has one rank. Verb, label, dtype and `alike` must be
    equal on all ranks; `alike` is None for a collective with tags."""
    event = Event(verb, label, tensor.numel(), tensor.dtype, group.size(), algorithm or verb, group.group_name)
    past = 0 if alike is None else add_to_history(group, f"{verb} {label} {tensor.dtype} {alike}")
    work = Work(event, group, count(group), past)
    with work.launching() if group.size() > 1 else UNNAMED:
        yield work


def _as_vector(flat: Tensor, group: Group, slices: int = 1, reduction: Reduction | Literal[False] = False) -> Tensor:
    """View a tensor as a vector. Raises ValueError for one that is not contiguous, unless it is a vector and sent over
    shared memory, one that does not divide into slices, an unknown reduction, a mean of integers, a sum of float8."""
    if not flat.is_contiguous() and (flat.dim() > 1 or not transport.serves(group, flat)):
        raise ValueError(f"a tensor of shape {tuple(flat.shape)} is not contiguous: give its .contiguous()")
    if flat.numel() % slices:
        raise ValueError(f"{flat.numel()} elements do not divide into slices of {slices} ranks")
    if reduction is not False and reduction not in REDUCTIONS:
        raise ValueError(f"no reduction is called {reduction!r}: choose from {', '.join(REDUCTIONS)}")
    if reduction == "mean" and not (flat.is_floating_point() or flat.is_complex()):
        raise ValueError(f"a mean needs a floating-point dtype, not {flat.dtype}: use reduction='sum'")
    if reduction and flat.is_cpu and str(flat.dtype)[6:].startswith(("float8", "uint16", "uint32", "uint64")):
        raise ValueError(f"torch cannot add {flat.dtype}: reduce a copy in a wider dtype, as .float() or .long() give")
    return flat.detach().view(-1)


def _require_rank(rank: int, group: Group) -> None:
    if not 0 <= rank < group.size():
        raise ValueError(f"rank {rank} does not exist: the group's {group.size()} ranks are 0 to {group.size() - 1}")


def _operator(flat: Tensor, group: Group, reduction: Reduction) -> dist.ReduceOp.RedOpType:
    """Convert a reduction to torch's operator. For a mean of float16 divide before the sum, as NCCL does by itself:
    40,000 on every rank has a finite mean, but its sum overflows."""
    if reduction == "mean" and flat.dtype == torch.float16 and dist.get_backend(group) != "nccl":
        flat.detach().div_(group.size())
        reduction = "sum"
    return REDUCTIONS[reduction]


def all_reduce(flat: Tensor, group: Group, label: str = "", reduction: Reduction = "mean") -> Work:
    """Replace `flat` by its mean (or sum, or maximum) over all ranks. A maximum may lose NaN."""
    flat = _as_vector(flat, group, 1, reduction)
    with _collective("all-reduce", flat, group, label, alike=(reduction, flat.numel())) as work:
        if group.size() > 1:
            flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
            if transport.serves(group, flat):
                work.pending = [shared_verbs.all_reduce(flat, group, reduction, work.next_key())]
                return work
            work.pending = [dist.all_reduce(flat, _operator(flat, group, reduction), group=group, async_op=True)]
    return work


def reduce_scatter(flat: Tensor, group: Group, label: str = "", reduction: Literal["mean", "sum"] = "mean") -> Work:
    """Replace the r-th of equal slices of `flat`, on rank r, by its mean (or sum) over all ranks. Other slices become
    undefined. On CPUs terms are added in the order of the ranks, so the result does not depend on the buckets."""
    ranks, me = group.size(), group.rank()
    gloo, on_cpu = dist.get_backend(group) == "gloo", flat.device.type == "cpu"
    flat = _as_vector(flat, group, ranks, reduction)
    alike = None if gloo and on_cpu else (reduction, flat.numel())
    with _collective("reduce-scatter", flat, group, label, "all-reduce" if gloo and not on_cpu else "", alike) as work:
        if ranks == 1:
            return work
        if flat.is_complex() and not gloo:  # NCCL has no complex dtypes
            flat = torch.view_as_real(flat).view(-1)
        if transport.serves(group, flat):
            work.pending = [shared_verbs.reduce_scatter(flat, group, reduction, Key(_tag_of(work)))]
            return work
        slices = flat.chunk(ranks)
        if not gloo:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            work.pending = [scatter(slices[me], flat, _operator(flat, group, reduction), group=group, async_op=True)]
        elif not on_cpu:  # gloo sends CPU tensors only
            work.pending = [dist.all_reduce(flat, _operator(flat, group, reduction), group=group, async_op=True)]
        else:
            inbox = [slices[me] if rank == me else torch.empty_like(slices[me]) for rank in range(ranks)]
            work.finish = partial(shared_verbs.add_in_order, inbox, reduction, [slices[me]])
            work.pending = _exchange(slices, inbox, work)
    return work


def all_gather(flat: Tensor, group: Group, label: str = "") -> Work:
    """Fill `flat` with the slices of all ranks: rank r provides the r-th of its equal slices."""
    ranks, me = group.size(), group.rank()
    flat = _as_vector(flat, group, ranks)
    slices, gloo, on_cpu = flat.chunk(ranks), dist.get_backend(group) == "gloo", flat.device.type == "cpu"
    with _collective("all-gather", flat, group, label, alike=None if gloo and on_cpu else flat.numel()) as work:
        if ranks == 1:
            return work
        if transport.serves(group, flat):
            work.pending = [shared_verbs.all_gather(flat, group, Key(_tag_of(work)))]
        elif not gloo:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work.pending = [gather(flat, slices[me], group=group, async_op=True)]
        elif not on_cpu:
            each = range(ranks)
            work.pending = [dist.broadcast(slices[i], group=group, async_op=True, group_src=i) for i in each]
        else:
            work.pending = _exchange([slices[me]] * ranks, slices, work)
    return work


def broadcast(tensor: Tensor, source: int, group: Group, label: str = "") -> Work:
    """Replace the tensor, of any dtype, by that of the group's rank `source`. Raises ValueError if it has none."""
    _require_rank(source, group)
    with _collective("broadcast", tensor, group, label, alike=(source, tensor.numel())) as work:
        if group.size() > 1 and tensor.numel():
            sent = tensor.contiguous()
            data = sent.detach().view(-1).view(torch.uint8)  # as bytes, since gloo has few dtypes
            if transport.serves(group, data):
                work.pending = [shared_verbs.broadcast(data, source, group, work.next_key())]
            else:
                work.pending = [dist.broadcast(data, group=group, async_op=True, group_src=source)]
            work.finish = None if sent is tensor else lambda: tensor.copy_(sent)
    return work


def all_to_all(
    output: Tensor, given: Tensor, output_rows: Sequence[int], given_rows: Sequence[int], group: Group, label: str = ""
) -> Work:
    """Send rows to every rank: the first given_rows[0] of `given` (rows ...) to rank 0, and so on; `output` is filled
    with output_rows[r] rows from each rank r in order. The counts may be uneven or zero."""
    rows = list(output_rows), list(given_rows)
    with _collective("all-to-all", given, group, label, alike=tuple(given.shape[1:])) as work:
        if group.size() == 1:
            output.copy_(given)
        elif transport.serves(group, given):
            work.pending = [shared_verbs.all_to_all(output, given, *rows, group, work.next_key())]
        else:
            _as_vector(output, group)
            work.pending = [dist.all_to_all_single(output, given, *rows, group, async_op=True)]
    return work


def _tag_of(work: Work) -> int:
    """Tag of a collective that ranks may launch in different orders."""
    event = work.event
    return _tag(f"{event.verb} {event.label} {event.numel} {event.dtype}", work.group)[1]


def _exchange(outbox: Sequence[Tensor], inbox: Sequence[Tensor], work: Work) -> list[Any]:
    """Send outbox[r] to every other rank r and receive inbox[r] from it, starting with the next rank."""
    group, tag = work.group, _tag_of(work)
    ranks, me, around = group.size(), group.rank(), range(1, group.size())
    if not outbox[0].numel():
        return []
    receive = [dist.irecv(inbox[(me - i) % ranks], group=group, tag=tag, group_src=(me - i) % ranks) for i in around]
    send = [dist.isend(outbox[(me + i) % ranks], group=group, tag=tag, group_dst=(me + i) % ranks) for i in around]
    return [*receive, *send]
