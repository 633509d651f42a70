"""Memory that the ranks of a machine share: blocks of data, tables of transfers, and a sleep until a word changes.

A rank's blocks lie in anonymous files (memfd), which the others open through /proc. No path can be left behind, and the
memory is freed with the last process. Free blocks are used again: the system clears new memory at its first use, which
takes as long as a transfer.
"""

import ctypes
import mmap
import os
import weakref
from collections import defaultdict
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.comm.flight_recorder import TABLE, Ring
from cs336_systems.errors import UserError

CHUNK, SMALL = 2**23, 2**20  # blocks of up to SMALL bytes are cut from files of CHUNK, since open files are limited

# A table, which its rank writes and the others read.
WORDS = 8  # of a slot
KEY, STATE, HISTORY, FILE, SERIAL, SIZE, OFFSET, NBYTES = range(WORDS)
# Words of a table: a count of its changes, 1 once the rank has left, 1 while it sleeps, the place of its first chunk of
# memory; then the slots.
CHANGES, CLOSED, SLEEPS, CHUNK_PLACE, HEAD = 0, 1, 2, 3, WORDS
SLOTS = TABLE // WORDS - 1
READY, DONE = 1, 2

# Linux's futex(2) on x86-64.
LIBC = ctypes.CDLL(None)
FUTEX, WAIT, WAKE, ALL = 202, 0, 1, 2**31 - 1


class Span(NamedTuple):
    """Position of a stretch of this rank's memory, in bytes, by which another rank finds it."""

    file: int = 0
    serial: int = 0  # number of the file, since descriptors are used again
    size: int = 0
    offset: int = 0
    nbytes: int = 0


def memory_name(pid: int, serial: int) -> str:
    """Name of a process's file of memory, by which another process knows that it opened the right one."""
    return f"transfers {pid}.{serial}"


class Memory:
    """An anonymous file, mapped into memory. Blocks have the first `used` bytes; the rest takes no memory yet."""

    serials = count(1)

    def __init__(self, size: int) -> None:
        self.serial, self.size, self.used = next(self.serials), size, 0
        self.file = os.memfd_create(memory_name(os.getpid(), self.serial))
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        self.mapped = mmap.mmap(self.file, size)


class Block:
    """A stretch of memory that one tensor uses at a time."""

    def __init__(self, memory: Memory, offset: int, nbytes: int) -> None:
        self.memory, self.offset, self.nbytes = memory, offset, nbytes

    def span(self, nbytes: int, start: int = 0) -> Span:
        return Span(self.memory.file, self.memory.serial, self.memory.size, self.offset + start, nbytes)

    def tensor(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A view (numel,) of the first bytes."""
        numel = nbytes // dtype.itemsize
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory.mapped, dtype=dtype, count=numel, offset=self.offset)


class Pool:
    """This rank's blocks: free ones by size, and those of buffers in use by address. One thread takes them."""

    def __init__(self) -> None:
        self.free: dict[int, list[Block]] = defaultdict(list)
        self.held: dict[int, Block] = {}
        self.newest: dict[int, Memory] = {}  # by size of its blocks

    def take(self, nbytes: int) -> Block:
        """Take a free block. Raises UserError if there is no memory for a new one."""
        step = 1 << max(12, (nbytes - 1).bit_length() - 3)  # at most a quarter of a block is unused
        size = -(-nbytes // step) * step
        if self.free[size]:
            return self.free[size].pop()
        try:
            memory = self.newest.get(size)
            if memory is None or memory.used + size > memory.size:
                memory = self.newest[size] = Memory(CHUNK if size <= SMALL else size)
            os.posix_fallocate(memory.file, memory.used, size)  # an error here, not a signal at the first write
        except OSError as error:
            what = f"{size:,} bytes of memory for ranks to share"
            raise UserError(f"no {what}: {error.strerror}; use --backend gloo") from None
        memory.used += size
        return Block(memory, memory.used - size, size)

    def give_back(self, block: Block) -> None:
        """Mark a block as free."""
        self.free[block.nbytes].append(block)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a flat tensor in a block of its own, which is free again when nothing holds the tensor's storage."""
        nbytes = numel * dtype.itemsize
        block = self.take(nbytes)
        holder = (ctypes.c_byte * nbytes).from_buffer(block.memory.mapped, block.offset)
        address = ctypes.addressof(holder)
        self.held[address] = block
        weakref.finalize(holder, lambda: self.give_back(self.held.pop(address))).atexit = False
        return torch.frombuffer(holder, dtype=dtype)

    def find(self, tensor: Tensor) -> Span | None:
        """Position of a tensor from `buffer`, or of a contiguous view of one; None for any other tensor."""
        if not tensor.numel() or not tensor.is_contiguous():
            return None
        start = tensor.untyped_storage().data_ptr()
        block = self.held.get(start)
        return None if block is None else block.span(tensor.nbytes, tensor.data_ptr() - start)

    def stage(self, tensor: Tensor) -> Block:
        """Copy a flat tensor into a block."""
        block = self.take(max(1, tensor.nbytes))
        block.tensor(tensor.nbytes, tensor.dtype).copy_(tensor)
        return block


class Peer:
    """Another rank's table and memory, as this rank has mapped them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.words, self.keys = ring.fields["table"].data, ring.fields["table"][HEAD::WORDS]
        self.futex = ring.fields["table"].ctypes.data
        self.memories: dict[int, mmap.mmap] = {}

    def find(self, key: int, guess: int) -> int:
        """Find the first word of the slot with this key, or 0. `guess`, this rank's own slot, is right most often."""
        if self.words[guess] == key:
            return guess
        found = (self.keys == key).nonzero()[0]
        return HEAD + WORDS * int(found[0]) if len(found) else 0

    def part(self, slot: int) -> Tensor:
        """Bytes of the block that a slot describes."""
        file, serial, size, offset, nbytes = self.words[slot + FILE : slot + WORDS].tolist()
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if serial not in self.memories:
            self.memories[serial] = self._map(file, serial, size)
        return torch.frombuffer(self.memories[serial], dtype=torch.uint8, count=nbytes, offset=offset)

    def _map(self, file: int, serial: int, size: int) -> mmap.mmap:
        try:
            descriptor = os.open(f"/proc/{self.ring.pid}/fd/{file}", os.O_RDWR | os.O_NONBLOCK)
            with open(descriptor, "r+b") as opened:
                # A rank that has left may have reused the descriptor for another file.
                name = f"/memfd:{memory_name(self.ring.pid, serial)} (deleted)"
                if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                    return mmap.mmap(opened.fileno(), size)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the memory of another rank cannot be mapped: {error}") from None
        raise RuntimeError("another rank has left the group")


def sleep_while(address: int, value: int, seconds: float) -> bool:
    """Sleep while the 32-bit word at an address has a value, for less than a second; returns False if woken."""
    limit = (ctypes.c_long * 2)(0, int(1e9 * seconds))  # a timespec of C: seconds and nanoseconds
    return bool(LIBC.syscall(FUTEX, ctypes.c_void_p(address), WAIT, ctypes.c_int(value), limit, None, 0))


def wake(address: int) -> None:
    """Wake all processes that sleep on the word at an address."""
    LIBC.syscall(FUTEX, ctypes.c_void_p(address), WAKE, ALL, None, None, 0)
