"""Groups of ranks, and how ranks agree or say what went wrong through the store, without a collective."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cs336_systems.errors import UserError

Group = dist.ProcessGroup

EXPLAIN_SECONDS = 2.0  # how long a failed rank waits to hear what the others were doing

_counters: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_occurrences: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()


class CommError(RuntimeError):
    """A collective failed; the message says what every rank was doing."""


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
    group = dist.new_group(
        list(ranks), timeout=group_timeout(default_group()), use_local_synchronization=len(ranks) == 1
    )
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


def last_words(group: Group) -> str:
    """What every other rank says that it was doing when it failed or ended; waits a little for those that are late."""
    others = [global_rank(rank, group) for rank in range(group.size()) if rank != group.rank()]
    wait_for(_words(), [f"last word/{rank}" for rank in others], timedelta(seconds=EXPLAIN_SECONDS))
    return "; ".join(f"rank {r} {_posted(r) or 'said nothing: it died, or still computes'}" for r in others)


def occurrence(kind: str, group: Group) -> int:
    """Count one more collective or agreement of a kind, and return its number."""
    counts = _occurrences.setdefault(group, Counter())
    counts[kind] += 1
    return counts[kind]


def _words() -> Store:
    """One store for the last words of all ranks: what stops a rank may have happened in another of its groups."""
    return default_group().get_group_store()


def post(message: str) -> None:
    """Leave a last word, which a rank whose collective fails will look for to name the cause."""
    _words().set(f"last word/{dist.get_rank()}", message)


def _posted(rank: int) -> str:
    return _words().get(f"last word/{rank}").decode() if _words().check([f"last word/{rank}"]) else ""


def fault(message: str) -> UserError:
    """An error to raise, that the other ranks will name when they miss this one."""
    post(f"failed: {message}")
    return UserError(message)


def agree(topic: str, value: str, group: Group) -> list[str]:
    """Every rank's value, through the store: ranks that differ in everything else still get an answer.

    Raises CommError that names the ranks which did not answer within the group's timeout.
    """
    store, timeout, number = group.get_group_store(), group_timeout(group), occurrence(f"agree {topic}", group)
    count(group)
    keys = [f"{topic}/{number}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], value)
    if silent := wait_for(store, keys, timeout):
        post(f"waited for an answer: {topic}")
        silent = [global_rank(rank, group) for rank in silent]
        words = [f"rank {rank} {_posted(rank)}" for rank in silent if _posted(rank)]
        raise CommError(
            f"{topic}: rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {dist.get_world_size()} did not "
            f"answer within {timeout.total_seconds():g} s" + "".join(f"; {word}" for word in words)
        )
    return [store.get(key).decode() for key in keys]


def wait_for(store: Store, keys: Sequence[str], timeout: timedelta, unless: str = "") -> list[int]:
    """Waits until all keys are set, or `unless` is; returns the indices of those that are not in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while (missing := [i for i, key in enumerate(keys) if not store.check([key])]) and time.monotonic() < deadline:
        if unless and store.check([unless]):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return missing
