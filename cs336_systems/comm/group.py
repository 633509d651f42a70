"""Process groups: ranks, sizes, timeouts, and counters of the collectives that a rank took part in."""

from collections import Counter
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cs336_systems.comm.fake import FAKE, is_fake
from cs336_systems.errors import UserError

Group = dist.ProcessGroup

_counters: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_occurrences: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()


def default_group(group: Group | None = None) -> Group:
    """The given group, or the group of all ranks. Raises UserError if none was started."""
    if group is not None:
        return group
    if not dist.is_initialized():
        raise UserError("no process group: do this inside `with cs336_systems.comm.distributed():`")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def has_tags(group: Group) -> bool:
    """True if messages between two ranks carry tags, so that one may overtake another."""
    return dist.get_backend(group) in ("gloo", FAKE)


def group_timeout(group: Group) -> timedelta:
    """Timeout of the group: how long a rank waits for the others."""
    if is_fake(group):
        return timedelta()  # there are no other ranks
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return group._get_backend(device).options._timeout


def global_rank(rank: int, group: Group) -> int:
    """Number among all ranks of a group's rank; error messages use it."""
    return dist.get_global_rank(group, rank)


def sequence(group: Group) -> int:
    """Number of collectives and agreements that this rank has taken part in."""
    return _counters.get(group, 0)


def count(group: Group) -> int:
    """Count one more collective or agreement; returns its number."""
    _counters[group] = sequence(group) + 1
    return _counters[group]


def occurrence(kind: str, group: Group) -> int:
    """Count one more collective or agreement of a kind; returns its number within the kind."""
    counts = _occurrences.setdefault(group, Counter())
    counts[kind] += 1
    return counts[kind]
