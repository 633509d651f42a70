"""The flight recorder: what every rank of this machine did last, readable even when that rank is stopped or dead.

Each rank keeps its latest collectives, messages and agreements in a ring, as a black box does, in memory without a name
in any file system. The others of its machine map the same memory, through /proc, when they join. So nothing is sent
while all goes well, nothing has to be asked of a rank that no longer answers, and nothing stays when the last is gone.

What "finished" means is up to the backend. With gloo the collective is done. With NCCL it is enqueued on the GPU, since
waiting for it only makes a later kernel wait: a lost rank shows at a later synchronisation of the host with its GPU, or
as an abort by NCCL's watchdog, and the record of a rank may then be ahead of what its GPU has done.
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
from cs336_systems.console import format_bytes
from cs336_systems.text import printable

SLOTS = 64
SHOWN = 6  # of them, of each rank, when ranks part
HEADER = struct.Struct("=16sqq")  # token, how many records were written, step
COUNTERS = struct.Struct("=qq")
STATE = struct.Struct("=Bd")  # how far it is, when it finished
RECORD = struct.Struct("=qqqd16s16s12s80s")  # number, step, bytes, launched, verb, group, dtype, label
SIZE = STATE.size + RECORD.size
LAUNCHED, WAITING, FINISHED = range(3)
DOING = {LAUNCHED: "after the launch of", WAITING: "in", FINISHED: "after"}
NO_STEP = -1


def _text(raw: bytes) -> str:
    return printable(raw.rstrip(b"\0").decode(errors="replace"))


@dataclass(frozen=True)
class Deed:
    """One collective, message or agreement that a rank took part in; times in seconds of `time.monotonic`."""

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
        """It as a line of a table, `now` being the time."""
        step = f"step {self.step}  " if self.step != NO_STEP else ""
        what = f"{step}{self.verb} {self.group}#{self.number} {self.label or '(no label)'}"
        when = f"finished  {now - self.finished:.1f} s ago"
        if self.state != FINISHED:
            when = f"{('launched', 'waiting')[self.state]}  since {now - self.launched:.1f} s"
        return f"{what}  {format_bytes(self.nbytes)} {self.dtype}".rstrip() + f"  {when}"


def of_step(step: int) -> str:
    """Words that say in which step of training something was."""
    return "" if step == NO_STEP else f" of step {step}"


class Ring:
    """A rank's latest deeds. One rank writes, all of its machine read; what is read of a rank that runs may be torn in
    the oldest deed, which is never shown."""

    def __init__(self, memory: mmap.mmap, pid: int = 0, started: str = "") -> None:
        self.memory, self.pid, self.started = memory, pid, started
        self.turns = itertools.count()  # whose next() no other thread interrupts
        self.written, self.step = 0, NO_STEP

    def launch(self, verb: str, group: str, label: str, nbytes: int, dtype: str, number: int) -> int:
        """Write a deed that begins; returns its turn."""
        turn = next(self.turns)
        place = HEADER.size + turn % SLOTS * SIZE
        STATE.pack_into(self.memory, place, LAUNCHED, 0.0)
        what = verb.encode(), group.encode(), dtype.encode(), label.encode(errors="replace")
        RECORD.pack_into(self.memory, place + STATE.size, number, self.step, nbytes, monotonic(), *what)
        self.written = turn + 1
        COUNTERS.pack_into(self.memory, 16, self.written, self.step)
        return turn

    def advance(self, turn: int, state: int) -> None:
        """Write that a deed is waited for, or has finished; nothing if it has been overwritten."""
        if self.written - turn <= SLOTS:
            STATE.pack_into(self.memory, HEADER.size + turn % SLOTS * SIZE, state, monotonic())

    def at_step(self, step: int) -> None:
        """Write which step of training begins."""
        self.step = step
        COUNTERS.pack_into(self.memory, 16, self.written, step)

    def deeds(self, count: int = SHOWN) -> list[Deed]:
        """The latest, the last one last."""
        written = COUNTERS.unpack_from(self.memory, 16)[0]
        found = []
        for turn in range(max(0, written - min(count, SLOTS - 1)), written):
            place = HEADER.size + turn % SLOTS * SIZE
            *numbers, verb, group, dtype, label = RECORD.unpack_from(self.memory, place + STATE.size)
            texts = map(_text, (verb, group, dtype, label))
            found.append(Deed(*STATE.unpack_from(self.memory, place), *numbers, *texts))
        return found

    def fate(self) -> str:
        """What has become of the rank: "is stopped (SIGSTOP)", "died", or "" for one that runs."""
        state, started = _process(self.pid)
        if not state or state in "ZX" or started != self.started:
            return "died"
        return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}.get(state, "")

    def news(self) -> str:
        """What has become of the rank, and when that was: `died after all-reduce no. 3 (bucket 1) of step 2`."""
        last = self.deeds(1)
        when = f"{DOING[last[0].state]} {last[0]}" if last else "before its first collective"
        step = COUNTERS.unpack_from(self.memory, 16)[1]
        if last and last[0].step != step != NO_STEP:
            when += f", in step {step}"
        return f"{self.fate() or 'runs but said nothing'} {when}"


def _process(pid: int) -> tuple[str, str]:
    """A process's state, as one letter, and when it started; both empty for one that is gone. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def born(pid: int) -> str:
    """When a process began, in ticks of the machine's clock; empty where that is not known."""
    return _process(pid)[1]


class Flight:
    """This rank's ring, and those of the other ranks of its machine, by rank, where they can be read."""

    def __init__(self, rank: int, machine: range, store: TimedStore) -> None:
        self.rank, self.machine, self.others, self.file = rank, machine, dict[int, Ring](), -1
        token, size = secrets.token_hex(8), HEADER.size + SLOTS * SIZE
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create(f"flight of rank {rank}")
            os.ftruncate(self.file, size)
        self.mine = Ring(mmap.mmap(self.file, size), os.getpid())
        HEADER.pack_into(self.mine.memory, 0, token.encode(), 0, NO_STEP)
        store.set(f"flight/{rank}", f"{os.getpid()} {_process(os.getpid())[1]} {self.file} {token}")

    def meet(self, store: TimedStore) -> None:
        """Map the rings of the ranks of this machine, once they have joined; one that cannot be read stays unread."""
        for rank in self.machine:
            if rank != self.rank and store.check([f"flight/{rank}"]):
                pid, started, file, token = store.get(f"flight/{rank}").split(" ")
                memory = _mapped(pid, file, token) if started and _process(int(pid))[1] == started else None
                if memory:
                    self.others[rank] = Ring(memory, int(pid), started)

    def close(self) -> None:
        """Let go of all rings."""
        for ring in (self.mine, *self.others.values()):
            ring.memory.close()
        if self.file >= 0:
            os.close(self.file)


def _mapped(pid: str, file: str, token: str) -> mmap.mmap | None:
    """Another process's ring; None if that is not here, or not ours to read. The token tells: on another machine, or
    in another container, a process of that number is somebody else."""
    try:
        opened = os.open(f"/proc/{int(pid)}/fd/{int(file)}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        memory = mmap.mmap(opened, HEADER.size + SLOTS * SIZE, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
    return memory if memory[:16] == token.encode() else None


_flight: Flight | None = None


def take_off(rank: int, machine: range, store: TimedStore) -> None:
    """Begin to record, and offer the record through the store to the ranks of this machine."""
    global _flight
    _flight = Flight(rank, machine, store)


def meet(store: TimedStore) -> None:
    """Map the records of the ranks of this machine, which all have joined."""
    if _flight:
        _flight.meet(store)


def land() -> None:
    """Record no more."""
    global _flight
    flight, _flight = _flight, None
    if flight:
        flight.close()


def launch(verb: str, group: str, label: str, nbytes: int, dtype: str, number: int) -> int:
    """Record a deed that begins; returns its turn, for `advance`."""
    return _flight.mine.launch(verb, group, label, nbytes, dtype, number) if _flight else -1


def advance(turn: int, state: int) -> None:
    """Record that a deed is waited for, or has finished."""
    if _flight and turn >= 0:
        _flight.mine.advance(turn, state)


def at_step(step: int) -> None:
    """Say which step of training begins, for what is printed when ranks part."""
    if _flight:
        _flight.mine.at_step(step)


def current_step() -> int:
    """The step of training, NO_STEP if nobody said."""
    return _flight.mine.step if _flight else NO_STEP


def seen() -> list[int]:
    """The other ranks of this machine whose records can be read."""
    return sorted(_flight.others) if _flight else []


def lost() -> set[int]:
    """Those of them that died or are stopped."""
    return {rank for rank, ring in _flight.others.items() if ring.fate()} if _flight else set()


def died(rank: int) -> bool:
    """Whether a rank of this machine is gone, so that nothing need be waited for."""
    return _flight is not None and rank in _flight.others and _flight.others[rank].fate() == "died"


def news(rank: int) -> str:
    """What has become of a rank that has left no last word, as far as can be seen from here."""
    if _flight and rank in _flight.others:
        return f"rank {rank} {_flight.others[rank].news()}"
    if _flight and rank not in _flight.machine:
        return f"no news from rank {rank}, which is on another machine"
    return f"rank {rank} said nothing: it died, or still computes"


def history(ranks: Iterable[int]) -> list[str]:
    """A line for each of the latest deeds of those ranks, this one or others, that can be read."""
    if not _flight:
        return []
    rings, now = {**_flight.others, _flight.rank: _flight.mine}, monotonic()
    known = [rank for rank in ranks if rank in rings]
    return [f"  rank {rank}: {deed.line(now)}" for rank in known for deed in rings[rank].deeds()]
