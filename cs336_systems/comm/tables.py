"""Table of a rank's transfers: its layout, which the rank writes, and `Peer`, by which other ranks read it."""

import mmap
import os

import torch
from torch import Tensor

from cs336_systems.comm.blocks import memory_name
from cs336_systems.comm.flight_recorder import TABLE, Ring

WORDS = 8  # of a slot
KEY, STATE, HISTORY, FILE, SERIAL, SIZE, OFFSET, NBYTES = range(WORDS)
# Words of a table: a count of its changes, 1 once the rank has left, 1 while it sleeps, the place of its first chunk of
# memory; then the slots.
CHANGES, CLOSED, SLEEPS, CHUNK_PLACE, HEAD = 0, 1, 2, 3, WORDS
SLOTS = TABLE // WORDS - 1
READY, DONE = 1, 2


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
