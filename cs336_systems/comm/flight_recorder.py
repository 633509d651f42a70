"""Flight recorder: the latest collectives of every rank of this machine, readable even when a rank is stopped or dead.

Each rank writes its collectives, messages and agreements into a ring buffer in anonymous memory (memfd). When ranks
join, those of one machine map each other's rings through /proc. So recording sends nothing, reading asks nothing of a
rank that no longer answers, and the memory disappears with the last process.

"Finished" depends on the backend. With gloo the collective is done. With NCCL it is enqueued on the GPU, because
waiting for it only orders later kernels: a lost rank shows when the host synchronises with its GPU later, or when
NCCL's watchdog aborts, and a rank's record may then be ahead of its GPU.
"""

import itertools
import mmap
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic  # one clock for all processes of a machine
from typing import NamedTuple

import numpy as np

from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import printable

SLOTS = 64
SHOWN = 6  # entries of each rank in an error message
LAUNCHED, WAITING, FINISHED = range(3)
NO_STEP = -1


class Entry(NamedTuple):
    """One collective, message or agreement of a rank; times in seconds of `time.monotonic`."""

    state: int
    changed: float
    number: int
    step: int
    nbytes: int
    launched: float
    history: int  # hash of its group's collectives so far, see group.py; 0 if it has a tag
    verb: str
    group: str
    dtype: str
    label: str

    def __str__(self) -> str:
        return f"{self.verb} no. {self.number} ({self.label or 'no label'}){of_step(self.step)}"

    def line(self, now: float) -> str:
        """A line of the history that an error message shows; `now` is the current time."""
        step = f"step {self.step}  " if self.step != NO_STEP else ""
        what = f"{step}{self.verb} {self.group}#{self.number} {self.label or '(no label)'}"
        since = f"since {now - self.launched:.1f} s"
        when = (f"launched  {since}", f"waiting  {since}", f"finished  {now - self.changed:.1f} s ago")[self.state]
        return f"{what}  {format_bytes(self.nbytes)} {self.dtype}".rstrip() + f"  {when}"


KINDS = ("u1", "f8", "i8", "i8", "i8", "f8", "u4", "S16", "S16", "S12", "S80")
SLOT = np.dtype(list(zip(Entry._fields, KINDS, strict=True)))
TABLE = 8 * (1 + 1024)  # words of the transfers in shared memory, see blocks.py
RING = np.dtype([("token", "S16"), ("written", "i8"), ("step", "i8"), ("table", "u8", TABLE), ("slots", SLOT, SLOTS)])


def of_step(step: int) -> str:
    """Text that follows an operation: ` of step 7`, or nothing if the step is not known."""
    return "" if step == NO_STEP else f" of step {step}"


class Ring:
    """A rank's latest entries. That rank writes, and all of its machine read. The oldest entry may be overwritten while
    it is read, so it is never shown. `pid` and `started` identify the process of another rank."""

    def __init__(self, memory: mmap.mmap | bytearray, pid: int = 0, started: str = "") -> None:
        self.fields = np.frombuffer(memory, RING, 1)[0]
        self.slots, self.pid, self.started = self.fields["slots"], pid, started
        self.numbers, self.histories = self.slots["number"], self.slots["history"]
        self.turns = itertools.count()  # its next() is safe among threads
        if not started:
            self.fields["step"] = NO_STEP

    @property
    def step(self) -> int:
        return int(self.fields["step"])

    def launch(self, verb: str, group: str, label: str, nbytes: int, dtype: str, number: int, history: int = 0) -> int:
        """Write an entry for an operation that starts; returns its number in the ring."""
        turn = next(self.turns)
        texts = verb.encode(), group.encode(), dtype.encode(), label.encode(errors="replace")
        self.slots[turn % SLOTS] = (LAUNCHED, 0.0, number, self.step, nbytes, monotonic(), history, *texts)
        self.fields["written"] = turn + 1
        return turn

    def advance(self, turn: int, state: int) -> None:
        """Set the state of an entry, unless it has been overwritten."""
        if self.fields["written"] - turn <= SLOTS:
            entry = self.slots[turn % SLOTS]
            entry["state"], entry["changed"] = state, monotonic()

    def entries(self, count: int = SHOWN) -> list[Entry]:
        """List the latest entries, oldest first."""
        written = int(self.fields["written"])
        return [self._entry(turn % SLOTS) for turn in range(max(0, written - min(count, SLOTS - 1)), written)]

    def _entry(self, slot: int) -> Entry:
        values = self.slots[slot].item()
        return Entry._make([*values[:7], *(printable(each.decode(errors="replace")) for each in values[7:])])

    def other(self, group: str, number: int, history: int) -> Entry | None:
        """Entry of a group's collective with this number, if the rank's history there is another one. Entries that may
        be half written are left out: they were incomplete at the start, or may have been overwritten since."""
        complete = int(self.fields["written"])
        for slot in (self.numbers == number).nonzero()[0]:
            if self.histories[slot] in (0, history) or (entry := self._entry(slot)).group != group[:16]:
                continue
            turn = complete - 1 - (complete - 1 - int(slot)) % SLOTS
            if turn > self.fields["written"] - SLOTS:
                return entry
        return None

    def status(self) -> str:
        """State of the rank's process: "died", "is stopped (SIGSTOP)", or "" if it runs."""
        state, started = process(self.pid)
        if not state or state in "ZX" or started != self.started:
            return "died"
        return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}.get(state, "")

    def summary(self) -> str:
        """Status and last entry of the rank: `died after all-reduce no. 3 (bucket 1) of step 2`."""
        when = "before its first collective"
        for last in self.entries(1):
            when = f"{('after the launch of', 'in', 'after')[last.state]} {last}"
            if last.step != self.step != NO_STEP:
                when += f", in step {self.step}"
        return f"{self.status() or 'runs but said nothing'} {when}"


def process(pid: int) -> tuple[str, str]:
    """State (one letter) and start time (clock ticks) of a process, empty if it has ended. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Recorder:
    """Ring of this rank, and the rings of the other ranks of its machine that can be read. Until it is opened, the ring
    is memory of this process alone."""

    file = -1

    def __init__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording and unmap all rings."""
        if self.file >= 0:
            os.close(self.file)
        self.rank, self.machine, self.file = -1, range(0), -1
        self.mine, self.others = Ring(bytearray(RING.itemsize)), dict[int, Ring]()

    def open(self, rank: int, machine: range) -> str:
        """Start recording; returns what the other ranks of this machine need to `attach` the ring."""
        self.rank, self.machine, token = rank, machine, secrets.token_hex(8)
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create(f"flight of rank {rank}")
            os.ftruncate(self.file, RING.itemsize)
        self.mine = Ring(mmap.mmap(self.file, RING.itemsize))
        self.mine.fields["token"] = token.encode()
        return f"{os.getpid()} {process(os.getpid())[1]} {self.file} {token}"

    def attach(self, rank: int, opened: str) -> None:
        """Map the ring of another rank of this machine, as `open` described it there, if it can be read. The token
        rules out an unrelated process that has the same number on another machine or in another container."""
        pid, started, file, token = opened.split(" ")
        with suppress(OSError, ValueError):
            descriptor = os.open(f"/proc/{int(pid)}/fd/{int(file)}", os.O_RDONLY | os.O_NONBLOCK)
            with open(descriptor, "rb") as ring:
                memory = mmap.mmap(ring.fileno(), RING.itemsize, prot=mmap.PROT_READ)
            if memory[:16] == token.encode():
                self.others[rank] = Ring(memory, int(pid), started)

    def lost(self) -> set[int]:
        """Other ranks of this machine that died or are stopped."""
        return {rank for rank, ring in self.others.items() if ring.status()}

    def died(self, rank: int) -> bool:
        """True if a rank of this machine has ended, so that waiting for it is useless."""
        return rank in self.others and self.others[rank].status() == "died"

    def summary(self, rank: int) -> str:
        """Status of a rank that posted no reason for its end, as far as it can be seen from here."""
        if rank in self.others:
            return f"rank {rank} {self.others[rank].summary()}"
        if self.rank >= 0 and rank not in self.machine:
            return f"no news from rank {rank}, which is on another machine"
        return f"rank {rank} said nothing: it died, or still computes"

    def history(self, ranks: Iterable[int]) -> list[str]:
        """Lines with the latest entries of the given ranks, as far as their rings can be read."""
        rings, now = {**self.others, self.rank: self.mine}, monotonic()
        return [f"  rank {r}: {entry.line(now)}" for r in ranks if r in rings for entry in rings[r].entries()]


recorder = Recorder()  # of this process


def at_step(step: int) -> None:
    """Record the start of a training step, which error messages then name."""
    recorder.mine.fields["step"] = step
