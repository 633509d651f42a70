"""Transfers between ranks of one machine, in memory that all of them have mapped.

Each rank has a table, which it alone writes and the others read, and blocks of memory for the data that it sends. To
begin a transfer, a rank enters two things in its table: a key, equal on all ranks of the transfer, and the position of
its block. When all ranks have entered it, each does its part of the work (see `shared_verbs.py`): it reads the others'
blocks, writes to them in some algorithms, and marks the transfer as done.

A rank that waits for another first does its part of all other transfers, then sleeps on a futex in the other's table.
Each rank writes data before the flag that announces them. x86 keeps this order of stores; other processors may not, and
use gloo.
"""

import os
import resource
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from threading import RLock, get_ident
from time import monotonic
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.comm import blocks
from cs336_systems.comm.blocks import Block, Peer, Pool, Span
from cs336_systems.comm.flight_recorder import TABLE, recorder
from cs336_systems.comm.group import Group, group_timeout
from cs336_systems.comm.store import while_waiting
from cs336_systems.errors import UserError

SPIN = 50e-6  # seconds of polling before a rank sleeps, if each rank has a core
# Seconds of sleep before a rank checks whether the others are alive; shorter if other transfers may become ready.
SLEEP, SHORT_SLEEP = 0.05, 0.001
Act = Callable[[list[Tensor | None]], None]


class Key(NamedTuple):
    """Number by which ranks match their parts of a transfer. For a collective without a tag the ranks' histories must
    also be equal; if they are not, `mismatch` raises an error that names the difference."""

    number: int
    history: int = 0
    mismatch: Callable[[], None] = lambda: None


class Transport:
    """This rank's table, blocks and transfers under way, and the other ranks of its machine."""

    def __init__(self) -> None:
        self.on, self.words, self.owner = False, memoryview(b""), (0, 0)
        self.close()

    def close(self) -> None:
        """Tell the others that this rank takes part in no more transfers, and forget them."""
        if self.on and self.owner[0] == os.getpid():  # not in a child that was forked
            self.words[blocks.CLOSED] = 1
            self.wake()
        self.on, self.pool, self.peers = False, Pool(), dict[int, Peer]()  # peers by rank
        self.pending: dict[Transfer, None] = {}  # oldest first
        self.groups: WeakKeyDictionary[Group, tuple[str, int, list[int], timedelta]] = WeakKeyDictionary()
        self.turn, self.lock, self.crowded, self.futex = 0, RLock(), False, 0
        self.table = np.zeros(TABLE, np.uint64)
        self.words = self.table.data

    def open(self) -> bool:
        """Start using shared memory; returns False if a rank's table cannot be read, or there is no memory."""
        peers = {rank: Peer(ring) for rank, ring in recorder.others.items()}
        if set(recorder.machine) != {*peers, recorder.rank}:
            return False
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each large block takes two: mmap opens its own
        try:
            block = self.pool.take(1)
        except UserError:
            return False
        self.peers, self.on, self.crowded = peers, True, len(peers) >= len(os.sched_getaffinity(0))
        self.owner = os.getpid(), get_ident()
        self.table = recorder.mine.fields["table"]
        self.table[blocks.CHUNK_PLACE : blocks.HEAD] = block.span(1)
        self.words, self.futex = self.table.data, self.table.ctypes.data
        self.pool.give_back(block)
        return True

    def greet(self) -> None:
        """Map every other rank's first file, so that a small tensor that it sent last can be read after its end."""
        with suppress(RuntimeError):  # one has left already: the first transfer will say so
            for peer in self.peers.values():
                peer.part(blocks.CHUNK_PLACE - blocks.FILE)

    def serves(self, group: Group, tensor: Tensor) -> bool:
        """True if the group's transfers of this tensor go through shared memory."""
        return self.on and tensor.device.type == "cpu" and self.members(group)[0] == "gloo"

    def members(self, group: Group) -> tuple[str, int, list[int], timedelta]:
        """Backend of a group, hash of its name, the global numbers of its ranks, and its timeout; looked up once."""
        if (found := self.groups.get(group)) is None:
            name, ranks = zlib.crc32(group.group_name.encode()) << 32, dist.get_process_group_ranks(group)
            found = self.groups[group] = dist.get_backend(group), name, ranks, group_timeout(group)
        return found

    def wake(self) -> None:
        """Count a change of this rank's table, and wake ranks that wait for one. A rank that falls asleep during this
        call is woken by the next change, or after SLEEP."""
        self.words[blocks.CHANGES] = (self.words[blocks.CHANGES] + 1) & 0x7FFFFFFF
        if any(peer.words[blocks.SLEEPS] for peer in self.peers.values()):
            blocks.wake(self.futex)

    def enter(self, transfer: "Transfer", span: Span) -> int:
        """Write a transfer into a free slot of the table; returns the slot's first word."""
        for turn in count(self.turn):
            slot = blocks.HEAD + blocks.WORDS * (turn % blocks.SLOTS)
            if not self.words[slot]:
                break
            if turn > self.turn and (turn - self.turn) % blocks.SLOTS == 0:  # no slot is free
                next(iter(self.pending)).wait(released=True)
        self.turn = turn + 1
        for word, value in enumerate((blocks.READY, transfer.key.history, *span), slot + blocks.STATE):
            self.words[word] = value
        self.words[slot] = transfer.word
        self.wake()
        return slot

    def progress(self) -> None:
        """Do this rank's part of all transfers that are ready; other threads, which poll the store, do nothing here."""
        if self.pending and self.owner[1] == get_ident() and self.lock.acquire(blocking=False):
            try:
                for transfer in list(self.pending):
                    transfer.step()
            finally:
                self.lock.release()


class Transfer:
    """A rank's part of a collective or message under way, with the methods of torch's Work.

    `act` does this rank's part. It is called once, with the ranks' blocks (bytes) in order, None for this rank's own.
    If the others read or write this rank's buffer `in_place`, the transfer is complete when all ranks are done; with a
    staged copy, as soon as this rank is. `finish` is called when all are done.
    """

    def __init__(
        self,
        key: Key,
        group: Group,
        act: Act,
        block: Block | None,
        span: Span,
        in_place: bool = False,
        between: Sequence[int] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        _, name, ranks, self.timeout = transport.members(group)
        self.word, self.key, self.block = name | (0 if key.history else 1 << 31) | key.number, key, block
        self.act: Act | None = act
        self.in_place, self.finish = in_place, finish
        chosen = ranks if between is None else [ranks[each] for each in between]
        self.ranks = [(transport.peers.get(rank), rank) for rank in chosen]  # no peer: this rank itself
        self.slots, self.acted, self.complete = [0] * len(chosen), False, False
        self.error: Exception | None = None
        self.missing = next(rank for peer, rank in self.ranks if peer)
        self.looked = monotonic()
        with transport.lock:
            for earlier in list(transport.pending)[:8]:  # free the slots and blocks of those with which all are done
                earlier.step()
            self.slot = transport.enter(self, span)
            transport.pending[self] = None
            self.step()

    def step(self) -> bool:
        """Do what can be done without waiting; returns True if complete."""
        with transport.lock:
            if self.complete and self not in transport.pending:
                return True
            if not self.acted and self._all_ready():
                self._act()
            if self.acted and self._all_done():
                transport.words[self.slot] = 0
                transport.pending.pop(self, None)
                if self.finish:
                    self.finish()
                self.complete, self.finish, self.act = True, None, None
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
            pairs = [(peer, slot) for (peer, _), slot in self._pairs()]
            if any(peer and peer.words[slot + blocks.HISTORY] != self.key.history for peer, slot in pairs):
                self.key.mismatch()
                raise RuntimeError("the ranks launched different collectives: launch the same in the same order")
            assert self.act is not None
            with torch.no_grad():
                self.act([peer.part(slot) if peer else None for peer, slot in pairs])
            if not self.in_place:  # in place the others still use its buffer
                self.act = None
        except Exception as error:  # raised later, by this transfer's own `wait`
            self.error = error
            self.complete = True
            transport.pending.pop(self, None)
            return
        self.acted = True
        self.complete = not self.in_place
        transport.words[self.slot + blocks.STATE] = blocks.DONE
        transport.wake()

    def _all_done(self) -> bool:
        for (peer, rank), slot in self._pairs():
            # A peer reuses the slot, for another key, once all ranks are done.
            if peer and peer.words[slot + blocks.STATE] != blocks.DONE and peer.words[slot] == self.word:
                self.missing = rank
                return False
        return True

    is_completed = step

    def wait(self, released: bool = False) -> None:
        """Wait until complete; if `released`, until all ranks are done with it. Raises RuntimeError if another rank
        ended, or at the group's timeout."""
        start, limit = monotonic(), self.timeout.total_seconds()
        while not self._is_over(released):
            if transport.crowded or monotonic() - start > SPIN:
                self._sleep(released)
                if monotonic() > start + limit and not self._is_over(released):
                    self._abandon()
                    there = any(peer and rank == self.missing and slot for (peer, rank), slot in self._pairs())
                    lacks = "began, but did not do its part" if there else "did not come"
                    raise RuntimeError(f"rank {self.missing} {lacks} within {limit:g} s")
        if self.error:
            raise self.error

    def _is_over(self, released: bool) -> bool:
        return self.step() and not (released and self in transport.pending)

    def _pairs(self) -> Iterator[tuple[tuple[Peer | None, int], int]]:
        return zip(self.ranks, self.slots, strict=True)

    def _sleep(self, released: bool) -> None:
        """Sleep until the rank that this waits for changes its table. Raises RuntimeError if that rank has ended."""
        peer = transport.peers[self.missing]
        changes, closed = peer.words[blocks.CHANGES], peer.words[blocks.CLOSED]
        if len(transport.pending) > 1:
            transport.progress()
        if self._is_over(released) or transport.peers[self.missing] is not peer:
            return
        if not closed:
            transport.words[blocks.SLEEPS] = 1
            blocks.sleep_while(peer.futex, changes, SHORT_SLEEP if len(transport.pending) > 1 else SLEEP)
            transport.words[blocks.SLEEPS] = 0
            if monotonic() - self.looked < SLEEP:
                return
            self.looked = monotonic()
        if (closed or recorder.died(self.missing)) and not self._is_over(released):
            self._abandon()
            raise RuntimeError(f"rank {self.missing} {'has left the group' if closed else 'died'}")

    def _abandon(self) -> None:
        """Forget a transfer that will never complete, but not its block, which others may still use."""
        transport.pending.pop(self, None)


transport = Transport()  # of this process
while_waiting.append(transport.progress)
