"""Offset of each rank's clock from the first rank's, measured by ping-pong."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from cs336_systems.comm.group import Group, group_timeout

ROUNDS = 1000  # at most
PATIENCE = 100  # rounds that may pass without making the interval a tenth smaller
GOOD = 80_000  # nanoseconds of an interval that is small enough to stop
NEVER = 2**62


class Offset(NamedTuple):
    """This rank's clock is `nanoseconds` ahead of rank 0's, plus or minus `bound`."""

    nanoseconds: int
    bound: int


def clock_offset(group: Group, now: Callable[[], int] = time.time_ns) -> Offset:
    """Offset of this rank's clock from that of the group's first rank, which has (0, 0). Every rank must call this.

    Rank 0 answers each question with its time, which lies between the question's departure and the answer's arrival.
    So each round bounds the offset by an interval as wide as the round trip (Cristian, Probabilistic clock
    synchronization, 1989, section 3), and the offset lies in the intersection of all intervals.
    """
    if group.size() > 1 and dist.get_backend(group) != "gloo":  # which sends tensors of a CPU
        ranks, timeout = dist.get_process_group_ranks(group), group_timeout(group)
        messages = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        try:
            return clock_offset(messages, now)
        finally:
            dist.destroy_process_group(messages)
    question, reply = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def rounds() -> Iterator[tuple[int, int, int]]:
        for _ in range(ROUNDS):
            start = now()
            dist.send(question, group=group, group_dst=0)
            dist.recv(reply, group=group, group_src=0)
            end = now()
            yield start, int(reply.item()), end

    best = Offset(0, 0)
    for other in range(1, group.size()):
        if group.rank() == other:
            best = narrow(rounds())
            dist.send(question.zero_(), group=group, group_dst=0)
        while group.rank() == 0:
            dist.recv(question, group=group, group_src=other)
            if not question.item():
                break
            dist.send(reply.fill_(now()), group=group, group_dst=other)
    return best


def narrow(rounds: Iterable[tuple[int, int, int]]) -> Offset:
    """Middle and half the width of the intersection, from rounds (sent, the other's time, answered) in nanoseconds.

    Stops when it is small enough or no longer shrinks. If a clock is set during the measurement, the intervals
    contradict each other, and the measurement starts again.
    """
    low, high, mark, idle = -NEVER, NEVER, 2 * NEVER, 0
    for sent, theirs, answered in rounds:
        low, high, idle = max(low, sent - theirs), min(high, answered - theirs), idle + 1
        if low > high:
            low, high, mark = sent - theirs, answered - theirs, 2 * NEVER
        if high - low < 0.9 * mark:
            mark, idle = high - low, 0
        if high - low < GOOD or idle >= PATIENCE:
            break
    return Offset((low + high) // 2, (high - low + 1) // 2)
