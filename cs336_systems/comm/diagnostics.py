"""Diagnostics: why a rank ended, and what every rank was doing when a collective failed, told through the store.

A rank that fails posts its reason in the store. A rank whose collective fails reads the reasons of the others, adds
what the flight recorder shows of ranks that left none, and raises one CommError that names the cause.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from cs336_systems.comm.flight_recorder import recorder
from cs336_systems.comm.group import Group, default_group, global_rank, group_timeout
from cs336_systems.comm.store import StoreLostError, TimedStore, wait_until
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable

EXPLAIN_SECONDS = 2.0  # time that a failed rank waits for the reasons of the others


class CommError(RuntimeError):
    """A collective or an agreement failed; the message says what every rank was doing."""


def timed_store(group: Group, limit: timedelta | None = None) -> TimedStore:
    """Store of a group; each answer must come within `limit`, by default the group's timeout."""
    return TimedStore(group.get_group_store(), group_timeout(group) if limit is None else limit)


def _reasons(limit: timedelta | None = None) -> TimedStore:
    """The one store for the reasons of all ranks: the cause may lie in another of a rank's groups."""
    return timed_store(default_group(), limit)


def post(kind: Literal["reason", "done"], message: str = "", limit: timedelta | None = None) -> None:
    """Post the `reason` why this rank stops, which ranks whose collectives fail will quote, or that it is `done`: no
    rank need wait for it."""
    _reasons(limit).set(f"{kind}/{dist.get_rank()}", message)


def has_ended(rank: int) -> bool:
    """True if a rank is known to have died (on this machine) or to have announced its end."""
    return recorder.died(rank) or _reasons().check([f"done/{rank}"])


def _posted(store: TimedStore, rank: int, kind: str = "reason") -> str:
    key = f"{kind}/{rank}"
    return printable(" ".join(store.get(key).split())) if store.check([key]) else ""


def comm_error(doing: str, group: Group, cause: str = "") -> CommError:
    """Error of a rank that was `doing` something when a collective failed: what became of every other rank of the
    group, then the flight recorder's entries."""
    others = [global_rank(rank, group) for rank in range(group.size())]
    said, history = inquire(doing, others, EXPLAIN_SECONDS)
    return CommError("\n".join([f"rank {dist.get_rank()} {doing}; {'; '.join(said)}{cause}", *history]))


@contextmanager
def needs_store(doing: str, group: Group) -> Iterator[None]:
    """Raises CommError if the store is lost inside the block."""
    try:
        yield
    except StoreLostError as error:
        raise comm_error(doing, group, f" ({error})") from error


def inquire(doing: str, others: Iterable[int], seconds: float) -> tuple[list[str], list[str]]:
    """Post a reason and gather those of other ranks for some seconds; returns what became of each, and the flight
    recorder's entries of this rank and of those without a reason.

    Ranks of this machine that died or are stopped are always included: a rank that is waited for may wait for them.
    """
    me, found = dist.get_rank(), dict[int, str]()
    asked, readable = {rank for rank in others if rank != me}, sorted(recorder.others)
    limit = timedelta(seconds=EXPLAIN_SECONDS)
    with suppress(StoreLostError):  # it may be gone with rank 0
        post("reason", doing, limit)
        store = _reasons(limit)
        for rank in readable:
            if default_group().size() > len(readable) + 1 and not _posted(store, rank):  # for ranks of other machines
                store.set(f"summary/{rank}", recorder.summary(rank).removeprefix(f"rank {rank} "))
        wait_until(lambda: all(_posted(store, rank) for rank in asked - recorder.lost()), seconds)
        for rank in asked | recorder.lost():
            if reason := _posted(store, rank) or (rank not in readable and _posted(store, rank, "summary")):
                found[rank] = reason
    silent = sorted((asked | recorder.lost()) - found.keys())
    summaries = {rank: recorder.summary(rank) for rank in silent}
    unrelated = {rank for rank in found.keys() - asked if found[rank].startswith("ended")}  # ended in order
    named = sorted({*found, *silent} - unrelated)
    said = [summaries[rank] if rank in summaries else f"rank {rank} {found[rank]}" for rank in named]
    return said, recorder.history([me, *silent])


def fault(message: str) -> UserError:
    """Post a reason, and return the UserError to raise: ranks that miss this one will name it."""
    with suppress(StoreLostError):
        post("reason", f"failed: {message}")
    return UserError(message)
