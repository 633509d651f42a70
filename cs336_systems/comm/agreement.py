"""Agreement through the store, without a collective, and the error of a rank whose collective or agreement failed.

Ranks whose collectives do not match can still agree here. A rank that fails posts its reason in the store. A rank whose
collective fails reads the reasons of the others, adds the flight recorder's entries of ranks that left none, and raises
one CommError that names the cause.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from cs336_systems.comm.flight_recorder import FINISHED, WAITING, recorder
from cs336_systems.comm.group import Group, count, default_group, group_timeout, in_flight, is_fake
from cs336_systems.comm.shared_memory import transport
from cs336_systems.comm.store import StoreLostError, TimedStore, first_line, polls, wait_for
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable

EXPLAIN_SECONDS = 2.0  # time that a failed rank waits for the reasons of the others


class CommError(RuntimeError):
    """A collective or an agreement failed; the message says what every rank was doing."""


def timed_store(group: Group, limit: timedelta | None = None) -> TimedStore:
    """Store of a group; each answer must come within `limit`, by default the group's timeout."""
    return TimedStore(group.get_group_store(), group_timeout(group) if limit is None else limit)


def post(kind: Literal["reason", "done"], message: str = "", limit: timedelta | None = None) -> None:
    """Post the `reason` why this rank stops, or that it is `done`. Ranks whose collectives fail quote the reason. All
    groups use one store for this, since the cause of a failure may lie in another group."""
    timed_store(default_group(), limit).set(f"{kind}/{dist.get_rank()}", message)


def fault(message: str) -> UserError:
    """Post a message as the reason why this rank stops, for ranks that wait for it; returns the UserError to raise."""
    # Compiled code cannot post; else the compiler is not loaded, which takes seconds in which the others wait.
    return (_disable_dynamo(_fault) if torch.compiler.is_compiling() else _fault)(message)


def _fault(message: str) -> UserError:
    with suppress(StoreLostError):
        post("reason", f"failed: {message}")
    return UserError(message)


def comm_error(
    doing: str, group: Group, cause: str = "", silent: Collection[int] | None = None, headline: str = ""
) -> CommError:
    """Make the error of a rank that was `doing` something in a group. Post this rank's reason and wait for those of the
    others (if `silent` lists global ranks, read only theirs, without a wait). Add the flight recorder's entries of this
    rank and of ranks without a reason. Ranks of this machine that died or are stopped are always included, since the
    rank that did not answer may be waiting for them."""
    me, readable = dist.get_rank(), sorted(recorder.others)
    asked = {*(dist.get_process_group_ranks(group) if silent is None else silent)} - {me}
    limit = timedelta(seconds=EXPLAIN_SECONDS)
    store = timed_store(default_group(), limit)

    def posted(rank: int, kind: str = "reason") -> str:
        key = f"{kind}/{rank}"
        return printable(" ".join(store.get(key).split())) if store.check([key]) else ""

    with suppress(StoreLostError):  # it may be gone with rank 0
        post("reason", doing, limit)
        for rank in readable:
            if default_group().size() > len(readable) + 1 and not posted(rank):  # ranks of other machines read it
                store.set(f"summary/{rank}", recorder.others[rank].summary())
        for _ in polls(EXPLAIN_SECONDS if silent is None else 0.0):
            if all(posted(rank) for rank in asked - recorder.lost()):
                break
    # Read once: a rank that ends normally from now on must not count as lost.
    said, unexplained = dict[int, str](), sorted(asked | recorder.lost())
    with suppress(StoreLostError):
        for rank in list(unexplained):
            if reason := posted(rank) or (rank not in readable and posted(rank, "summary")):
                unexplained.remove(rank)
                if rank in asked or not reason.startswith("ended"):  # others may end normally
                    said[rank] = f"rank {rank} {reason}"
    said |= {rank: recorder.summary(rank) for rank in unexplained}
    first = "; ".join([headline or f"rank {me} {doing}", *(said[rank] for rank in sorted(said))]) + cause
    return CommError("\n".join([first, *recorder.history([me, *unexplained])]))


@contextmanager
def needs_store(doing: str, group: Group) -> Iterator[None]:
    """Raises CommError if the store is lost inside the block."""
    try:
        yield
    except StoreLostError as error:
        raise comm_error(doing, group, f" ({error})") from error


def agree(topic: str, value: Any, group: Group, counted: bool = True, patience: timedelta | None = None) -> list[Any]:
    """Exchange values (JSON without NaN) on a topic; returns all ranks' in order. Every rank of the group must call it.

    A thread beside the main one passes `counted=False` and uses topics of its own, so that its timing cannot change the
    numbers of the main thread's collectives. `patience` extends the group's timeout, for instance for slow disks.
    Raises CommError that names the ranks which did not answer, at once if they have ended.
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)  # escapes would join two surrogates
    if is_fake(group):
        return [json.loads(text)] * group.size()
    store, number = timed_store(group), count(group, f"agree {topic}")
    timeout = max(group_timeout(group), patience or timedelta())
    if counted:
        count(group)
    keys = [f"{topic}/{number}/{rank}" for rank in range(group.size())]
    everyone, known = timed_store(default_group()), dist.get_process_group_ranks(group)

    def ended(index: int) -> bool:
        return recorder.died(known[index]) or everyone.check([f"done/{known[index]}"])

    entry = recorder.mine.launch("agreement", group.group_name, topic, len(text), "", number)
    doing = f"waited for an answer: {topic}"
    with needs_store(doing, group):
        store.set(keys[group.rank()], text)
        recorder.mine.advance(entry, WAITING)
        if silent := wait_for(store, keys, timeout, in_vain=ended):
            named = [known[i] for i in silent]
            late = "" if all(map(ended, silent)) else f" within {timeout.total_seconds():g} s"
            headline = f"{topic}: {ranks_text(named)} of {dist.get_world_size()} did not answer{late}"
            raise comm_error(doing, group, silent=named, headline=headline)
        recorder.mine.advance(entry, FINISHED)
        return [json.loads(store.get(key)) for key in keys]


def subgroup(ranks: Sequence[int]) -> Group | None:
    """Make a group of some ranks with the timeout of the group of all; None on other ranks. Every rank must call it."""
    last = dist.get_world_size() - 1
    if not ranks or len({*ranks}) < len(ranks) or min(ranks) < 0 or max(ranks) > last:
        raise UserError(f"a group needs ranks from 0 to {last}, each once, not {list(ranks)}")
    mine, alone = dist.get_rank() in ranks, len(ranks) == 1  # a group of one needs no other rank
    if alone and not mine:
        return None
    try:
        for work in in_flight if transport.on else ():  # in new_group a rank moves no shared memory
            if work.event.verb not in ("send", "receive"):  # a message's partner may launch it later
                for each in work.pending:
                    each.wait()
        group = dist.new_group(list(ranks), timeout=group_timeout(default_group()), use_local_synchronization=alone)
    except RuntimeError as error:  # a rank ended while they were connecting
        doing = f"was joining a group of ranks {', '.join(map(str, ranks))}"
        raise comm_error(doing, default_group(), f" ({first_line(error)})") from error
    return group if mine else None


def stop_step(group: Group, ask: int | None = None) -> int | None:
    """Step after which all ranks stop, None if no rank has asked for that. This rank may `ask` for a step; the first
    that any rank asked for holds. Raises CommError if the store is lost."""
    store, key = timed_store(group), "stop after step"
    with needs_store("looked whether to stop", group):
        if ask is not None:
            return int(store.set_first(key, str(ask)))
        return int(store.get(key)) if store.check([key]) else None


def ranks_text(ranks: Sequence[int]) -> str:
    """Text of rank numbers: `rank 3`, or `ranks 3, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
