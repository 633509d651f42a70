"""Time of a kernel, of a collective, and of one operator: the roofline, and the losses of small GEMMs.

A kernel takes the longer of computing and moving bytes (the roofline: Williams et al., CACM 52(4), 2009), plus `start`.
Only large GEMMs reach a machine's attainable rate, because of two losses. Processors compute a GEMM's tiles of TILE
numbers in waves, and on average a share `wave` of one wave is empty. Each tile also takes `ramp` steps more than its
inner dimension has, to begin and to end.

The time that the device waits for the host to launch kernels is that of a whole block, not of an operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from cs336_systems.cost.machines import System
from cs336_systems.cost.operators import operators_of, repeated
from cs336_systems.cost.plan import Overlap, Plan
from cs336_systems.cost.rank import Collective, Group, Kernel, Operator, Rank
from cs336_systems.layout import MAPPED
from cs336_systems.presets import ModelConfig
from cs336_systems.traffic import TRAFFIC

TILE = 128 * 256
BOUNDS = ("compute", "memory", "launch", "network")  # what the time of an operator is spent on
RINGS = ("all-gather", "reduce-scatter")
GROUPS: dict[Group, str] = {
    "dense": "block",
    "sparse": "block with experts",
    "embedding": "embedding",
    "head": "head and loss",
}


def new_bytes(kernel: Kernel) -> float:
    """Bytes of results that are so large that the C library maps new memory for each."""
    elementwise = kernel.nbytes / kernel.kernels / 2  # half of what it moves
    made = kernel.number * kernel.rows * kernel.columns * kernel.width if kernel.inner else elementwise
    return kernel.kernels * made if made >= MAPPED else 0.0


def product_rate(kernel: Kernel, system: System) -> float:
    """FLOP/s of a GEMM of this size if memory does not limit it."""
    constants, waves = system.constants, kernel.number * kernel.rows * kernel.columns / (TILE * system.processors)
    if kernel.fused:
        return system.rate(kernel.width) * constants.product * constants.fused * waves / (waves + constants.wave)
    share = waves / (waves + constants.wave) * kernel.inner / (kernel.inner + constants.ramp)
    return system.rate(kernel.width) * constants.product * share


def collective_seconds(each: Collective, plan: Plan, system: System) -> float:
    """Seconds that computing waits for one collective along an axis of the plan."""
    ranks, local = getattr(plan, each.axis), plan.local(each.axis, node=system.node)
    return waiting_seconds(each, ranks, local, plan.overlap, system)


def waiting_seconds(each: Collective, ranks: int, local: int, overlap: Overlap, system: System) -> float:
    """Seconds that computing waits for one collective over `ranks`, `local` of them in a node. With overlap "all" a
    gather or scatter of sequence parallelism is cut into a part per rank, and GEMMs hide all but one."""
    seconds = group_seconds(each.verb, each.nbytes, ranks, local, system)
    if overlap == "all" and each.axis == "tp" and each.verb in RINGS:
        return seconds * (1 + system.constants.hidden * (ranks - 1)) / ranks
    return seconds


def group_seconds(verb: str, nbytes: float, ranks: int, local: int, system: System, calls: int = 1) -> float:
    """Seconds of `calls` bandwidth-optimal collectives on `nbytes` in all, over `ranks`, `local` of them in a node.

    Ranks of a node send to other nodes at once, each through a network port of its own: together at `local` times one
    port's bandwidth, at most at that inside a node. An all-to-all sends each rank only its own part. Gathers and
    scatters have the latency of every step of a ring, other collectives that of log2(nodes) steps between nodes.
    """
    if ranks == 1:
        return 0.0
    (inside, between), rounds, nodes = system.link_rates, TRAFFIC[verb], ranks // local
    far_steps, near_steps = (nodes - 1, ranks - nodes) if verb in RINGS else (log2(nodes), local - 1)
    steps = near_steps * system.inside.latency + far_steps * system.between.latency
    latency = calls * (system.constants.call + rounds * steps)
    if verb == "all-to-all":
        near, far = nbytes * (local - 1) / ranks / inside, nbytes * (ranks - local) / ranks / between
        return latency + max(near, far)
    bandwidth = inside if ranks == local else min(inside, local * between)
    return latency + rounds * nbytes * (ranks - 1) / ranks / bandwidth


def message_seconds(nbytes: float, near: bool, system: System) -> float:
    """Seconds of one message to a rank of the same node (`near`) or of another."""
    inside, between = system.link_rates
    return (system.inside if near else system.between).latency + nbytes / (inside if near else between)


@dataclass(frozen=True)
class Timing:
    """Time of one operator, or several, in one direction on one rank for one microbatch, by what bounds it."""

    flops: float = 0.0
    nbytes: float = 0.0
    kernels: int = 0
    compute: float = 0.0  # seconds of kernels that FLOPs bound
    memory: float = 0.0  # seconds of kernels that bytes bound, and of new memory's first write
    launch: float = 0.0  # seconds to start kernels
    network: float = 0.0  # seconds of collectives

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def busy(self) -> float:
        """Seconds of the kernels."""
        return self.compute + self.memory + self.launch

    @property
    def seconds(self) -> float:
        return self.busy + self.network

    @property
    def intensity(self) -> float:
        return self.flops / self.nbytes if self.nbytes else 0.0

    @property
    def bound(self) -> str:
        """The largest part of the time: "compute", "memory", "launch" or "network"; "" where there is no time."""
        return max(BOUNDS, key=lambda name: float(getattr(self, name))) if self.seconds else ""

    def waits(self, host: float) -> float:
        """Seconds that the device waits if the host launches a kernel every `host` seconds."""
        return max(0.0, host * self.kernels - self.busy)


class TimedOperator(NamedTuple):
    """An operator and the time of its two directions."""

    operator: Operator
    forward: Timing
    backward: Timing


def timing(kernels: Iterable[Kernel], collectives: Iterable[Collective], plan: Plan, system: System) -> Timing:
    """Time of some kernels and collectives, by what bounds each of them."""
    network = Timing(network=sum(collective_seconds(each, plan, system) for each in collectives))
    return sum((kernel_time(each, system) for each in kernels), network)


def kernel_time(kernel: Kernel, system: System) -> Timing:
    """Time of one kernel, or of several alike: the roofline, plus their starts and the first write to new memory."""
    computing = kernel.flops / product_rate(kernel, system) if kernel.inner else 0.0
    moving = kernel.nbytes / system.memory_rate
    touching = system.touch * new_bytes(kernel) if system.touch else 0.0
    compute, memory = (computing, 0.0) if computing > moving else (0.0, moving)
    start = kernel.kernels * system.constants.start
    return Timing(kernel.flops, kernel.nbytes, kernel.kernels, compute, memory + touching, start)


@dataclass(frozen=True)
class TimedPart:
    """A kind of block, or an end of the model, on one rank for one microbatch: how often it occurs, its operators in
    order, and their sums. Recomputation repeats the collectives `sent_again`."""

    group: Group
    times: float
    operators: list[TimedOperator]
    forward: Timing
    backward: Timing
    recompute: Timing
    sent_again: tuple[Collective, ...] = ()
    recomputed: bool = True  # False: blocks that recompute nothing, where other blocks do

    @property
    def name(self) -> str:
        return GROUPS[self.group] + ("" if self.recomputed else ", not recomputed")


def timed_part(config: ModelConfig, plan: Plan, seq: int, group: Group, system: System, times: float = 1) -> TimedPart:
    """Time the operators of a block, the embedding or the head on one rank, for one microbatch."""
    rank = Rank(config, plan.alone(), seq)
    found = [
        TimedOperator(
            each, timing(each.forward, each.sent, plan, system), timing(each.backward, each.returned, plan, system)
        )
        for each in operators_of(rank, group)
    ]
    forward, backward = (sum((getattr(each, way) for each in found), Timing()) for way in ("forward", "backward"))
    again = repeated(rank, group, config.recompute)
    kernels = [kernel for each in again.operators for kernel in each.forward]
    return TimedPart(
        group, times, found, forward, backward, timing(kernels, again.sent, plan, system), again.sent,
        plan.recompute_nth == 1 or config.recompute != "none" or group in ("embedding", "head"),
    )  # fmt: skip
