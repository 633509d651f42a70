"""Start-up: where this process stands among the ranks, and the process group that joins them.

A process is told its place by torchrun, by Slurm, or by whoever forked it; else it is alone. Ranks of one machine meet
in a file, or on the loopback address, so that nothing listens to the network.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from cs336_systems.comm.group import (
    EXPLAIN_SECONDS,
    CommError,
    Group,
    default_group,
    last_words,
    post,
    sequence,
    wait_for,
)
from cs336_systems.errors import UserError

Backend = Literal["gloo", "nccl"]

TIMEOUT = 600.0  # seconds that a rank waits for the others, unless told otherwise
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_servers: dict[str, Store] = {}  # by address: a store that closed and opened again would meet ranks half-way
_entries = count()  # how often this process has joined a group: what an earlier one left in the store is not this one's


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


def _number(name: str, default: int | None = None) -> int:
    """An environment variable. Raises UserError if it is not a number, or missing without a default."""
    value = os.environ.get(name, default)
    if value is None:
        raise UserError(f"RANK is set but {name} is not: start with torchrun, or set both")
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}, not a number") from None


def _port(default: int) -> int:
    port = _number("MASTER_PORT", default)
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT is {port}; ports lie between 1 and 65535")
    return port


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: `gpu[07-09,12],big1` begins with gpu07."""
    found = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodes)
    if not found:
        raise UserError(f"SLURM_JOB_NODELIST {nodes!r} names no node")
    return found[1] + (found[2] or "")


def find_place() -> Place:
    """The place that torchrun (RANK, WORLD_SIZE, ...) or Slurm (SLURM_PROCID, ...) gave this process; else alone.

    Raises UserError for a place that cannot be.
    """
    env = os.environ
    if "RANK" in env:
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        local = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world_size)
        meeting = f"{env.get('MASTER_ADDR', 'localhost')}:{_port(29500)}"
        served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        place = Place(rank, world_size, *local, meeting, served, env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    elif _number("SLURM_NTASKS", 1) > 1 and "SLURM_PROCID" in env:
        rank, world_size = _number("SLURM_PROCID"), _number("SLURM_NTASKS")
        host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
        port = _port(20_000 + _number("SLURM_JOB_ID", 0) % 10_000)
        nodes = _number("SLURM_STEP_NUM_NODES", _number("SLURM_NNODES", 1))
        local = _number("SLURM_LOCALID", 0), world_size // nodes
        place = Place(rank, world_size, *local, f"{host}:{port}")
    else:
        return Place()
    if not 0 <= place.rank < place.world_size:
        raise UserError(f"rank {place.rank} of {place.world_size}: ranks count from 0 and lie below the world size")
    return place


def is_joined() -> bool:
    """Whether this process has joined others, through this module or by torch itself."""
    return dist.is_initialized()


def current_place(group: Group | None = None) -> Place:
    """This rank's number and how many there are: in a group, in the one that was joined, or as started."""
    if group is None and not is_joined():
        return find_place()
    group = default_group(group)
    return Place(group.rank(), group.size())


def speaks_for_its_machine() -> bool:
    """Whether this is the first rank of its machine, or was started by hand. Raises UserError as `find_place` does."""
    return ("LOCAL_RANK" not in os.environ and "SLURM_LOCALID" not in os.environ) or find_place().local_rank == 0


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


def _open_store(place: Place, timeout: timedelta) -> Store:
    """The store in which the ranks meet. Raises UserError for a port in use and a rank 0 that is not there."""
    if place.meeting.startswith("/"):
        return FileStore(place.meeting, place.world_size)
    if place.meeting in _servers:
        return _servers[place.meeting]
    host, _, text = place.meeting.rpartition(":")
    port, serves = int(text), place.rank == 0 and not place.served
    listener = _listen(host, port).detach() if serves else None
    try:
        store = TCPStore(host, port, None, serves, timeout, wait_for_workers=False, master_listen_fd=listener)
        _servers[place.meeting] = store
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            f"rank {place.rank} of {place.world_size} finds no rank 0 at {place.meeting} within "
            f"{timeout.total_seconds():g} s: {str(error).splitlines()[0][:100]}"
        ) from None
    return store


def _join(store: Store, place: Place, timeout: timedelta) -> None:
    """Wait until every rank is there. Raises UserError, on all that are, for ranks that are not, that come twice, or
    that count differently."""
    try:
        _compare(store, place, timeout)
    except dist.DistNetworkError:
        raise UserError(f"rank 0 has left {place.meeting} before all ranks had joined") from None


def _compare(store: Store, place: Place, timeout: timedelta) -> None:
    everyone = range(place.world_size)
    if store.add(f"claims/{place.rank}", 1) > 1:
        _refuse(
            store, place, f"rank {place.rank} of {place.world_size} has joined already: two processes have its number"
        )
    store.set(f"joined/{place.rank}", str(place.world_size))
    absent = wait_for(store, [f"joined/{rank}" for rank in everyone], timeout, unless="refused")
    sizes = {rank: int(store.get(f"joined/{rank}")) for rank in everyone if rank not in absent}
    if store.check(["refused"]):
        _refuse(store, place, store.get("refused").decode())
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"rank {rank} says {size}" for rank, size in sizes.items())
        _refuse(store, place, f"the ranks disagree on how many they are: {said}")
    if absent:
        names = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {place.world_size}"
        _refuse(store, place, f"{names} did not join within {timeout.total_seconds():g} s at {place.meeting}")


def _refuse(store: Store, place: Place, message: str) -> NoReturn:
    """Raises UserError, once every rank that is waiting has been told: rank 0 may hold the store."""
    store.set("refused", message)
    store.set(f"told/{place.rank}", "")
    if place.rank == 0:
        waiting = [rank for rank in range(place.world_size) if store.check([f"joined/{rank}"])]
        wait_for(store, [f"told/{rank}" for rank in waiting], timedelta(seconds=EXPLAIN_SECONDS))
    raise UserError(message)


def choose_backend(backend: str | None, device: torch.device, place: Place) -> str:
    """nccl on GPUs and gloo on CPUs unless told. Raises UserError for a backend that cannot serve these ranks."""
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend not in ("gloo", "nccl"):
        raise UserError(f"--backend {backend} does not exist here; it is gloo or nccl")
    if backend == "nccl":
        if device.type != "cuda" or not dist.is_nccl_available():
            raise UserError("--backend nccl moves tensors between GPUs, and there is none here; use --backend gloo")
        if place.local_world_size > torch.cuda.device_count():
            raise UserError(
                f"nccl needs a GPU a rank: {place.local_world_size} ranks, {torch.cuda.device_count()} GPU(s); start "
                "fewer, or share the GPU with --backend gloo"
            )
    return backend


@contextmanager
def distributed(
    device: torch.device | str = "cpu",
    backend: str | None = None,
    timeout: float = TIMEOUT,
    place: Place | None = None,
) -> Iterator[Group]:
    """The group of all ranks, joined on entry and left together on exit; works for one process alone, too.

    `timeout` in seconds holds for joining, for every collective and for every sub-group. On exit the ranks compare
    how much they did: one that ends early (fewer batches, an exception) is named on all. Raises UserError for ranks
    that never join, a port in use, or a backend that is not there, and CommError for ranks that part.
    """
    device, place = torch.device(device), place or find_place()
    backend, limit = choose_backend(backend, device, place), timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if place.one_machine and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = {name for _, name in socket.if_nameindex()}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in names else "lo0"
    meeting = HashStore() if place.world_size == 1 else _open_store(place, limit)
    store = PrefixStore(f"attempt {place.attempt}, group {next(_entries)}", meeting)
    _join(store, place, limit)
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    except RuntimeError as error:
        raise UserError(f"rank {place.rank} could not connect to the others: {str(error)[:200]}") from None
    group = default_group()
    try:
        yield group
        _leave(group, limit)
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be gone with rank 0
            if not isinstance(error, CommError):
                post(f"failed: {type(error).__name__}: {str(error)[:300]}")
            group.get_group_store().set(f"done/{group.rank()}", "")
        raise
    finally:
        dist.destroy_process_group()


def _leave(group: Group, timeout: timedelta) -> None:
    """Wait for the others and compare how many collectives each took part in. Raises CommError if they differ."""
    store, ranks, mine = group.get_group_store(), range(group.size()), sequence(group)
    store.set(f"left/{group.rank()}", str(mine))
    post(f"ended after {mine} collectives; did it have fewer batches?")
    store.set(f"done/{group.rank()}", "")
    wait_for(store, [f"done/{rank}" for rank in ranks], timeout)
    if not all(store.check([f"left/{rank}"]) for rank in ranks):
        raise CommError(f"rank {group.rank()} ended after {mine} collectives; {last_words(group)}")
    counts = [int(store.get(f"left/{rank}")) for rank in ranks]
    store.set(f"gone/{group.rank()}", "")
    if group.rank() == 0:  # which may hold the store
        wait_for(store, [f"gone/{rank}" for rank in ranks], timedelta(seconds=EXPLAIN_SECONDS))
    if len(set(counts)) > 1:
        raise CommError(f"the ranks ended after {', '.join(map(str, counts))} collectives: some had fewer batches")
