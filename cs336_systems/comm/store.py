"""A key-value store shared by the ranks, through which they find each other; every answer has a time limit.

It is a file, or a server at an address and port; ranks of one machine use the loopback address, so that nothing listens
to the network. Rank 0 may be the server. If it is stopped, its connections stay open but no answer comes, and torch's
TCPStore waits without a limit. So a thread asks the store, and the caller waits for the thread until the limit.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from cs336_systems.errors import UserError
from cs336_systems.host.text import printable

LONE = "surrogatepass"  # sends the lone surrogates by which Python represents a file name that is not Unicode
LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}

while_waiting: list[Callable[[], None]] = []  # called again and again while a rank polls
_servers: dict[str, Store] = {}  # by address: a store that is closed and opened again would lose keys
_asker: "_Asker | None" = None


@dataclass(frozen=True)
class Place:
    """Place of a process: rank, world size, both on its machine alone (local), and where the ranks find each other."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: str = ""  # a path, or host:port; empty for one process alone
    served: bool = False  # torchrun's agent already holds the store there
    attempt: str = "0"

    @property
    def one_machine(self) -> bool:
        return self.world_size == self.local_world_size

    @property
    def machine(self) -> range:
        """Ranks of this rank's machine, which are consecutive."""
        first = self.rank - self.local_rank
        return range(max(0, first), min(self.world_size, first + self.local_world_size))


class StoreLostError(RuntimeError):
    """The store is gone, or did not answer in time; the message says which."""


class TimedStore:
    """A store whose answers come within `limit`. Every method raises StoreLostError otherwise."""

    def __init__(self, store: Store, limit: timedelta) -> None:
        self.store, self.limit = store, limit

    def check(self, keys: list[str]) -> bool:
        """True if all keys are set."""
        return bool(ask(self.limit, self.store.check, keys))

    def get(self, key: str) -> str:
        """Text of a key that is set."""
        return bytes(ask(self.limit, self.store.get, key)).decode(errors=LONE)

    def set(self, key: str, text: str) -> None:
        """Set a key to any text."""
        ask(self.limit, self.store.set, key, text.encode(errors=LONE))

    def set_first(self, key: str, text: str) -> str:
        """Set a key unless it is set; returns its text."""
        return bytes(ask(self.limit, self.store.compare_set, key, "", text)).decode()


def ask(limit: timedelta, call: Callable[..., Any], *arguments: Any) -> Any:
    """Run `call(*arguments)`, which asks or opens a store, in a thread; returns its result. Raises StoreLostError."""
    global _asker
    if _asker is None or not _asker.is_alive():  # no thread survives a fork
        _asker = _Asker()
    asker, answer = _asker, Future[Any]()
    if asker.late and not asker.late.done():
        raise StoreLostError("the store of the ranks does not answer")

    def reply() -> None:
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:
            answer.set_exception(error)

    asker.questions.put(reply)
    try:
        return answer.result(limit.total_seconds())
    except TimeoutError:
        asker.late, seconds = answer, round(limit.total_seconds(), 2)
        raise StoreLostError(f"the store of the ranks did not answer within {seconds:g} s") from None
    except RuntimeError as error:
        raise StoreLostError(f"the store of the ranks is gone: {printable(first_line(error))}") from error


class _Asker(Thread):
    """Thread that asks the store, started before a rank may run out of memory. A question that exceeded its limit
    (`late`) keeps it busy until the store answers."""

    def __init__(self) -> None:
        super().__init__(name="asks the store", daemon=True)
        self.questions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.late: Future[Any] | None = None
        self.start()

    def run(self) -> None:
        while True:
            self.questions.get()()  # without a variable, which would keep the store alive


def polls(seconds: float) -> Iterator[None]:
    """Yield at each turn of a loop that polls for some seconds, at least once, with pauses of 1 ms to 0.1 s between."""
    deadline, pause = monotonic() + seconds, 0.001
    yield
    while monotonic() < deadline:
        for go_on in while_waiting:
            go_on()
        sleep(pause)
        pause = min(2 * pause, 0.1)
        yield


def wait_for(
    store: Store | TimedStore, keys: Sequence[str], timeout: timedelta, in_vain: Callable[[int], bool] = lambda i: False
) -> list[int]:
    """Wait until all keys are set; returns the indices of the keys that are missing at the timeout.

    `in_vain(index)` says that a missing key will never be set, for instance because its rank has ended. Then the wait
    ends at once and returns the keys that will never be set, without those that may still come.
    """
    for _ in polls(timeout.total_seconds()):
        missing = [i for i, key in enumerate(keys) if not store.check([key])]
        gone = [i for i in missing if in_vain(i) and not store.check([keys[i]])]  # it may have been set in between
        if gone or not missing:
            return gone
    return missing


def first_line(error: Exception) -> str:
    """First line of an error of torch, without the file and line of its code."""
    return re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])[:120]


def open_store(place: Place, timeout: timedelta) -> Store:
    """Open the store of the ranks. Raises UserError for a port in use or a rank 0 that cannot be reached."""
    if place.world_size == 1:
        return HashStore()
    if place.meeting.startswith("/"):
        return FileStore(place.meeting, place.world_size)
    if place.meeting in _servers:
        return _servers[place.meeting]
    host, _, text = place.meeting.rpartition(":")
    port, serves = int(text), place.rank == 0 and not place.served
    listener = _listen(host, port) if serves else None
    trouble = "" if serves else _try_to_connect(host, port, timeout)
    try:
        if not trouble:
            opened = partial(TCPStore, host, port, None, serves, timeout, wait_for_workers=False)
            return _servers.setdefault(place.meeting, ask(timeout, partial(opened, master_listen_fd=listener)))
    except StoreLostError:
        trouble = "what answers there is not a store of ranks: choose another port with MASTER_PORT"
    raise UserError(
        f"rank {place.rank} of {place.world_size} finds no rank 0 at {printable(place.meeting)} within "
        f"{timeout.total_seconds():g} s: {trouble}"
    )


def _listen(host: str, port: int) -> int:
    """Listening socket of rank 0, on the loopback address only if that is the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((LOOPBACK.get(host, ""), port), family=family).detach()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot listen on port {port}: {why}; choose another with MASTER_PORT") from None


def _try_to_connect(host: str, port: int, timeout: timedelta) -> str:
    """Try to connect until the timeout; returns what is wrong and what to check, or "" once connected. (TCPStore would
    retry as well, but it reports every failure as a time-out, with lines of its code.)"""
    deadline = monotonic() + timeout.total_seconds()
    for _ in polls(timeout.total_seconds()):
        try:
            socket.create_connection((host.strip("[]"), port), max(0.1, deadline - monotonic())).close()
            return ""
        except ConnectionRefusedError:
            trouble = "nobody listens there: is rank 0 running, and are MASTER_ADDR and MASTER_PORT those it was given?"
        except (socket.gaierror, UnicodeError):
            trouble = "there is no host of that name: check MASTER_ADDR"
        except OSError as error:
            why = error.strerror or "no answer"
            trouble = f"{why}: check MASTER_ADDR, the network, and whether a firewall lets port {port} through"
    return trouble
