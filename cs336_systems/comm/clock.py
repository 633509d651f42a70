"""Offset of each rank's clock from the first rank's, measured by ping-pong."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from cs336_systems.comm.group import Group, group_timeout

ROUNDS = 200  # of each rank with the first: some 20 milliseconds


class Offset(NamedTuple):
    """This rank's clock is `nanoseconds` ahead of the first rank's, plus or minus `bound`."""

    nanoseconds: int
    bound: int


def clock_offset(group: Group, now: Callable[[], int] = time.time_ns) -> Offset:
    """Offset of this rank's clock from that of the group's first rank, which has (0, 0). Every rank must call this.

    The first rank answers each question with its time, which lies between the question's departure and the answer's
    arrival. So each round bounds the offset by an interval as wide as the round trip (Cristian, Probabilistic clock
    synchronization, 1989, section 3), and the offset lies in the intersection of all intervals.
    """
    if group.size() > 1 and dist.get_backend(group) != "gloo":  # which sends tensors of a CPU
        ranks, timeout = dist.get_process_group_ranks(group), group_timeout(group)
        messages = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        try:
            return clock_offset(messages, now)
        finally:
            dist.destroy_process_group(messages)
    message, rounds = torch.zeros(1, dtype=torch.int64), list[tuple[int, int, int]]()
    for other in range(1, group.size()):
        for _ in range(ROUNDS):
            if group.rank() == 0:
                dist.recv(message, group=group, group_src=other)
                dist.send(message.fill_(now()), group=group, group_dst=other)
            elif group.rank() == other:
                sent = now()
                dist.send(message, group=group, group_dst=0)
                dist.recv(message, group=group, group_src=0)
                answered = now()
                rounds.append((sent, int(message.item()), answered))
    return narrow(rounds) if rounds else Offset(0, 0)


def narrow(rounds: Sequence[tuple[int, int, int]]) -> Offset:
    """Middle and half the width of the intersection, from rounds (sent, the other's time, answered) in nanoseconds. If
    a clock is set during the measurement, the intervals contradict each other, and the measurement starts again."""
    low, high = rounds[0][0] - rounds[0][1], rounds[0][2] - rounds[0][1]
    for sent, theirs, answered in rounds:
        low, high = max(low, sent - theirs), min(high, answered - theirs)
        if low > high:
            low, high = sent - theirs, answered - theirs
    return Offset((low + high) // 2, (high - low + 1) // 2)
