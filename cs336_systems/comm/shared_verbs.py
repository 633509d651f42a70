"""Collectives and messages over shared memory: the part of the work that each rank does.

    all-reduce       one-shot: add the blocks of all ranks                        up to ONE_SHOT bytes
                     two-shot: add this rank's slice, write it to all blocks      above
    reduce-scatter   add this rank's slice of every block
    all-gather       copy every other rank's slice
    broadcast        copy the source's block
    all-to-all       copy this rank's rows out of every block
    send, receive    copy the sender's block

One-shot waits once and reads N blocks; two-shot waits twice, and each rank reads and writes as much as one block. Both
add terms in the order of the ranks, so a sum is bitwise equal to that of one process that adds the ranks' tensors in
this order. float16 and bfloat16 are added in float32 and rounded once.

A buffer from `shared_empty` lies in a block, so it need not be copied; any other tensor is staged: copied to a block.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from cs336_systems.comm.blocks import Block, Span
from cs336_systems.comm.group import Group
from cs336_systems.comm.shared_memory import Act, Key, Transfer, transport

ONE_SHOT = 2**18
CACHED = 2**20  # bytes that are added at once, so that the sum is still in the cache when it is written
HALVES = torch.float16, torch.bfloat16
Reduction = Literal["mean", "sum", "max"]


def shared_empty(numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """Allocate a flat tensor, not filled, in memory that the group's ranks can map, if they share any."""
    private = not transport.on or device.type != "cpu" or not numel or group.size() == 1
    return torch.empty(numel, dtype=dtype, device=device) if private else transport.pool.buffer(numel, dtype)


def copies(group: Group, tensor: Tensor) -> bool:
    """True if the group's collectives copy a tensor that does not lie in a buffer of `shared_empty`."""
    return group.size() > 1 and transport.serves(group, tensor)


def add_in_order(terms: Sequence[Tensor], reduction: Reduction, targets: Sequence[Tensor]) -> None:
    """Write the sum (mean, maximum) of flat tensors, added in the given order, to each target; a target may be one of
    the terms. float16 and bfloat16 are added in float32 and rounded once."""
    combine = torch.maximum if reduction == "max" else torch.add
    wide = terms[0].dtype in HALVES and reduction != "max"
    # The first target holds the running sum, unless it is a term that is still to be added.
    direct = not wide and all(term.data_ptr() != targets[0].data_ptr() for term in terms[2:])
    numel = terms[0].numel()
    size = min(numel, CACHED // terms[0].itemsize)
    scratch = targets[0] if direct else terms[0].new_empty(size, dtype=torch.float32 if wide else None)
    for start in range(0, numel, size or 1):
        if size < numel:
            block = slice(start, start + size)
            parts, places = [term[block] for term in terms], [target[block] for target in targets]
        else:
            parts, places = list(terms), list(targets)
        total = places[0] if direct else scratch[: len(parts[0])]
        combine(total.copy_(parts[0]) if wide else parts[0], parts[1], out=total)
        for part in parts[2:]:
            combine(total, part, out=total)
        if reduction == "mean":
            total.div_(len(terms))
        for place in places[1:] if direct else places:
            place.copy_(total)


def all_reduce(flat: Tensor, group: Group, reduction: Reduction, key: Key) -> Transfer:
    """Start this rank's part of `verbs.all_reduce`."""
    flat, me, ranks = flat.data.view(-1), group.rank(), group.size()
    if flat.nbytes <= ONE_SHOT:
        staged = transport.pool.stage(flat)
        mine = staged.tensor(flat.nbytes, flat.dtype)

        def one_shot(parts: list[Tensor | None]) -> None:
            add_in_order(_all(parts, mine), reduction, [flat])

        return Transfer(key, group, one_shot, staged, staged.span(flat.nbytes))
    block, span = _exposed(flat)
    mine = block.tensor(flat.nbytes, flat.dtype) if block else flat

    def two_shot(parts: list[Tensor | None]) -> None:
        slices = [each.tensor_split(ranks)[me] for each in _all(parts, mine)]
        add_in_order(slices, reduction, slices)

    return Transfer(key, group, two_shot, block, span, True, finish=(lambda: flat.copy_(mine)) if block else None)


def reduce_scatter(flat: Tensor, group: Group, reduction: Reduction, key: Key) -> Transfer:
    """Start this rank's part of `verbs.reduce_scatter`."""
    flat, me, ranks = flat.data.view(-1), group.rank(), group.size()
    block, span = _exposed(flat)

    def act(parts: list[Tensor | None]) -> None:
        slices = [each.chunk(ranks)[me] for each in _all(parts, flat)]
        add_in_order(slices, reduction, [slices[me]])

    return Transfer(key, group, act, block, span, in_place=block is None)


def all_gather(flat: Tensor, group: Group, key: Key) -> Transfer:
    """Start this rank's part of `verbs.all_gather`."""
    slices = flat.data.view(-1).chunk(group.size())
    block, span = _exposed(slices[group.rank()])
    return Transfer(key, group, _copying(dict(enumerate(slices))), block, span, in_place=block is None)


def broadcast(data: Tensor, source: int, group: Group, key: Key) -> Transfer:
    """Start this rank's part of `verbs.broadcast`; `data` are bytes."""
    data, sends = data.data, group.rank() == source
    block, span = _exposed(data) if sends else (None, Span())
    return Transfer(key, group, _copying({source: data}), block, span, in_place=sends and block is None)


def message(tensor: Tensor, source: int, to: int, group: Group, key: Key) -> Transfer:
    """A message between two ranks of the group, one of which is this rank."""
    flat = tensor.data.view(-1)
    block = transport.pool.stage(flat) if group.rank() == source else None
    span = block.span(flat.nbytes) if block else Span()
    return Transfer(key, group, _copying({0: flat}), block, span, between=(source, to))


def all_to_all(
    output: Tensor, given: Tensor, output_rows: list[int], given_rows: list[int], group: Group, key: Key
) -> Transfer:
    """Start this rank's part of `verbs.all_to_all`. A block begins with the numbers of rows for each rank."""
    me, counts = group.rank(), torch.tensor([*given_rows, *[0] * (group.size() % 2)])  # rows are aligned to 16 bytes
    if sum(given_rows) != len(given) or sum(output_rows) != len(output):
        raise RuntimeError(f"{given_rows} of {len(given)} rows leave, and {output_rows} of {len(output)} rows arrive")
    given, targets, head = given.data.reshape(-1), output.data.split(output_rows), counts.nbytes
    row = given.nbytes // max(1, sum(given_rows)) or output.nbytes // max(1, sum(output_rows))
    block = transport.pool.take(head + given.nbytes)
    mine = block.tensor(head + given.nbytes)
    mine[:head].view(torch.int64).copy_(counts)
    mine[head:].view(given.dtype).copy_(given)

    def act(parts: list[Tensor | None]) -> None:
        for rank, (part, target) in enumerate(zip(_all(parts, mine), targets, strict=True)):
            rows = part[:head].view(torch.int64).tolist()
            if rows[me] != len(target):
                raise RuntimeError(f"rank {rank} sends {rows[me]} rows where {len(target)} are expected")
            first = head + sum(rows[:me]) * row
            target.view(-1).copy_(part[first : first + target.nbytes].view(target.dtype))

    return Transfer(key, group, act, block, block.span(head + given.nbytes))


def _exposed(tensor: Tensor) -> tuple[Block | None, Span]:
    """Let the others read a flat tensor: in its own shared buffer (without a block), or in a block with a copy."""
    if span := transport.pool.find(tensor):
        return None, span
    block = transport.pool.stage(tensor)
    return block, block.span(tensor.nbytes)


def _copying(targets: dict[int, Tensor]) -> Act:
    """Make the act that copies other ranks' blocks to tensors of this rank, by the place of their rank."""

    def act(parts: list[Tensor | None]) -> None:
        for place, target in targets.items():
            if (part := parts[place]) is not None:
                target.copy_(part.view(target.dtype))

    return act


def _all(parts: Sequence[Tensor | None], mine: Tensor) -> list[Tensor]:
    """Every rank's part in the dtype of `mine`, which is this rank's own."""
    return [mine if part is None else part.view(mine.dtype) for part in parts]
