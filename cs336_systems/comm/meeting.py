"""Where the ranks of a run meet: a store in a file of one machine, or behind an address and port.

Ranks of one machine meet in the file, or on the loopback address, so that nothing listens to the network.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import NoReturn

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from cs336_systems.comm import flight
from cs336_systems.comm.group import EXPLAIN_SECONDS, wait_for
from cs336_systems.comm.store import StoreLostError, TimedStore, ask
from cs336_systems.errors import UserError
from cs336_systems.text import printable

KNOCK_SECONDS = 0.1  # between two attempts to reach rank 0
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_servers: dict[str, Store] = {}  # by address: a store that closed and opened again would meet ranks half-way


@dataclass(frozen=True)
class Place:
    """One process among all ranks, and where they meet: a file of one machine, or an address and port."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: str = ""  # a path, or host:port; empty for one process alone
    served: bool = False  # whether somebody else, torchrun's agent, already holds the store there
    attempt: str = "0"

    @property
    def one_machine(self) -> bool:
        return self.world_size == self.local_world_size

    @property
    def machine(self) -> range:
        """The ranks of this rank's machine, which are neighbours."""
        first = self.rank - self.local_rank
        return range(max(0, first), min(self.world_size, first + self.local_world_size))


def _listen(host: str, port: int) -> socket.socket:
    """Rank 0's socket, on the loopback address alone if the ranks meet there. Raises UserError for a port in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1" if host == "localhost" else host if host in LOOPBACK else "", port))
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on port {port}: {error.strerror}; choose another with MASTER_PORT") from None
    listener.listen()
    return listener


def open_store(place: Place, timeout: timedelta) -> Store:
    """The store in which the ranks meet. Raises UserError for a port in use and a rank 0 that is not there."""
    if place.meeting.startswith("/"):
        return FileStore(place.meeting, place.world_size)
    if place.meeting in _servers:
        return _servers[place.meeting]
    host, _, text = place.meeting.rpartition(":")
    port, serves = int(text), place.rank == 0 and not place.served
    listener = _listen(host, port).detach() if serves else None
    trouble = "" if serves else _knock(host, port, timeout)
    try:
        if not trouble:
            opened = partial(TCPStore, host, port, None, serves, timeout, wait_for_workers=False)
            store: Store = ask(timeout, partial(opened, master_listen_fd=listener))
            _servers[place.meeting] = store
            return store
    except StoreLostError:
        trouble = "what answers there is not a store of ranks: choose another port with MASTER_PORT"
    raise UserError(
        f"rank {place.rank} of {place.world_size} finds no rank 0 at {printable(place.meeting)} within "
        f"{timeout.total_seconds():g} s: {trouble}"
    )


def _knock(host: str, port: int, timeout: timedelta) -> str:
    """Try until somebody answers at an address; returns what is wrong, and what to check, if nobody does in time.

    TCPStore would try as well, but calls every failure a time-out, and prints it with the lines of its code.
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
        if monotonic() + KNOCK_SECONDS > deadline:
            return trouble
        sleep(KNOCK_SECONDS)


def join(store: TimedStore, place: Place, timeout: timedelta) -> None:
    """Wait until every rank is there, and let ranks of one machine see each other's flight records.

    Raises UserError, on all that are there, for ranks that are not, that come twice, or that count differently.
    """
    try:
        if place.world_size > 1:
            flight.take_off(place.rank, place.machine, store)
        _compare(store, place, timeout)
        flight.meet(store)
    except StoreLostError as error:
        raise UserError(
            f"rank 0 has left {printable(place.meeting)}, or hangs, before all ranks had joined ({error})"
        ) from None


def _compare(store: TimedStore, place: Place, timeout: timedelta) -> None:
    everyone = range(place.world_size)
    if store.add(f"claims/{place.rank}", 1) > 1:
        _refuse(
            store, place, f"rank {place.rank} of {place.world_size} has joined already: two processes have its number"
        )
    store.set(f"joined/{place.rank}", str(place.world_size))
    absent = wait_for(store, [f"joined/{rank}" for rank in everyone], timeout, unless="refused")
    sizes = {rank: int(store.get(f"joined/{rank}")) for rank in everyone if rank not in absent}
    if store.check(["refused"]):
        _refuse(store, place, store.get("refused"))
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"rank {rank} says {size}" for rank, size in sizes.items())
        _refuse(store, place, f"the ranks disagree on how many they are: {said}")
    if absent:
        names = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {place.world_size}"
        _refuse(store, place, f"{names} did not join within {timeout.total_seconds():g} s at {place.meeting}")


def _refuse(store: TimedStore, place: Place, message: str) -> NoReturn:
    """Raises UserError, once every rank that is waiting has been told: rank 0 may hold the store."""
    store.set("refused", message)
    store.set(f"told/{place.rank}", "")
    if place.rank == 0:
        waiting = [rank for rank in range(place.world_size) if store.check([f"joined/{rank}"])]
        wait_for(store, [f"told/{rank}" for rank in waiting], timedelta(seconds=EXPLAIN_SECONDS))
    raise UserError(message)
