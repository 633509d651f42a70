"""How long a kernel takes, and a collective: the roofline, and what is lost on the way to it.

A matrix product reaches a machine's attainable rate only if it is large. Two losses are counted. Its tiles of TILE
numbers go to the processors in waves, of which `wave` is empty on average; and a tile takes as long as `ramp` more
steps of its inner dimension, to begin and to end. The slower of computing and moving bytes is what a kernel takes
(the roofline: Williams et al., CACM 52(4), 2009), and `start` besides.
"""

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from cs336_systems.cost.hardware import MAPPED
from cs336_systems.cost.large.operators import Collective, Work
from cs336_systems.cost.large.plan import Overlap, Plan
from cs336_systems.cost.large.systems import System
from cs336_systems.cost.parallel import TRAFFIC

TILE = 128 * 256
RINGS = ("all-gather", "reduce-scatter")


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say: one set for every machine and every run, from published runs (`fit`)."""

    product: float = 0.92  # rate of products, as a share of the attainable one
    ramp: float = 180.0  # steps of the inner dimension
    wave: float = 0.3  # of a wave that is empty
    fused: float = 0.5  # rate of fused attention, as a share of that of products
    memory: float = 0.7  # of the bandwidth of memory
    start: float = 2.6e-6  # seconds a kernel
    host: float = 25e-6  # seconds in which the host gives out a kernel of this model, with the small ones around it
    call: float = 8e-6  # seconds that a collective takes whatever it sends
    inside: float = 0.78  # of a link's bandwidth within a node
    between: float = 0.86  # and between nodes
    hidden: float = 0.16  # of a transfer behind computing: what it takes from the processors


class KernelSeconds(NamedTuple):
    """What a kernel, or several alike, would take for each of its reasons."""

    computing: float
    moving: float
    starting: float
    touching: float  # memory that the system has just given

    @property
    def total(self) -> float:
        """Computing and moving go on together, the rest comes besides."""
        return self.starting + max(self.computing, self.moving) + self.touching


def kernel_seconds(work: Work, system: System, constants: Constants) -> KernelSeconds:
    """The seconds of one kernel, or of several alike, apart."""
    return KernelSeconds(
        work.flops / product_rate(work, system, constants) if work.inner else 0.0,
        work.nbytes / (system.bandwidth * constants.memory),
        work.kernels * constants.start,
        system.touch * new_bytes(work) if system.touch else 0.0,
    )


def work_seconds(work: Work, system: System, constants: Constants) -> float:
    """Seconds of one kernel, or of several alike."""
    return kernel_seconds(work, system, constants).total


def new_bytes(work: Work) -> float:
    """Bytes of a result so large that the C library gives it memory of its own, new each time: half of what an
    element-wise kernel moves."""
    made = work.number * work.rows * work.columns * work.width if work.inner else work.nbytes / work.kernels / 2
    return work.kernels * made if made >= MAPPED else 0.0


def product_rate(work: Work, system: System, constants: Constants) -> float:
    """FLOP/s of a matrix product of its size, if bytes do not hold it up."""
    waves = work.number * work.rows * work.columns / (TILE * system.processors)
    if work.fused:
        return system.rate(work.width) * constants.product * constants.fused * waves / (waves + constants.wave)
    share = waves / (waves + constants.wave) * work.inner / (work.inner + constants.ramp)
    return system.rate(work.width) * constants.product * share


def collective_seconds(each: Collective, plan: Plan, system: System, constants: Constants) -> float:
    """Seconds that computing waits for one collective along an axis of the plan."""
    ranks, local = getattr(plan, each.axis), plan.local(each.axis, node=system.node)
    return waiting_seconds(each, ranks, local, plan.overlap, system, constants)


def waiting_seconds(
    each: Collective, ranks: int, local: int, overlap: Overlap, system: System, constants: Constants
) -> float:
    """The same on so many ranks, `local` to a node.

    Where all overlap, a gather or scatter of sequence parallelism is cut into as many parts as there are ranks, of
    which all but one travel behind a product.
    """
    seconds = group_seconds(each.verb, each.nbytes, ranks, local, system, constants)
    if overlap == "all" and each.axis == "tp" and each.verb in ("all-gather", "reduce-scatter"):
        return seconds * (1 + constants.hidden * (ranks - 1)) / ranks
    return seconds


def group_seconds(
    verb: str, nbytes: float, ranks: int, local: int, system: System, constants: Constants, calls: int = 1
) -> float:
    """Bandwidth-optimal collectives, `calls` in all, on tensors of `nbytes` together over `ranks`, `local` to a node.

    Members in one node send to other nodes side by side, each through a network port of its own: together they have
    `local` times the bandwidth of one, up to that inside. An all-to-all sends to each rank what is for it alone.
    Latency adds up along a ring for gathers and scatters; others take as many steps between nodes as a tree is deep.
    """
    if ranks == 1:
        return 0.0
    inside, between = system.inside.bandwidth * constants.inside, system.between.bandwidth * constants.between
    rounds, nodes = TRAFFIC[verb], ranks // local
    far_steps, near_steps = (nodes - 1, ranks - nodes) if verb in RINGS else (log2(nodes), local - 1)
    steps = near_steps * system.inside.latency + far_steps * system.between.latency
    latency = calls * (constants.call + rounds * steps)
    if verb == "all-to-all":
        near, far = nbytes * (local - 1) / ranks / inside, nbytes * (ranks - local) / ranks / between
        return latency + max(near, far)
    bandwidth = inside if ranks == local else min(inside, local * between)
    return latency + rounds * nbytes * (ranks - 1) / ranks / bandwidth


def message_seconds(nbytes: float, near: bool, system: System, constants: Constants) -> float:
    """One message to a rank of the same node, or of another."""
    link, share = (system.inside, constants.inside) if near else (system.between, constants.between)
    return link.latency + nbytes / (link.bandwidth * share)
