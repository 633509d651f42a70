"""One operator of the model of time looked at alone: its seconds in each direction, and what takes most of them.

The sum over a block's operators is what `stage_time.stage_seconds` says of a microbatch; only what the device waits for
the host is known of a block as a whole, not of an operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cs336_systems.cost.large.efficiency import Constants, collective_seconds, kernel_seconds
from cs336_systems.cost.large.operators import Collective, Operator, Rank, Work
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.stage_parts import Group, operators_of
from cs336_systems.cost.large.step_time import CONSTANTS
from cs336_systems.cost.large.systems import System
from cs336_systems.presets import ModelConfig

GROUPS: dict[Group, str] = {
    "dense": "block",
    "sparse": "block with experts",
    "embedding": "embedding",
    "head": "head and loss",
}


@dataclass(frozen=True)
class Passed:
    """One operator, or several, in one direction on one rank for one microbatch."""

    flops: float = 0.0
    nbytes: float = 0.0
    kernels: int = 0
    compute: float = 0.0  # seconds of kernels that FLOPs hold up
    memory: float = 0.0  # seconds of those that bytes hold up, and of new memory's first write
    launch: float = 0.0  # seconds to start kernels
    network: float = 0.0  # seconds of collectives

    def __add__(self, other: "Passed") -> "Passed":
        return Passed(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def busy(self) -> float:
        """Seconds of the kernels."""
        return self.compute + self.memory + self.launch

    @property
    def seconds(self) -> float:
        """Of kernels and collectives, one after another."""
        return self.busy + self.network

    @property
    def intensity(self) -> float:
        """FLOPs for a byte that is read or written."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    @property
    def bound(self) -> str:
        """What takes most of its time: "compute", "memory", "launch" or "network"; "" where it takes none."""
        names = ("compute", "memory", "launch", "network")
        return max(names, key=lambda name: float(getattr(self, name))) if self.seconds else ""

    def waits(self, host: float) -> float:
        """Seconds that the device waits if the host gives out a kernel every `host` seconds."""
        return max(0.0, host * self.kernels - self.busy)

    def record(self) -> dict[str, Any]:
        """For a program."""
        return {
            "flops": self.flops,
            "bytes": self.nbytes,
            "intensity": self.intensity,
            "seconds": self.seconds,
            "compute_seconds": self.compute,
            "memory_seconds": self.memory,
            "launch_seconds": self.launch,
            "network_seconds": self.network,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class Timed:
    """An operator with its two directions timed."""

    operator: Operator
    forward: Passed
    backward: Passed

    def record(self) -> dict[str, Any]:
        """For a program; bytes that are sent are those of the whole tensor."""
        one = self.operator
        return {
            "operator": one.name,
            "kept_bytes": one.kept,
            "weights": one.weights,
            "forward": {**self.forward.record(), "sent": [each._asdict() for each in one.sent]},
            "backward": {**self.backward.record(), "sent": [each._asdict() for each in one.returned]},
        }


def passed(
    works: Iterable[Work],
    collectives: Iterable[Collective],
    plan: Plan,
    system: System,
    constants: Constants = CONSTANTS,
) -> Passed:
    """What some kernels and collectives take, by what holds each of them up."""
    total = Passed(network=sum(collective_seconds(each, plan, system, constants) for each in collectives))
    for work in works:
        took = kernel_seconds(work, system, constants)
        compute, memory = (took.computing, 0.0) if took.computing > took.moving else (0.0, took.moving)
        memory += took.touching
        total += Passed(work.flops, work.nbytes, work.kernels, compute, memory, took.starting)
    return total


def timed_group(
    config: ModelConfig, plan: Plan, seq: int, group: Group, system: System, constants: Constants = CONSTANTS
) -> list[Timed]:
    """The operators of a block or an end on one rank, for one microbatch, in order."""
    return [
        Timed(
            each,
            passed(each.forward, each.sent, plan, system, constants),
            passed(each.backward, each.returned, plan, system, constants),
        )
        for each in operators_of(Rank(config, plan.alone(), seq), group)
    ]


def run_again(
    config: ModelConfig, operators: Iterable[Operator], plan: Plan, system: System, constants: Constants = CONSTANTS
) -> Passed:
    """What backward runs again of a block: nothing, attention's core, or all, which then sends again as well."""
    core = config.recompute == "attention"
    again = [each for each in operators if config.recompute != "none" and (each.core or not core)]
    works = [work for each in again for work in each.forward]
    sent = [one for each in again for one in each.sent if not core]
    return passed(works, sent, plan, system, constants)


def model_groups(config: ModelConfig) -> list[tuple[Group, int]]:
    """The kinds of operators that a whole model has, and how often."""
    sparse = config.expert_layers
    found: list[tuple[Group, int]] = [("dense", config.num_layers - sparse), ("sparse", sparse)]
    return [*((group, times) for group, times in found if times), ("embedding", 1), ("head", 1)]
