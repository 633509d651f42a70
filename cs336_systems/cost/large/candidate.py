"""What a search over layouts finds: configurations that run or nearly fit, and why one loses against the winner."""

from dataclasses import dataclass
from typing import Any

from cs336_systems.console import format_bytes
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.step_time import StepTime
from cs336_systems.presets import ModelConfig

# What it means that a part of a step is longer.
MEANING = {
    "computing": "products are smaller, or split less",
    "recompute": "more is run again",
    "host": "kernels are too short for the host",
    "tensor-parallel": "more traffic between layers",
    "context-parallel": "keys and values travel",
    "expert-parallel": "tokens travel farther to their experts",
    "pipeline": "more messages between stages",
    "bubble": "stages idle while the pipeline fills and drains",
    "data-parallel": "more traffic of gradients and weights",
    "optimizer": "each rank steps more weights",
}


@dataclass(frozen=True)
class Candidate:
    """A configuration that runs: its time, and the bytes of its fullest rank."""

    step: StepTime
    memory: float
    placement: str
    alike: tuple["Candidate", ...] = ()  # others of the same time and memory

    @property
    def plan(self) -> Plan:
        """How the model is spread."""
        return self.step.plan

    @property
    def rate(self) -> float:
        """Tokens a second, all ranks together."""
        return self.plan.global_batch * self.step.seq / self.step.total

    def value(self, axis: str) -> Any:
        """What it has of one of `AXES`."""
        if axis == "placement":
            return self.placement
        return self.step.config.recompute if axis == "recompute" else getattr(self.plan, axis)


@dataclass(frozen=True)
class Loss:
    """The best configuration with one value of a choice, and why it loses; none where nothing with it fits."""

    axis: str
    value: Any
    best: Candidate | None
    factor: float  # of the winner's time
    part: str  # of the step that grows most, or "memory"
    more: float  # seconds, or bytes that are missing
    net: float = 0.0  # seconds that the step is longer
    gain: str = ""  # the part that shrinks most
    less: float = 0.0  # seconds that it shrinks
    forced: bool = False  # the winner with nothing but this value changed does not fit

    @property
    def why(self) -> str:
        """In words."""
        if self.best is None:
            return f"does not fit: {format_bytes(self.more)} too much at least"
        if self.part == "computing" and (words := _uneven(self.best.step)):
            return words
        return MEANING.get(self.part, "the winner has it")


def _uneven(step: StepTime) -> str:
    """Why the busiest of a pipeline's stages computes longer than the others; empty without a pipeline."""
    if step.plan.pp == 1:
        return ""
    # Where layers do not divide, the last stage is the first to go without.
    if step.stage == step.plan.pp - 1:
        return "stages are uneven: the last has the head as well"
    return "stages are uneven: the busiest computes longer"


@dataclass(frozen=True)
class Miss:
    """The configuration that would need least more memory."""

    config: ModelConfig
    plan: Plan
    memory: float
    lacks: float
