"""Collectives between ranks of one machine, in memory that all of them have mapped.

Each rank has a table, which only it writes and which the others map, and blocks of memory for what it sends. A transfer
begins when a rank enters it in its table: a key, which is equal on all ranks of the transfer, and where its block lies.
When all ranks have entered it, each does its part, and marks it as done:

    all-reduce       one-shot: add the blocks of all ranks                  up to ONE_SHOT bytes
                     two-shot: add a slice of them, and write the sum       above
                     to that slice of every block
    reduce-scatter   add this rank's slice of every block
    all-gather       copy the slice of every other rank
    broadcast        copy the source's block
    all-to-all       copy this rank's rows out of every block
    send, receive    copy the sender's block

Terms are added in the order of the ranks, whatever the algorithm: a sum has the bits that one process gets that adds
the ranks' tensors in that order. Halves are added in float32 and rounded once.

A buffer from `shared_empty` is a block by itself, and nothing is copied; other tensors are staged in one. The blocks of
a rank are files without a name (memfd), which the others open through /proc and which end with the last process. A
waiting rank does its part of whatever else is under way, and sleeps on a futex in the table of the rank that it waits
for. Flags are written after the data that they announce and x86 keeps the order of stores; other processors need not,
and use gloo.
"""

import ctypes
import mmap
import os
import platform
import resource
import sys
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from threading import RLock
from time import monotonic
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.comm.flight_recorder import TABLE, Ring, recorder
from cs336_systems.comm.group import Group, group_timeout
from cs336_systems.comm.store import while_waiting
from cs336_systems.errors import UserError

# Bytes up to which every rank adds all blocks, with one wait instead of two.
ONE_SHOT = 2**18
BLOCK = 2**18  # bytes that are added at once, so that the sum is still in the cache when it is written
CHUNK = 2**23  # bytes of the files from which blocks of up to a megabyte are cut
SPIN = 50e-6  # seconds of looking again before a rank sleeps, where each rank has a core
SLEEP = 0.05  # seconds after which a sleeping rank looks whether the others are alive
CROWDED_SLEEP = 0.001  # the same while other transfers are under way, which another rank may make ready
WORDS = 8  # of a slot
# Words of a table: a count of its changes, 1 at the rank's end, 1 while it sleeps; and the first slot.
CHANGES, CLOSED, SLEEPS, HEAD = 0, 1, 2, WORDS
SLOTS = TABLE // WORDS - 1
KEY, STATE, HISTORY, FILE, SERIAL, SIZE, OFFSET, NBYTES = range(WORDS)
READY, DONE = 1, 2
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # on x86-64
HALVES = torch.float16, torch.bfloat16
Reduction = Literal["mean", "sum", "max"]


class Key(NamedTuple):
    """What is equal on all ranks of a transfer: a number, and the history of its group, if they match by their order;
    `mismatch` raises an error that names what differs."""

    number: int
    history: int = 0
    mismatch: Callable[[], None] = lambda: None


class Memory:
    """A file without a name, mapped; its blocks can be read and written by the other ranks of the machine."""

    serials = count(1)

    def __init__(self, size: int) -> None:
        self.serial, self.size = next(self.serials), size
        self.file = os.memfd_create("transfers")
        weakref.finalize(self, os.close, self.file)
        os.posix_fallocate(self.file, 0, size)  # an error here, not a signal at the first write
        self.mapped = mmap.mmap(self.file, size)
        self.bytes = torch.frombuffer(self.mapped, dtype=torch.uint8)


class Block:
    """A stretch of a rank's memory that one tensor uses at a time."""

    def __init__(self, memory: Memory, offset: int, nbytes: int) -> None:
        self.memory, self.offset, self.nbytes = memory, offset, nbytes

    def place(self, start: int, nbytes: int) -> tuple[int, ...]:
        """File, serial, size, offset and bytes, as another rank needs them to map a part."""
        return self.memory.file, self.memory.serial, self.memory.size, self.offset + start, nbytes

    def tensor(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A view (numel,) of the first bytes."""
        return self.memory.bytes[self.offset : self.offset + nbytes].view(dtype)


class Pool:
    """This rank's blocks that are free, by size. A block is used again, since the first use of memory, which the system
    then clears, takes as long as a transfer."""

    def __init__(self) -> None:
        self.free: dict[int, list[Block]] = defaultdict(list)

    def take(self, nbytes: int) -> Block:
        """A free block. Raises UserError if there is no memory for a new one."""
        # Powers of two, cut from larger files, up to a megabyte, since a process may have few files; then megabytes.
        size = max(4096, 1 << (nbytes - 1).bit_length()) if nbytes <= 2**20 else -(-nbytes // 2**20) * 2**20
        free = self.free[size]
        if not free:
            try:
                memory = Memory(max(size, CHUNK) if size <= 2**20 else size)
            except OSError as error:
                raise UserError(
                    f"no {size:,} bytes of memory that ranks share: {error.strerror}; use --backend gloo"
                ) from None
            free.extend(Block(memory, offset, size) for offset in range(0, memory.size, size))
        return free.pop()

    def give_back(self, block: Block) -> None:
        self.free[block.nbytes].append(block)


class Peer:
    """Another rank's table and memory, as this rank has mapped them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.words, self.keys = memoryview(ring.fields["table"]), ring.fields["table"][HEAD::WORDS]
        self.futex = ring.fields["table"].ctypes.data
        self.memories: dict[int, Tensor] = {}

    def find(self, key: int, guess: int) -> int:
        """The first word of the slot with this key, or 0. Most often it is where this rank has its own."""
        if self.words[guess] == key:
            return guess
        found = (self.keys == key).nonzero()[0]
        return HEAD + WORDS * int(found[0]) if len(found) else 0

    def part(self, slot: int) -> Tensor:
        """Bytes of the block that a slot describes."""
        _, _, _, file, serial, size, offset, nbytes = self.words[slot : slot + WORDS].tolist()
        if serial not in self.memories:
            path = f"/proc/{self.ring.pid}/fd/{file}"
            try:  # without a file that stays open, since a process may have few
                storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
            except RuntimeError:
                raise RuntimeError("another rank has left the group") from None
            self.memories[serial] = torch.tensor([], dtype=torch.uint8).set_(storage)
        return self.memories[serial][offset : offset + nbytes]


class Transport:
    """This rank's table, blocks and transfers under way, and the other ranks of its machine."""

    def __init__(self) -> None:
        self.on = False
        self.close()

    def close(self) -> None:
        """Tell the others that this rank takes part in nothing more, and forget them."""
        if self.on:
            self.words[CLOSED] = 1
            self.wake()
        self.on, self.pool, self.peers = False, Pool(), dict[int, Peer]()
        self.owned: dict[int, Block] = {}  # by the address of a buffer from `shared_empty`
        self.pending: dict[Transfer, None] = {}  # oldest first
        self.ranks: dict[Group, tuple[int, list[int], timedelta]] = {}
        self.turn, self.lock, self.crowded = 0, RLock(), False
        self.table = np.zeros(TABLE, np.uint64)
        self.words, self.futex = memoryview(self.table), 0

    def open(self) -> bool:
        """Begin; returns False if not all other ranks' tables can be read."""
        peers = {rank: Peer(ring) for rank, ring in recorder.others.items()}
        if not can_share() or set(recorder.machine) != {*peers, recorder.rank}:
            return False
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a large buffer is two
        try:
            self.pool.give_back(self.pool.take(CHUNK))
        except UserError:
            return False
        self.peers, self.on, self.crowded = peers, True, len(peers) >= (os.cpu_count() or 1)
        self.table = recorder.mine.fields["table"]
        self.words, self.futex = memoryview(self.table), self.table.ctypes.data
        return True

    def serves(self, group: Group, tensor: Tensor) -> bool:
        """True if the group's transfers of this tensor go through shared memory."""
        return self.on and tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"

    def members(self, group: Group) -> tuple[int, list[int], timedelta]:
        """Hash of a group's name, its ranks among all, and its timeout."""
        if group not in self.ranks:
            name, ranks = zlib.crc32(group.group_name.encode()), dist.get_process_group_ranks(group)
            self.ranks[group] = name << 32, ranks, group_timeout(group)
        return self.ranks[group]

    def wake(self) -> None:
        """Tell of a change of this rank's table those who wait for one. Who falls asleep while this looks is woken by
        the next change, or after SLEEP."""
        self.words[CHANGES] = (self.words[CHANGES] + 1) & 0x7FFFFFFF
        if any(peer.words[SLEEPS] for peer in self.peers.values()):
            LIBC.syscall(SYS_FUTEX, ctypes.c_void_p(self.futex), FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def enter(self, transfer: "Transfer", place: tuple[int, ...]) -> int:
        """Write a transfer into a free slot of the table; returns the slot's first word."""
        for tries in count():
            slot = HEAD + WORDS * (self.turn % SLOTS)
            self.turn += 1
            if not self.words[slot]:
                break
            if tries and tries % SLOTS == 0:  # the others are this many behind
                next(iter(self.pending)).pause()
        self.table[slot + STATE : slot + WORDS] = (READY, transfer.key.history, *place)
        self.words[slot] = transfer.word
        self.wake()
        return slot

    def progress(self) -> None:
        """Do this rank's part of whatever is ready."""
        if self.pending and self.lock.acquire(blocking=False):
            try:
                for transfer in list(self.pending):
                    transfer.step()
            finally:
                self.lock.release()


class Transfer:
    """A rank's part of a collective or message under way, with the methods of torch's Work.

    `act` is called once, with every rank's part of memory (bytes), in the order of ranks; None for this rank's own. A
    transfer of a buffer that the others read or write `in_place` is complete when all are done with it, and `finish` is
    called then; one whose buffer was staged, as soon as this rank is.
    """

    def __init__(
        self,
        key: Key,
        group: Group,
        act: Callable[[list[Tensor | None]], None],
        block: Block | None,
        place: tuple[int, ...] = (0, 0, 0, 0, 0),
        in_place: bool = False,
        between: Sequence[int] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        name, ranks, self.timeout = transport.members(group)
        tagged = 0 if key.history else 1 << 31
        self.word, self.key, self.block = name | tagged | key.number, key, block
        self.act: Callable[[list[Tensor | None]], None] | None = act
        self.in_place, self.finish = in_place, finish
        chosen = ranks if between is None else [ranks[each] for each in between]
        self.ranks = [(transport.peers.get(rank), rank) for rank in chosen]  # no peer: this rank itself
        self.slots = [0] * len(chosen)
        self.acted = self.complete = False
        self.error: Exception | None = None
        self.missing = next(rank for peer, rank in self.ranks if peer)
        with transport.lock:
            self.slot = transport.enter(self, place)
            transport.pending[self] = None
            self.step()

    def step(self) -> bool:
        """Do what can be done without waiting; returns True if complete."""
        if self.complete and self not in transport.pending:
            return True
        with transport.lock:
            if not self.acted and self._all_ready():
                self._act()
            if self.acted and self._all_done():
                transport.words[self.slot] = 0
                transport.pending.pop(self, None)
                finish, self.finish = self.finish, None
                if finish:
                    finish()
                self.complete = True
                if self.block:
                    transport.pool.give_back(self.block)
                    self.block = None
        return self.complete

    def _all_ready(self) -> bool:
        for index, (peer, rank) in enumerate(self.ranks):
            if peer and not self.slots[index]:
                self.slots[index] = peer.find(self.word, self.slot)
                if not self.slots[index]:
                    self.missing = rank
                    return False
        return True

    def _act(self) -> None:
        try:
            pairs = [(peer, slot) for (peer, _), slot in zip(self.ranks, self.slots, strict=True)]
            if any(peer and peer.words[slot + HISTORY] != self.key.history for peer, slot in pairs):
                self.key.mismatch()
                raise RuntimeError("the ranks launched different collectives: launch the same in the same order")
            act, self.act = self.act, None  # which holds tensors of this rank
            assert act is not None
            with torch.no_grad():
                act([peer.part(slot) if peer else None for peer, slot in pairs])
        except Exception as error:  # raised by the `wait` of this transfer, whichever one got so far
            self.error = error
            self.complete = True
            transport.pending.pop(self, None)
            return
        self.acted = True
        self.complete = not self.in_place
        transport.words[self.slot + STATE] = DONE
        transport.wake()

    def _all_done(self) -> bool:
        for (peer, rank), slot in zip(self.ranks, self.slots, strict=True):
            # A slot is used again when all are done.
            if peer and peer.words[slot + STATE] != DONE and peer.words[slot] == self.word:
                self.missing = rank
                return False
        return True

    def is_completed(self) -> bool:
        return self.step()

    def wait(self) -> None:
        """Wait until complete. Raises RuntimeError if another rank ended, or the group's timeout is over."""
        start = monotonic()
        deadline = start + self.timeout.total_seconds()
        while not self.step():
            if transport.crowded or monotonic() - start > SPIN:
                self.pause()
                if monotonic() > deadline and not self.step():
                    self._abandon()
                    raise RuntimeError(f"rank {self.missing} did not come within {self.timeout.total_seconds():g} s")
        if self.error:
            raise self.error

    def pause(self) -> None:
        """Sleep until the table of the rank that this waits for changes. Raises RuntimeError if it never will."""
        peer = transport.peers[self.missing]
        changes, closed = peer.words[CHANGES], peer.words[CLOSED]
        if len(transport.pending) > 1:
            transport.progress()
        if self.step() or transport.peers[self.missing] is not peer:
            return
        if closed:
            self._abandon()
            raise RuntimeError(f"rank {self.missing} has left the group")
        limit = TimeSpec(0, int(1e9 * (CROWDED_SLEEP if len(transport.pending) > 1 else SLEEP)))
        place = ctypes.c_void_p(peer.futex), FUTEX_WAIT, ctypes.c_int(changes)
        transport.words[SLEEPS] = 1
        late = LIBC.syscall(SYS_FUTEX, *place, ctypes.byref(limit), None, 0)
        transport.words[SLEEPS] = 0
        if late and recorder.died(self.missing) and not self.step():
            self._abandon()
            raise RuntimeError(f"rank {self.missing} died")

    def _abandon(self) -> None:
        """Forget a transfer that will never complete. Its memory is not used again: others may still write to it."""
        transport.pending.pop(self, None)


class TimeSpec(ctypes.Structure):
    """C's timespec."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


LIBC = ctypes.CDLL(None)
transport = Transport()  # of this process
while_waiting.append(transport.progress)


def can_share() -> bool:
    """True on a machine whose ranks can share memory here: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def shared_empty(numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """A flat tensor, not filled, of memory that the group's ranks can map, if they share any."""
    nbytes = numel * dtype.itemsize
    if not transport.on or device.type != "cpu" or not nbytes or group.size() == 1:
        return torch.empty(numel, dtype=dtype, device=device)
    pool, owned = transport.pool, transport.owned
    block = pool.take(nbytes)
    held = (ctypes.c_byte * nbytes).from_buffer(block.memory.mapped, block.offset)
    address = ctypes.addressof(held)
    owned[address] = block

    def free() -> None:
        owned.pop(address, None)
        pool.give_back(block)

    weakref.finalize(held, free).atexit = False
    return torch.frombuffer(held, dtype=dtype)


def _block_of(tensor: Tensor) -> tuple[Block, int] | None:
    """The block that a tensor from `shared_empty` lies in, and where in it, in bytes."""
    start = tensor.untyped_storage().data_ptr()
    block = transport.owned.get(start)
    return None if block is None else (block, tensor.data_ptr() - start)


def _stage(tensor: Tensor) -> tuple[Block, tuple[int, ...]]:
    """A block with a copy of a flat tensor, and its place."""
    block = transport.pool.take(max(1, tensor.nbytes))
    block.tensor(tensor.nbytes, tensor.dtype).copy_(tensor)
    return block, block.place(0, tensor.nbytes)


def add_in_order(terms: Sequence[Tensor], reduction: Reduction, targets: Sequence[Tensor]) -> None:
    """Write the sum (mean, maximum) of flat tensors, taken in the given order, to each of the targets, which may be
    some of the terms. Halves are added in float32 and rounded once."""
    combine = torch.maximum if reduction == "max" else torch.add
    wide = terms[0].dtype in HALVES and reduction != "max"
    numel, size = terms[0].numel(), BLOCK // terms[0].itemsize
    # Added up in the first target, unless a term that is still to be added lies there.
    direct = not wide and all(term.data_ptr() != targets[0].data_ptr() for term in terms[2:])
    scratch = targets[0] if direct else terms[0].new_empty(min(size, numel), dtype=torch.float32 if wide else None)
    for start in range(0, numel, size):
        block = slice(start, start + size)
        total = scratch[block] if direct else scratch[: min(size, numel - start)]
        combine(total.copy_(terms[0][block]) if wide else terms[0][block], terms[1][block], out=total)
        for term in terms[2:]:
            combine(total, term[block], out=total)
        if reduction == "mean":
            total.div_(len(terms))
        for target in targets[1:] if direct else targets:
            target[block].copy_(total)


def all_reduce(flat: Tensor, group: Group, reduction: Reduction, key: Key) -> Transfer:
    """See `verbs`."""
    flat, me, ranks = flat.data.view(-1), group.rank(), group.size()
    own = None if flat.nbytes <= ONE_SHOT else _block_of(flat)
    if own:
        (block, start), mine, staged = own, flat, None
        place = block.place(start, flat.nbytes)
    else:
        staged, place = _stage(flat)
        mine = staged.tensor(flat.nbytes, flat.dtype)

    def one_shot(parts: list[Tensor | None]) -> None:
        add_in_order(_all(parts, mine), reduction, [flat])

    def two_shot(parts: list[Tensor | None]) -> None:
        slices = [each.tensor_split(ranks)[me] for each in _all(parts, mine)]
        add_in_order(slices, reduction, slices)

    if flat.nbytes <= ONE_SHOT:
        return Transfer(key, group, one_shot, staged, place)
    copy_out = None if own else lambda: flat.copy_(mine)
    return Transfer(key, group, two_shot, staged, place, in_place=True, finish=copy_out)


def reduce_scatter(flat: Tensor, group: Group, reduction: Reduction, key: Key) -> Transfer:
    """See `verbs`."""
    flat, me, ranks = flat.data.view(-1), group.rank(), group.size()
    staged, place, in_place = _exposed(flat)

    def act(parts: list[Tensor | None]) -> None:
        slices = [each.chunk(ranks)[me] for each in _all(parts, flat)]
        add_in_order(slices, reduction, [slices[me]])

    return Transfer(key, group, act, staged, place, in_place)


def all_gather(flat: Tensor, group: Group, key: Key) -> Transfer:
    """See `verbs`."""
    slices = flat.data.chunk(group.size())
    staged, place, in_place = _exposed(slices[group.rank()])

    def act(parts: list[Tensor | None]) -> None:
        for slice_, part in zip(slices, parts, strict=True):
            if part is not None:
                slice_.copy_(part.view(flat.dtype))

    return Transfer(key, group, act, staged, place, in_place)


def broadcast(data: Tensor, source: int, group: Group, key: Key) -> Transfer:
    """See `verbs`; `data` are bytes."""
    sends = group.rank() == source
    staged, place, in_place = _exposed(data) if sends else (None, (0, 0, 0, 0, 0), False)

    def act(parts: list[Tensor | None]) -> None:
        if not sends:
            data.copy_(_given(parts[source]))

    return Transfer(key, group, act, staged, place, in_place)


def message(tensor: Tensor, source: int, to: int, group: Group, key: Key) -> Transfer:
    """A message between two ranks of the group, of which this rank is one."""
    flat = tensor.data.view(-1)
    sends = group.rank() == source
    staged, place = _stage(flat) if sends else (None, (0, 0, 0, 0, 0))

    def act(parts: list[Tensor | None]) -> None:
        if not sends:
            flat.copy_(_given(parts[0]).view(flat.dtype))

    return Transfer(key, group, act, staged, place, between=(source, to))


def all_to_all(
    output: Tensor, given: Tensor, output_rows: list[int], given_rows: list[int], group: Group, key: Key
) -> Transfer:
    """See `verbs`. A block begins with the numbers of rows for each rank."""
    me, counts = group.rank(), torch.tensor([*given_rows, *[0] * (group.size() % 2)])  # rows begin at 16 bytes
    given, output = given.data, output.data
    row = (given if len(given) else output)[:1].nbytes
    block = transport.pool.take(counts.nbytes + given.nbytes)
    block.tensor(counts.nbytes, torch.int64).copy_(counts)
    if given.numel():
        block.tensor(counts.nbytes + given.nbytes)[counts.nbytes :].view(given.dtype).copy_(given.reshape(-1))
    own = block.tensor(counts.nbytes + given.nbytes)

    def act(parts: list[Tensor | None]) -> None:
        targets = output.split(output_rows)
        for rank, (part, target) in enumerate(zip(_all(parts, own), targets, strict=True)):
            head, rows = part[: counts.nbytes].view(torch.int64).tolist(), part[counts.nbytes :]
            if head[me] != len(target):
                raise RuntimeError(f"rank {rank} sends {head[me]} rows where {len(target)} are expected")
            if target.numel():
                first = sum(head[:me]) * row
                target.reshape(-1).copy_(rows[first : first + target.nbytes].view(target.dtype))

    return Transfer(key, group, act, block, block.place(0, counts.nbytes + given.nbytes))


def _exposed(part: Tensor) -> tuple[Block | None, tuple[int, ...], bool]:
    """Where the others find a tensor: its own block, in place, or a staged copy."""
    own = _block_of(part) if part.nbytes else None
    if own is None:
        return *_stage(part), False
    block, start = own
    return None, block.place(start, part.nbytes), True


def _given(part: Tensor | None) -> Tensor:
    assert part is not None
    return part


def _all(parts: Sequence[Tensor | None], mine: Tensor) -> list[Tensor]:
    """Every rank's part in the dtype of `mine`, which is this rank's own."""
    return [mine if part is None else part.view(mine.dtype) for part in parts]
