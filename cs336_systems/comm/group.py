"""Process groups: ranks, sizes, timeouts, counters of the collectives that a rank took part in, and fake groups.

The collectives of torch's fake process group return at once and move nothing. With it one process runs the library as
one rank of any number, also on the meta device, and `record()` lists what that rank would send: traffic is predicted by
the code itself. Results of collectives are undefined. Where a result would depend on other ranks' values, as in an
agreement, all ranks are assumed to have this rank's value.
"""

import atexit
import copyreg
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch._C._distributed_c10d import HashStore

from cs336_systems.errors import UserError

Group = dist.ProcessGroup
FAKE = "fake"
ALL = "collectives and agreements"  # the kind under which all of them are counted
HISTORY = "hash of the collectives that are matched by their order"

_counters: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()
in_flight: dict[Any, None] = {}  # this rank's Works that nobody has waited for yet, oldest first

# A deep copy of a module shares its groups: `copy` keeps an object whose reducer returns a name, pickle refuses.
copyreg.pickle(Group, lambda group: group.group_name)


def default_group(group: Group | None = None) -> Group:
    """Return the given group, or the group of all ranks. Raises UserError if none was started, or for a group that this
    rank is not in."""
    if group is not None:
        if not hasattr(group, "rank"):  # what torch.distributed.new_group() returns to ranks that it was not given
            raise UserError(f"{group} is not a process group that this rank is in: give one, on its ranks alone")
        return group
    if not dist.is_initialized():
        raise UserError("no process group: do this inside `with cs336_systems.comm.distributed():`")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@atexit.register
def _leave_at_exit() -> None:
    """Leave the group if the process ends without doing so. First wait for its collectives, and keep their tensors
    until the interpreter ends: if a thread of gloo were the last to hold one, it would abort the process."""
    for work in in_flight:
        for each in work.pending:
            with suppress(RuntimeError):
                each.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_fake(group: Group) -> bool:
    """True if the group's other ranks do not exist."""
    return dist.get_backend(group) == FAKE


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
    """Convert a group's rank to its number among all ranks, which error messages use."""
    return dist.get_global_rank(group, rank)


def counters(group: Group) -> Counter[str]:
    """Number of collectives and agreements that this rank took part in, of each kind and of ALL, and their HISTORY."""
    return _counters.get(group) or _counters.setdefault(group, Counter())


def count(group: Group, kind: str = ALL) -> int:
    """Count one more collective or agreement of a kind; returns its number within the kind."""
    counts = counters(group)
    counts[kind] += 1
    return counts[kind]


def add_to_history(group: Group, kind: str) -> int:
    """Add a collective that ranks match by order, not by tag, to the group's history; returns the hash of all so far.
    It is never 0, which stands for a collective with a tag."""
    counts = counters(group)
    counts[HISTORY] = zlib.crc32(kind.encode(errors="replace"), counts[HISTORY]) or 1
    return counts[HISTORY]


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[Group]:
    """Imitate rank `rank` of `world_size` inside the block, without other processes; yields the group of all ranks."""
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} does not exist among {world_size} ranks")
    if dist.is_initialized():
        raise UserError("a process group of real ranks is running: imitate ranks before it starts, or after its end")
    hook = sys.excepthook  # torch replaces it by one that adds the rank to every error
    dist.init_process_group(FAKE, store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield default_group()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
