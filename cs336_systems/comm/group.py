"""Groups of ranks, and how ranks agree or say what went wrong through the store, without a collective."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cs336_systems.comm import flight
from cs336_systems.comm.store import StoreLostError, TimedStore
from cs336_systems.errors import UserError
from cs336_systems.text import printable

Group = dist.ProcessGroup

EXPLAIN_SECONDS = 2.0  # how long a failed rank waits to hear what the others were doing

_counters: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_occurrences: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()


class CommError(RuntimeError):
    """A collective or an agreement failed; the message says what every rank was doing."""


def default_group(group: Group | None = None) -> Group:
    """The group, or that of all ranks. Raises UserError if none was started."""
    if group is not None:
        return group
    if not dist.is_initialized():
        raise UserError("no process group: do this inside `with cs336_systems.comm.distributed():`")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def subgroup(ranks: Sequence[int]) -> Group | None:
    """A group of some ranks with the timeout of all of them; None on a rank outside. Every rank must call this.

    torch would give it ten or thirty minutes, whatever the start-up was told.
    """
    if len(ranks) == 1 and dist.get_rank() not in ranks:
        return None  # nobody waits for a group of one
    try:
        group = dist.new_group(
            list(ranks), timeout=group_timeout(default_group()), use_local_synchronization=len(ranks) == 1
        )
    except RuntimeError as error:  # a rank has gone while they were connecting
        doing = f"was joining a group of ranks {', '.join(map(str, ranks))}"
        raise parted(doing, default_group(), f" ({str(error).splitlines()[0][:120]})") from error
    return group if dist.get_rank() in ranks else None


def has_tags(group: Group) -> bool:
    """Whether messages between two ranks may overtake each other without being taken for one another."""
    return dist.get_backend(group) == "gloo"


def group_timeout(group: Group) -> timedelta:
    """How long a rank waits for the others."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return group._get_backend(device).options._timeout


def global_rank(rank: int, group: Group) -> int:
    """The number of a group's rank among all ranks, by which errors call it."""
    return dist.get_global_rank(group, rank)


def sequence(group: Group) -> int:
    """How many collectives and agreements this rank has taken part in."""
    return _counters.get(group, 0)


def count(group: Group) -> int:
    """Count one more, and return its number."""
    _counters[group] = sequence(group) + 1
    return _counters[group]


def occurrence(kind: str, group: Group) -> int:
    """Count one more collective or agreement of a kind, and return its number."""
    counts = _occurrences.setdefault(group, Counter())
    counts[kind] += 1
    return counts[kind]


def _store(group: Group, limit: timedelta | None = None) -> TimedStore:
    """A group's store, whose answers come within the group's timeout unless told otherwise."""
    return TimedStore(group.get_group_store(), group_timeout(group) if limit is None else limit)


def _words(limit: timedelta | None = None) -> TimedStore:
    """One store for the last words of all ranks: what stops a rank may have happened in another of its groups."""
    return _store(default_group(), limit)


def post(message: str, limit: timedelta | None = None) -> None:
    """Leave a last word, which a rank whose collective fails will look for to name the cause."""
    _words(limit).set(f"last word/{dist.get_rank()}", message)


def end(limit: timedelta | None = None) -> None:
    """Say that this rank will take part in nothing more, so that nobody waits for its answers."""
    _words(limit).set(f"done/{dist.get_rank()}", "")


def _ended(rank: int) -> bool:
    """Whether a rank will not answer any more, as far as can be known: it died on this machine, or has ended."""
    return flight.died(rank) or _words().check([f"done/{rank}"])


def _posted(words: TimedStore, rank: int, kind: str = "last word") -> str:
    key = f"{kind}/{rank}"
    return printable(" ".join(words.get(key).split())) if words.check([key]) else ""


def parted(doing: str, group: Group, cause: str = "") -> CommError:
    """The error of a rank that was `doing` something when ranks parted: what became of each, then the flight record."""
    others = [global_rank(rank, group) for rank in range(group.size())]
    said, record = _inquire(doing, others, EXPLAIN_SECONDS)
    return CommError("\n".join([f"rank {dist.get_rank()} {doing}; {'; '.join(said)}{cause}", *record]))


@contextmanager
def needs_store(doing: str, group: Group) -> Iterator[None]:
    """Raises CommError, as a collective that failed does, for a store that is lost inside the block."""
    try:
        yield
    except StoreLostError as error:
        raise parted(doing, group, f" ({error})") from error


def _inquire(doing: str, others: Iterable[int], patience: float) -> tuple[list[str], list[str]]:
    """Leave a last word and gather those of others; returns what became of them, and this rank's and their records.

    Beside them it tells of any rank of this machine that died or stopped: what a rank waits for may itself wait for it.
    """
    me, words = dist.get_rank(), dict[int, str]()
    asked = {rank for rank in others if rank != me}
    with suppress(StoreLostError):  # it may be gone with rank 0
        _gather(doing, asked, patience, words)
    silent = sorted((asked | flight.lost()) - words.keys())
    news = {rank: flight.news(rank) for rank in silent}
    stale = {rank for rank in words.keys() - asked if words[rank].startswith("ended")}  # it died when it was done
    named = sorted({*words, *silent} - stale)
    said = [news[rank] if rank in news else f"rank {rank} {words[rank]}" for rank in named]
    return said, flight.history([me, *silent])


def _gather(doing: str, asked: set[int], patience: float, words: dict[int, str]) -> None:
    limit = timedelta(seconds=EXPLAIN_SECONDS)
    post(doing, limit)
    store = _words(limit)
    for rank in flight.seen():
        if default_group().size() > len(flight.seen()) + 1 and not _posted(store, rank):  # others do not see it
            store.set(f"news/{rank}", flight.news(rank).removeprefix(f"rank {rank} "))
    deadline, pause = time.monotonic() + patience, 0.001
    while any(not _posted(store, rank) for rank in asked - flight.lost()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    for rank in asked | flight.lost():
        word = _posted(store, rank) or (rank not in flight.seen() and _posted(store, rank, "news"))
        if word:
            words[rank] = word


def fault(message: str) -> UserError:
    """An error to raise, that the other ranks will name when they miss this one."""
    with suppress(StoreLostError):
        post(f"failed: {message}")
    return UserError(message)


def agree(topic: str, value: str, group: Group, counted: bool = True, patience: timedelta | None = None) -> list[str]:
    """Every rank's value, any text, through the store: ranks that differ in everything else still get an answer.

    A thread beside the main one agrees with `counted=False`, on topics of its own: how many collectives its rank had
    begun by then is a matter of timing, and must not shift their numbers. Where ranks may take differently long for
    what they answer, as disks do, `patience` lets them wait that long if the group's timeout is shorter; for a rank
    that is known to have died or ended nobody waits, and the store itself must answer within the timeout. Raises
    CommError that names the ranks which did not answer.
    """
    store, number = _store(group), occurrence(f"agree {topic}", group)
    timeout = max(group_timeout(group), patience or timedelta())
    if counted:
        count(group)
    keys = [f"{topic}/{number}/{rank}" for rank in range(group.size())]
    known = [global_rank(rank, group) for rank in range(group.size())]
    turn = flight.launch("agreement", group.group_name, topic, len(value), "", number)
    with needs_store(f"waited for an answer: {topic}", group):
        store.set(keys[group.rank()], value)
        flight.advance(turn, flight.WAITING)
        if silent := wait_for(store, keys, timeout, in_vain=lambda i: _ended(known[i])):
            raise _unanswered(topic, [known[i] for i in silent], timeout)
        flight.advance(turn, flight.FINISHED)
        return [store.get(key) for key in keys]


def _unanswered(topic: str, silent: list[int], timeout: timedelta) -> CommError:
    ended = [rank for rank in silent if _ended(rank)]  # beside them the others were only slower
    silent, in_time = (ended, "") if ended else (silent, f" within {timeout.total_seconds():g} s")
    said, record = _inquire(f"waited for an answer: {topic}", silent, patience=0.0)
    names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {dist.get_world_size()}"
    return CommError("\n".join(["; ".join([f"{topic}: {names} did not answer{in_time}", *said]), *record]))


def request_stop(step: int, group: Group) -> int:
    """Ask all ranks to stop after a step; returns the step that holds, which is that of whoever asked first.

    Raises CommError if the store is lost.
    """
    with needs_store("asked all ranks to stop", group):
        return int(_store(group).set_first("stop after step", str(step)))


def stop_step(group: Group) -> int | None:
    """After which step some rank asked all to stop, if any did: one question to the store, and not a collective.

    Raises CommError if the store is lost.
    """
    store = _store(group)
    with needs_store("looked whether to stop", group):
        return int(store.get("stop after step")) if store.check(["stop after step"]) else None


def wait_for(
    store: Store | TimedStore,
    keys: Sequence[str],
    timeout: timedelta,
    unless: str = "",
    in_vain: Callable[[int], bool] = lambda index: False,
) -> list[int]:
    """Waits until all keys are set, or `unless` is, or it is `in_vain` to wait for one that is missing; returns the
    indices of those that are not set in time, or of those for which it is in vain to wait."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while (missing := [i for i, key in enumerate(keys) if not store.check([key])]) and time.monotonic() < deadline:
        if unless and store.check([unless]):
            break
        # Whoever is gone by now may have answered before it went; the others may only be slower.
        if gone := [i for i in missing if in_vain(i) and not store.check([keys[i]])]:
            return gone
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return missing
