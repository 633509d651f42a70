"""Transfers between ranks of one machine, in memory that all of them have mapped.

Each rank has a table, which only it writes and which the others read, and blocks of memory for what it sends. It enters
a transfer in its table: a key, which is equal on all ranks of the transfer, and where its block lies. When all ranks
have entered it, each does its part, reading and perhaps writing the others' blocks, and marks it as done. The parts are
in `shared_verbs.py`.

A waiting rank does its part of whatever else is under way, and then sleeps on a futex in the table of the rank that it
waits for. A flag is written after the data that it announces, and x86 keeps the order of stores; other processors need
not, and use gloo.
"""

import os
import platform
import resource
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from threading import RLock
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.comm import futex
from cs336_systems.comm.blocks import Block, Place, Pool
from cs336_systems.comm.flight_recorder import TABLE, recorder
from cs336_systems.comm.group import Group, group_timeout
from cs336_systems.comm.store import while_waiting
from cs336_systems.comm.tables import (
    CHANGES,
    CHUNK_PLACE,
    CLOSED,
    DONE,
    FILE,
    HEAD,
    HISTORY,
    READY,
    SLEEPS,
    SLOTS,
    STATE,
    WORDS,
    Peer,
)
from cs336_systems.errors import UserError

SPIN = 50e-6  # seconds of looking again before a rank sleeps, where each rank has a core
# Seconds of sleep before a rank looks whether the others are alive, and where other transfers may become ready.
SLEEP, SHORT_SLEEP = 0.05, 0.001
Act = Callable[[list[Tensor | None]], None]


class Key(NamedTuple):
    """The number by which ranks find each other's part of a transfer. If they match by their order, the histories of
    their groups must be equal, and `mismatch` raises an error that names what differs."""

    number: int
    history: int = 0
    mismatch: Callable[[], None] = lambda: None


class Transport:
    """This rank's table, blocks and transfers under way, and the other ranks of its machine."""

    def __init__(self) -> None:
        self.on, self.words = False, memoryview(b"")
        self.close()

    def close(self) -> None:
        """Tell the others that this rank takes part in nothing more, and forget them."""
        if self.on:
            self.words[CLOSED] = 1
            self.wake()
        self.on, self.pool, self.peers = False, Pool(), dict[int, Peer]()  # those by rank
        self.pending: dict[Transfer, None] = {}  # oldest first
        self.ranks: dict[Group, tuple[int, list[int], timedelta]] = {}
        self.turn, self.lock, self.crowded, self.futex = 0, RLock(), False, 0
        self.table = np.zeros(TABLE, np.uint64)
        self.words = self.table.data

    def open(self) -> bool:
        """Begin; returns False if not all other ranks' tables can be read, or there is no memory."""
        peers = {rank: Peer(ring) for rank, ring in recorder.others.items()}
        if not can_share() or set(recorder.machine) != {*peers, recorder.rank}:
            return False
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a large buffer is two files
        try:
            block = self.pool.take(1)
        except UserError:
            return False
        self.peers, self.on, self.crowded = peers, True, len(peers) >= (os.cpu_count() or 1)
        self.table = recorder.mine.fields["table"]
        self.table[CHUNK_PLACE:HEAD] = block.place(1)
        self.words, self.futex = self.table.data, self.table.ctypes.data
        self.pool.give_back(block)
        return True

    def greet(self) -> None:
        """Map every other rank's first chunk, so that its small messages outlive it."""
        with suppress(RuntimeError):  # one has left already, of which the first transfer tells
            for peer in self.peers.values():
                peer.part(CHUNK_PLACE - FILE)

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
            futex.wake(self.futex)

    def enter(self, transfer: "Transfer", place: Place) -> int:
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
        act: Act,
        block: Block | None,
        place: Place,
        in_place: bool = False,
        between: Sequence[int] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        name, ranks, self.timeout = transport.members(group)
        self.word, self.key, self.block = name | (0 if key.history else 1 << 31) | key.number, key, block
        self.act: Act | None = act
        self.in_place, self.finish = in_place, finish
        chosen = ranks if between is None else [ranks[each] for each in between]
        self.ranks = [(transport.peers.get(rank), rank) for rank in chosen]  # no peer: this rank itself
        self.slots, self.acted, self.complete = [0] * len(chosen), False, False
        self.error: Exception | None = None
        self.missing = next(rank for peer, rank in self.ranks if peer)
        with transport.lock:
            self.slot = transport.enter(self, place)
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
                self.complete, self.finish = True, None
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
            pairs = list(zip((peer for peer, _ in self.ranks), self.slots, strict=True))
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

    is_completed = step

    def wait(self) -> None:
        """Wait until complete. Raises RuntimeError if another rank ended, or the group's timeout is over."""
        start, limit = monotonic(), self.timeout.total_seconds()
        while not self.step():
            if transport.crowded or monotonic() - start > SPIN:
                self.pause()
                if monotonic() > start + limit and not self.step():
                    self._abandon()
                    raise RuntimeError(f"rank {self.missing} did not come within {limit:g} s")
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
        transport.words[SLEEPS] = 1
        late = futex.sleep_while(peer.futex, changes, SHORT_SLEEP if len(transport.pending) > 1 else SLEEP)
        transport.words[SLEEPS] = 0
        if late and recorder.died(self.missing) and not self.step():
            self._abandon()
            raise RuntimeError(f"rank {self.missing} died")

    def _abandon(self) -> None:
        """Forget a transfer that will never complete. Its memory is not used again: others may still write to it."""
        transport.pending.pop(self, None)


transport = Transport()  # of this process
while_waiting.append(transport.progress)


def can_share() -> bool:
    """True on a machine whose ranks can share memory here: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def shared_empty(numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """A flat tensor, not filled, of memory that the group's ranks can map, if they share any."""
    private = not transport.on or device.type != "cpu" or not numel or group.size() == 1
    return torch.empty(numel, dtype=dtype, device=device) if private else transport.pool.buffer(numel, dtype)


def shares_memory(group: Group, tensor: Tensor) -> bool:
    """True if a collective of the tensor copies it, unless it lies in a buffer of `shared_empty`."""
    return group.size() > 1 and transport.serves(group, tensor)


def backend_of(group: Group) -> str:
    """Who moves the tensors of a group: shm, gloo or nccl."""
    return "shm" if transport.on and dist.get_backend(group) == "gloo" else str(dist.get_backend(group))
