"""How long one microbatch takes a stage of a plan: its blocks, and at the ends embedding or head."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cs336_systems.cost.large.efficiency import Constants, message_seconds, waiting_seconds, work_seconds
from cs336_systems.cost.large.operators import Collective, Rank
from cs336_systems.cost.large.plan import Overlap, Plan
from cs336_systems.cost.large.stage_parts import Group, operators_of, stage_groups
from cs336_systems.cost.large.systems import System
from cs336_systems.presets import ModelConfig


class Seconds(NamedTuple):
    """What one microbatch spends on one rank, forward and backward together except where it says so."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    host: float = 0.0  # the device waits for kernels to be given out
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    messages: float = 0.0

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        """Another so many times besides."""
        return Seconds(*(mine + times * its for mine, its in zip(self, other, strict=True)))


def stage_seconds(
    config: ModelConfig, plan: Plan, seq: int, stage: int, system: System, constants: Constants
) -> Seconds:
    """What one microbatch spends on a rank of a stage, all chunks together."""
    total = Seconds(messages=_messages(config, plan, seq, system, constants))
    rank = Rank(config, plan.alone(), seq)
    places = tuple((axis, getattr(plan, axis), plan.local(axis, node=system.node)) for axis in ("tp", "cp", "ep"))
    for group, times in stage_groups(config, plan, stage):
        recompute = config.recompute if group in ("dense", "sparse") else "none"
        total = total.plus(_computing(rank, group, recompute, system, constants), times)
        total = total.plus(_sending(rank, group, recompute, places, plan.overlap, system, constants), times)
    return total


@lru_cache(maxsize=8192)
def _computing(rank: Rank, group: Group, recompute: str, system: System, constants: Constants) -> Seconds:
    """What some operators compute. Each direction takes as long as the device needs, or the host."""
    operators = operators_of(rank, group)
    again = [each for each in operators if recompute != "none" and (recompute != "attention" or each.core)]
    ways = [
        [work for each in operators for work in each.forward],
        [work for each in operators for work in each.backward],
        [work for each in again for work in each.forward],
    ]
    ahead, back, once_more = (sum(work_seconds(work, system, constants) for work in way) for way in ways)
    given_out = [constants.host * sum(work.kernels for work in way) for way in ways]
    waits = [max(0.0, host - busy) for host, busy in zip(given_out, (ahead, back, once_more), strict=True)]
    return Seconds(ahead, back, once_more, sum(waits))


@lru_cache(maxsize=65536)
def _sending(
    rank: Rank,
    group: Group,
    recompute: str,
    places: tuple[tuple[str, int, int], ...],
    overlap: Overlap,
    system: System,
    constants: Constants,
) -> Seconds:
    """What some operators send along axes of (name, ranks, ranks of a node).

    What is recomputed sends again, except that attention itself has nothing to send.
    """
    spent = {axis: 0.0 for axis, *_ in places}
    groups = {axis: (ranks, local) for axis, ranks, local in places}

    def send(collectives: Iterable[Collective], times: int) -> None:
        for each in collectives:
            spent[each.axis] += times * waiting_seconds(each, *groups[each.axis], overlap, system, constants)

    for each in operators_of(rank, group):
        send(each.sent, 1 if recompute in ("none", "attention") else 2)
        send(each.returned, 1)
    return Seconds(**spent)


def _messages(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants) -> float:
    """A microbatch enters and leaves each chunk of a stage, forward and backward; each tp rank sends its part."""
    if plan.pp == 1:
        return 0.0
    nbytes = plan.width * plan.micro_batch * seq * config.d_model / (plan.cp * plan.tp)
    near = plan.local("pp", node=system.node) == plan.pp
    seen = constants.hidden if plan.overlap == "all" and plan.chunks > 1 else 1.0
    return 2 * plan.chunks * seen * message_seconds(nbytes, near, system, constants)
