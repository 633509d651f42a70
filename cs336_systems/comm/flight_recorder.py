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
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic  # of the machine since it started: ranks of one machine may compare it

from cs336_systems.comm.store import TimedStore
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import printable

SLOTS = 64
SHOWN = 6  # entries of each rank in an error message
HEADER = struct.Struct("=16sqq")  # token, how many records were written, step
COUNTERS = struct.Struct("=qq")
STATE = struct.Struct("=Bd")  # launched, waiting or finished; time of the last change
RECORD = struct.Struct("=qqqd16s16s12s80s")  # number, step, bytes, launched, verb, group, dtype, label
SIZE = STATE.size + RECORD.size
RING_BYTES = HEADER.size + SLOTS * SIZE
LAUNCHED, WAITING, FINISHED = range(3)
POSITION = {LAUNCHED: "after the launch of", WAITING: "in", FINISHED: "after"}
NO_STEP = -1


def _text(raw: bytes) -> str:
    return printable(raw.rstrip(b"\0").decode(errors="replace"))


@dataclass(frozen=True)
class Entry:
    """One collective, message or agreement of a rank; times in seconds of `time.monotonic`."""

    state: int
    finished: float
    number: int
    step: int
    nbytes: int
    launched: float
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
        when = f"finished  {now - self.finished:.1f} s ago"
        if self.state != FINISHED:
            when = f"{('launched', 'waiting')[self.state]}  since {now - self.launched:.1f} s"
        return f"{what}  {format_bytes(self.nbytes)} {self.dtype}".rstrip() + f"  {when}"


def of_step(step: int) -> str:
    """ " of step 7", or nothing if the step is not known."""
    return "" if step == NO_STEP else f" of step {step}"


class Ring:
    """A rank's latest entries. One rank writes, all of its machine read; what is read of a rank that runs may be torn
    in the oldest entry, which is never shown."""

    def __init__(self, memory: mmap.mmap | bytearray, pid: int = 0, started: str = "") -> None:
        self.memory, self.pid, self.started = memory, pid, started
        self.turns = itertools.count()  # whose next() no other thread interrupts
        self.written, self.step = 0, NO_STEP

    def launch(self, verb: str, group: str, label: str, nbytes: int, dtype: str, number: int) -> int:
        """Write an entry for an operation that starts; returns its number in the ring."""
        turn = next(self.turns)
        place = HEADER.size + turn % SLOTS * SIZE
        STATE.pack_into(self.memory, place, LAUNCHED, 0.0)
        what = verb.encode(), group.encode(), dtype.encode(), label.encode(errors="replace")
        RECORD.pack_into(self.memory, place + STATE.size, number, self.step, nbytes, monotonic(), *what)
        self.written = turn + 1
        COUNTERS.pack_into(self.memory, 16, self.written, self.step)
        return turn

    def advance(self, turn: int, state: int) -> None:
        """Set the state of an entry, unless it has been overwritten."""
        if self.written - turn <= SLOTS:
            STATE.pack_into(self.memory, HEADER.size + turn % SLOTS * SIZE, state, monotonic())

    def at_step(self, step: int) -> None:
        """Set the current training step."""
        self.step = step
        COUNTERS.pack_into(self.memory, 16, self.written, step)

    def entries(self, count: int = SHOWN) -> list[Entry]:
        """The latest entries, oldest first."""
        written = COUNTERS.unpack_from(self.memory, 16)[0]
        found = []
        for turn in range(max(0, written - min(count, SLOTS - 1)), written):
            place = HEADER.size + turn % SLOTS * SIZE
            *numbers, verb, group, dtype, label = RECORD.unpack_from(self.memory, place + STATE.size)
            texts = map(_text, (verb, group, dtype, label))
            found.append(Entry(*STATE.unpack_from(self.memory, place), *numbers, *texts))
        return found

    def status(self) -> str:
        """State of the rank's process: "died", "is stopped (SIGSTOP)", or "" if it runs."""
        state, started = _process(self.pid)
        if not state or state in "ZX" or started != self.started:
            return "died"
        return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}.get(state, "")

    def summary(self) -> str:
        """Status and last entry of the rank: `died after all-reduce no. 3 (bucket 1) of step 2`."""
        last = self.entries(1)
        when = f"{POSITION[last[0].state]} {last[0]}" if last else "before its first collective"
        step = COUNTERS.unpack_from(self.memory, 16)[1]
        if last and last[0].step != step != NO_STEP:
            when += f", in step {step}"
        return f"{self.status() or 'runs but said nothing'} {when}"


def _process(pid: int) -> tuple[str, str]:
    """State of a process (one letter) and its start time; both empty if it has ended. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def born(pid: int) -> str:
    """Start time of a process in clock ticks; empty if not known."""
    return _process(pid)[1]


def _mapped(pid: str, file: str, token: str) -> mmap.mmap | None:
    """Ring of another process, or None if it cannot be read from here. The token rules out an unrelated process
    that has the same number on another machine or in another container."""
    try:
        opened = os.open(f"/proc/{int(pid)}/fd/{int(file)}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        memory = mmap.mmap(opened, RING_BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
    return memory if memory[:16] == token.encode() else None


class Recorder:
    """Ring of this rank, and the rings of the other ranks of its machine that can be read. Until it is opened, the ring
    is memory of this process alone."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.rank, self.machine, self.file = -1, range(0), -1
        self.mine = Ring(bytearray(RING_BYTES))
        self.others: dict[int, Ring] = {}

    def open(self, rank: int, machine: range, store: TimedStore) -> None:
        """Start recording, and announce the ring in the store to the ranks of this machine."""
        token = secrets.token_hex(8)
        self.rank, self.machine, self.file = rank, machine, -1
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create(f"flight of rank {rank}")
            os.ftruncate(self.file, RING_BYTES)
        self.mine = Ring(mmap.mmap(self.file, RING_BYTES), os.getpid())
        HEADER.pack_into(self.mine.memory, 0, token.encode(), 0, NO_STEP)
        store.set(f"flight/{rank}", f"{os.getpid()} {born(os.getpid())} {self.file} {token}")

    def attach(self, store: TimedStore) -> None:
        """Map the rings of the other ranks of this machine, which have all joined, as far as they can be read."""
        for rank in self.machine:
            if rank != self.rank and store.check([f"flight/{rank}"]):
                pid, started, file, token = store.get(f"flight/{rank}").split(" ")
                if started and born(int(pid)) == started and (memory := _mapped(pid, file, token)):
                    self.others[rank] = Ring(memory, int(pid), started)

    def close(self) -> None:
        """Stop recording and unmap all rings."""
        file = self.file
        self._reset()
        if file >= 0:
            os.close(file)

    def at_step(self, step: int) -> None:
        """Record the start of a training step, which error messages then name."""
        self.mine.at_step(step)

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
        known = [rank for rank in ranks if rank in rings]
        return [f"  rank {rank}: {entry.line(now)}" for rank in known for entry in rings[rank].entries()]


recorder = Recorder()  # of this process
