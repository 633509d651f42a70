"""Agreement through the store, without a collective: ranks that differ in everything else still answer each other."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cs336_systems.comm.diagnostics import CommError, comm_error, has_ended, inquire, needs_store, timed_store
from cs336_systems.comm.fake import is_fake
from cs336_systems.comm.flight_recorder import FINISHED, WAITING, recorder
from cs336_systems.comm.group import Group, count, default_group, global_rank, group_timeout, occurrence
from cs336_systems.comm.store import TimedStore, first_line, wait_until


def subgroup(ranks: Sequence[int]) -> Group | None:
    """Group of some ranks, with the timeout of the group of all; None on a rank outside. Every rank must call this.

    torch's default timeout would be ten or thirty minutes, whatever start-up was told.
    """
    if len(ranks) == 1 and dist.get_rank() not in ranks:
        return None  # a group of one needs no other rank
    try:
        group = dist.new_group(
            list(ranks), timeout=group_timeout(default_group()), use_local_synchronization=len(ranks) == 1
        )
    except RuntimeError as error:  # a rank ended while they were connecting
        doing = f"was joining a group of ranks {', '.join(map(str, ranks))}"
        raise comm_error(doing, default_group(), f" ({first_line(error)})") from error
    return group if dist.get_rank() in ranks else None


def agree(topic: str, value: str, group: Group, counted: bool = True, patience: timedelta | None = None) -> list[str]:
    """Every rank's value (any text) on a topic, in the order of ranks. Every rank of the group must call this.

    A thread beside the main one passes `counted=False` and has topics of its own: the numbers of the main thread's
    collectives must not depend on its timing. `patience` extends the group's timeout where ranks may take differently
    long, as disks do; the store itself must answer within the timeout. Ranks known to have ended are not waited for.
    Raises CommError that names the ranks which did not answer.
    """
    if is_fake(group):
        return [value] * group.size()
    store, number = timed_store(group), occurrence(f"agree {topic}", group)
    timeout = max(group_timeout(group), patience or timedelta())
    if counted:
        count(group)
    keys = [f"{topic}/{number}/{rank}" for rank in range(group.size())]
    known = [global_rank(rank, group) for rank in range(group.size())]
    entry = recorder.mine.launch("agreement", group.group_name, topic, len(value), "", number)
    with needs_store(f"waited for an answer: {topic}", group):
        store.set(keys[group.rank()], value)
        recorder.mine.advance(entry, WAITING)
        if silent := wait_for(store, keys, timeout, in_vain=lambda i: has_ended(known[i])):
            ended = [known[i] for i in silent if has_ended(known[i])]  # the others may only be slower
            late = "" if ended else f" within {timeout.total_seconds():g} s"
            named = ended or [known[i] for i in silent]
            said, history = inquire(f"waited for an answer: {topic}", named, 0.0)
            first = f"{topic}: {ranks_text(named)} of {dist.get_world_size()} did not answer{late}"
            raise CommError("\n".join(["; ".join([first, *said]), *history]))
        recorder.mine.advance(entry, FINISHED)
        return [store.get(key) for key in keys]


def request_stop(step: int, group: Group) -> int:
    """Ask all ranks to stop after a step; returns the step that the first request named, which is the one that holds.

    Raises CommError if the store is lost.
    """
    with needs_store("asked all ranks to stop", group):
        return int(timed_store(group).set_first("stop after step", str(step)))


def stop_step(group: Group) -> int | None:
    """Step after which all ranks stop, or None if no rank has asked for that. One question to the store.

    Raises CommError if the store is lost.
    """
    store = timed_store(group)
    with needs_store("looked whether to stop", group):
        return int(store.get("stop after step")) if store.check(["stop after step"]) else None


def wait_for(
    store: Store | TimedStore,
    keys: Sequence[str],
    timeout: timedelta,
    unless: str = "",
    in_vain: Callable[[int], bool] = lambda index: False,
) -> list[int]:
    """Wait until all keys are set, until the key `unless` is, or until waiting for a missing key is `in_vain`.

    Returns the indices of the keys that are missing at the timeout, or of those for which waiting is in vain.
    """
    missing: list[int] = []

    def answered() -> bool:
        missing[:] = [i for i, key in enumerate(keys) if not store.check([key])]
        if not missing or (unless and store.check([unless])):
            return True
        # A rank that has ended may have answered before; the others may only be slower.
        gone = [i for i in missing if in_vain(i) and not store.check([keys[i]])]
        missing[:] = gone or missing
        return bool(gone)

    wait_until(answered, timeout.total_seconds())
    return missing


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 3, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
