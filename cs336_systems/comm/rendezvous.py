"""Rendezvous: ranks find each other through a store, in a file of one machine or at an address and port.

Ranks of one machine use the file or the loopback address, so that nothing listens to the network.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic, sleep

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from cs336_systems.comm.agreement import ranks_text, wait_for
from cs336_systems.comm.diagnostics import EXPLAIN_SECONDS
from cs336_systems.comm.flight_recorder import recorder
from cs336_systems.comm.store import StoreLostError, TimedStore, ask
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable

RETRY_SECONDS = 0.1  # between two attempts to reach rank 0
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_servers: dict[str, Store] = {}  # by address: a store that is closed and opened again would lose keys


@dataclass(frozen=True)
class Place:
    """Place of a process: rank, world size, the same on its machine, and where the ranks find each other."""

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


def _listen(host: str, port: int) -> int:
    """Listening socket of rank 0, on the loopback address only if that is the host. Raises UserError for a port in
    use."""
    address = "127.0.0.1" if host == "localhost" else host if host in LOOPBACK else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family).detach()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot listen on port {port}: {why}; choose another with MASTER_PORT") from None


def open_store(place: Place, timeout: timedelta) -> Store:
    """Open the store of the ranks. Raises UserError for a port in use or a rank 0 that cannot be reached."""
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
            _servers[place.meeting] = ask(timeout, partial(opened, master_listen_fd=listener))
            return _servers[place.meeting]
    except StoreLostError:
        trouble = "what answers there is not a store of ranks: choose another port with MASTER_PORT"
    raise UserError(
        f"rank {place.rank} of {place.world_size} finds no rank 0 at {printable(place.meeting)} within "
        f"{timeout.total_seconds():g} s: {trouble}"
    )


def _try_to_connect(host: str, port: int, timeout: timedelta) -> str:
    """Try to connect until the timeout; returns what is wrong and what to check, or "" once connected.

    TCPStore would retry as well, but it reports every failure as a time-out, with lines of its code.
    """
    deadline = monotonic() + timeout.total_seconds()
    while True:
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
        if monotonic() + RETRY_SECONDS > deadline:
            return trouble
        sleep(RETRY_SECONDS)


def join(store: TimedStore, place: Place, timeout: timedelta) -> None:
    """Wait until every rank has joined, and map the flight recorders of this machine's ranks.

    Raises UserError on all ranks that joined if a rank is missing, joined twice, or was told another world size.
    """
    try:
        if place.world_size > 1:
            recorder.open(place.rank, place.machine, store)
        _compare(store, place, timeout)
        recorder.attach(store)
    except StoreLostError as error:
        raise UserError(
            f"rank 0 has left {printable(place.meeting)}, or hangs, before all ranks had joined ({error})"
        ) from None


def _compare(store: TimedStore, place: Place, timeout: timedelta) -> None:
    message, joined = "", [f"joined/{rank}" for rank in range(place.world_size)]
    if store.add(f"claims/{place.rank}", 1) > 1:
        message = f"rank {place.rank} of {place.world_size} has joined already: two processes have its number"
    else:
        store.set(joined[place.rank], str(place.world_size))
        absent = wait_for(store, joined, timeout, unless="refused")
        sizes = {rank: store.get(key) for rank, key in enumerate(joined) if rank not in absent}
        if store.check(["refused"]):
            message = store.get("refused")
        elif len(set(sizes.values())) > 1:
            said = ", ".join(f"rank {rank} says {size}" for rank, size in sizes.items())
            message = f"the ranks disagree on how many they are: {said}"
        elif absent:
            names = f"{ranks_text(absent)} of {place.world_size}"
            message = f"{names} did not join within {timeout.total_seconds():g} s at {place.meeting}"
    if message:
        store.set("refused", message)
        store.set(f"told/{place.rank}", "")
        if place.rank == 0:  # which may hold the store: until all waiting ranks have read the message
            waiting = [rank for rank, key in enumerate(joined) if store.check([key])]
            wait_for(store, [f"told/{rank}" for rank in waiting], timedelta(seconds=EXPLAIN_SECONDS))
        raise UserError(message)
