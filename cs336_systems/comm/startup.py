"""Start-up: rank and world size of this process, and the process group that joins all ranks.

torchrun, Slurm or the parent that forked it tells a process its rank and world size; without these it runs alone.
"""

import ctypes
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from cs336_systems.comm.agreement import CommError, comm_error, needs_store, post, ranks_text, timed_store
from cs336_systems.comm.flight_recorder import recorder
from cs336_systems.comm.group import ALL, HISTORY, Group, counters, default_group, in_flight
from cs336_systems.comm.shared_memory import transport
from cs336_systems.comm.store import Place, StoreLostError, TimedStore, open_store, wait_for
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable

Backend = Literal["shm", "gloo", "nccl"]

TIMEOUT = 600.0  # seconds that a rank waits for the others, unless told otherwise
PARTING = timedelta(seconds=2)  # a rank that ends waits so long for the store, or until the others have read from it
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl
STARTED = os.getpid(), os.getppid()  # read early: an orphan gets another parent

_entries = count()  # groups joined by this process so far: keys of an earlier group must not be read again


def _number(name: str, default: int | None = None) -> int:
    """Read an environment variable. Raises UserError if it is not a number, or missing without a default."""
    value = os.environ.get(name, default)
    if value is None:
        raise UserError(f"of RANK and WORLD_SIZE only one is set, not {name}: use torchrun, or set both or neither")
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}, not a number") from None


def first_host(nodes: str) -> str:
    """First node of Slurm's list of nodes: gpu07 of `gpu[07-09,12],big1`."""
    if not (found := re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", nodes)):
        raise UserError(f"SLURM_JOB_NODELIST {nodes!r} names no node")
    return found[1] + (found[2] or "")


def find_place() -> Place:
    """Place that torchrun or Slurm gave this process; without them it is alone. Raises UserError if it is invalid."""
    env = os.environ
    by_slurm = "RANK" not in env and "SLURM_PROCID" in env and _number("SLURM_NTASKS", 1) > 1
    if "RANK" in env or (_number("WORLD_SIZE", 1) > 1 and not by_slurm):  # scripts for Slurm may set it alone
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        local = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world_size)
        host, port = env.get("MASTER_ADDR", "localhost"), 29500
    elif by_slurm:
        rank, world_size = _number("SLURM_PROCID"), _number("SLURM_NTASKS")
        local = _number("SLURM_LOCALID", 0), world_size // _number("SLURM_STEP_NUM_NODES", _number("SLURM_NNODES", 1))
        host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
        port = 20_000 + _number("SLURM_JOB_ID", 0) % 10_000
    else:
        return Place()
    if not 0 < (port := _number("MASTER_PORT", port)) < 2**16:
        raise UserError(f"MASTER_PORT is {port}; ports lie between 1 and 65535")
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} of {world_size}: ranks count from 0 and lie below the world size")
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, world_size, *local, f"{host}:{port}", served, env.get("TORCHELASTIC_RESTART_COUNT", "0"))


def tell_environment(place: Place) -> None:
    """Set the environment variables that torchrun sets, for other libraries that read them."""
    numbers = place.rank, place.world_size, place.local_rank, place.local_world_size
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    os.environ.update(zip(names, map(str, numbers), strict=True), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def is_first_of_machine() -> bool:
    """True on the first rank of each machine and in a process started by hand. Raises UserError as `find_place`."""
    return ("LOCAL_RANK" not in os.environ and "SLURM_LOCALID" not in os.environ) or find_place().local_rank == 0


def current_place(group: Group | None = None) -> Place:
    """Rank and world size of this process: in the given group, in the group of all ranks, or as started."""
    if group is None and not dist.is_initialized():
        return find_place()
    group = default_group(group)
    return Place(group.rank(), group.size())


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its `parent` dies, or now if it has, so that no rank runs on as an orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def can_share() -> bool:
    """True on a machine whose ranks can share memory: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def backend_of(group: Group) -> str:
    """Name of the backend that moves the tensors of a group: shm, gloo or nccl."""
    return "shm" if transport.on and dist.get_backend(group) == "gloo" else str(dist.get_backend(group))


def choose_backend(backend: str | None, device: torch.device, place: Place) -> str:
    """Return the given backend; by default nccl on GPUs, shared memory on the CPUs of one machine, gloo on those of
    several. Raises UserError for a backend that cannot serve these ranks."""
    shares = device.type == "cpu" and place.one_machine and can_share()
    backend = backend or ("nccl" if device.type == "cuda" else "shm" if shares and place.world_size > 1 else "gloo")
    if backend not in ("shm", "gloo", "nccl"):
        raise UserError(f"--backend {backend} does not exist here; it is shm, gloo or nccl")
    if backend == "shm" and not shares:
        raise UserError("--backend shm joins ranks on the CPU of one machine, Linux on x86-64; use --backend gloo")
    if backend == "nccl":
        if device.type == "cpu" and torch.cuda.device_count():
            raise UserError(
                "--backend nccl moves tensors between GPUs, and these ranks are on the CPU; use --backend gloo"
            )
        if device.type != "cuda" or not dist.is_nccl_available():
            raise UserError("--backend nccl moves tensors between GPUs, and there is none here; use --backend gloo")
        if (gpus := torch.cuda.device_count()) < place.local_world_size:
            advice = "start fewer, or share the GPU with --backend gloo"
            raise UserError(f"nccl needs a GPU a rank: {place.local_world_size} ranks, {gpus} GPU(s); {advice}")
    return backend


def _join(store: TimedStore, place: Place, timeout: timedelta) -> None:
    """Wait until every rank has joined, and map the flight recorders of this machine's ranks. Raises UserError on all
    ranks that joined if a rank is missing, joined twice, or was told another world size."""
    message, joined = "", [f"joined/{rank}" for rank in range(place.world_size)]
    mine = f"{place.world_size} {recorder.open(place.rank, place.machine)}"
    if store.set_first(joined[place.rank], mine) != mine:
        message = f"rank {place.rank} of {place.world_size} has joined already: two processes have its number"
    else:
        absent = wait_for(store, joined, timeout, in_vain=lambda index: store.check(["refused"]))
        said = {rank: store.get(key).split(" ", 1) for rank, key in enumerate(joined) if rank not in absent}
        if store.check(["refused"]):
            message = store.get("refused")
        elif len({size for size, _ in said.values()}) > 1:
            sizes = ", ".join(f"rank {rank} says {size}" for rank, (size, _) in said.items())
            message = f"the ranks disagree on how many they are: {sizes}"
        elif absent:
            names = f"{ranks_text(absent)} of {place.world_size}"
            message = f"{names} did not join within {timeout.total_seconds():g} s at {place.meeting}"
    if message:
        store.set("refused", message)
        store.set(f"told/{place.rank}", "")
        if place.rank == 0:  # may hold the store, so it stays until all waiting ranks have read the message
            waiting = [rank for rank, key in enumerate(joined) if store.check([key])]
            wait_for(store, [f"told/{rank}" for rank in waiting], PARTING)
        raise UserError(message)
    for rank in place.machine:
        if rank != place.rank:
            recorder.attach(rank, said[rank][1])


@contextmanager
def distributed(
    device: torch.device | str = "cpu", backend: str | None = None, timeout: float = TIMEOUT, place: Place | None = None
) -> Iterator[Group]:
    """Join the group of all ranks on entry, and leave it together on exit; also for one process alone.

    `timeout` (seconds) holds for joining, for every collective and for every sub-group. On exit the ranks compare how
    many collectives they took part in, so that every rank names one that ended early (fewer batches, an exception).
    Raises UserError for ranks that never join, a port in use or a missing backend; CommError for ranks that end early.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getpid() == STARTED[0]:  # a fork of a rank has another parent
        die_with_parent(STARTED[1])
    if dist.is_initialized():
        raise UserError("a process group is running in this process: leave it before another is started")
    device, place = torch.device(device), place or find_place()
    chosen, limit = choose_backend(backend, device, place), timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if place.one_machine and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    store = PrefixStore(f"attempt {place.attempt}, group {next(_entries)}", open_store(place, limit))
    with ExitStack() as leaving:
        leaving.callback(recorder.close)
        leaving.callback(transport.close)
        _connect(store, chosen, place, limit)
        leaving.callback(dist.destroy_process_group)
        if chosen == "shm" and not _share_memory(TimedStore(store, limit), place, limit):
            why = "the ranks cannot map each other's memory (other containers or users, or none left)"
            if backend == "shm":
                raise UserError(f"--backend shm: {why}; use --backend gloo")
            if place.rank == 0:
                print(f"Ranks use gloo: {why}.", file=sys.stderr)
        try:
            yield default_group()
            _leave(default_group(), limit)
        except BaseException as error:
            in_flight.clear()  # close the connections without waiting for these, so that the others notice at once
            with suppress(StoreLostError):  # it may be gone with rank 0
                if not isinstance(error, CommError):
                    post("reason", f"failed: {type(error).__name__}: {str(error)[:300]}", PARTING)
                post("done", "", PARTING)
            raise


def _share_memory(store: TimedStore, place: Place, timeout: timedelta) -> bool:
    """Let collectives use shared memory if every rank could map that of all others; returns True if so."""
    keys = [f"shares/{rank}" for rank in range(place.world_size)]
    with needs_store("mapped the memory of the other ranks", default_group()):
        store.set(keys[place.rank], "yes" if transport.open() else "no")
        if wait_for(store, keys, timeout, in_vain=recorder.died) or "no" in map(store.get, keys):
            transport.close()
        else:
            transport.greet()
    return transport.on


def _connect(store: Store, backend: str, place: Place, timeout: timedelta) -> None:
    try:
        _join(TimedStore(store, timeout), place, timeout)
        name = "gloo" if backend == "shm" else backend  # for torch's own operations
        dist.init_process_group(name, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except StoreLostError as error:
        where = printable(place.meeting) or "its own store"
        raise UserError(f"rank 0 has left {where}, or hangs, before all ranks had joined ({error})") from None
    except RuntimeError as error:
        raise UserError(f"rank {place.rank} could not connect to the others: {str(error)[:200]}") from None


def _leave(group: Group, timeout: timedelta) -> None:
    """Wait for the others and compare how many collectives each took part in. Raises CommError if they differ."""
    store, counts = timed_store(group), counters(group)
    ended = f"ended after {counts[ALL]} collectives"
    left, done, gone = ([f"{word}/{rank}" for rank in range(group.size())] for word in ("left", "done", "gone"))
    with needs_store(ended, group):
        store.set(left[group.rank()], f"{counts[ALL]} {counts[HISTORY]}")
        post("reason", f"{ended}; did it have fewer batches?")
        post("done")
        wait_for(store, done, timeout)
        if not store.check(left):
            raise comm_error(ended, group)
        numbers, histories = zip(*(store.get(key).split() for key in left), strict=True)
        store.set(gone[group.rank()], "")
        if group.rank() == 0:  # may hold the store, so it leaves last
            wait_for(store, gone, PARTING)
    if len(set(numbers)) > 1:
        raise CommError(f"the ranks ended after {', '.join(numbers)} collectives: some had fewer batches")
    if len(set(histories)) > 1:
        raise CommError("the ranks' collectives differed in kind, size or order: what they computed together is wrong")
