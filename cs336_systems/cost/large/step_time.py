"""How long a step of a plan takes on a machine, by what the time is spent on.

The slowest stage works through all microbatches; filling and draining the pipeline takes as long as one microbatch in
all other stages, divided by the chunks of a stage (Narayanan et al., arXiv:2104.04473, section 2.2), as
`schedule.simulate` plays it. Then gradients are summed, as far as backward has not hidden that, and AdamW steps.
"""

from dataclasses import dataclass

from cs336_systems.cost.flops import model_flops
from cs336_systems.cost.large.data_parallel_time import data_parallel_seconds, optimizer_seconds
from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.stage_parts import stage_kinds
from cs336_systems.cost.large.stage_time import stage_seconds
from cs336_systems.cost.large.systems import System
from cs336_systems.presets import ModelConfig

CONSTANTS = Constants()


@dataclass(frozen=True)
class StepTime:
    """A prediction: seconds of one step by what they are spent on, of the stage that has most to do."""

    config: ModelConfig
    plan: Plan
    seq: int
    system: System
    stage: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def model_flops(self) -> float:
        """FLOPs that the model asks for, all ranks together; attention is counted in full, as PaLM counts it."""
        rows = self.plan.micro_batch
        return model_flops(self.config, rows, self.seq) * (self.plan.global_batch // rows)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the machines' peak (arXiv:2204.02311, appendix B)."""
        peak = self.system.matmul_flops if self.plan.width == 2 else self.system.wide_flops
        return self.model_flops / (self.total * self.plan.ranks * peak)


def step_time(config: ModelConfig, plan: Plan, seq: int, system: System, constants: Constants = CONSTANTS) -> StepTime:
    """The time of one step. Raises UserError for a plan that does not divide the model."""
    plan.check(config, seq)
    kinds = stage_kinds(config, plan)
    spent = {stage: stage_seconds(config, plan, seq, stage, system, constants) for stage in kinds}
    busiest = max(kinds, key=lambda stage: sum(spent[stage]))
    own, m = spent[busiest], plan.microbatches
    others = sum(count * sum(spent[stage]) for stage, count in kinds.items()) - sum(own)
    parts = {
        "forward": m * own.forward,
        "backward": m * own.backward,
        "recompute": m * own.recompute,
        "host": m * own.host,
        "tensor-parallel": m * own.tp,
        "context-parallel": m * own.cp,
        "expert-parallel": m * own.ep,
        "pipeline": m * own.messages,
        "bubble": others / plan.chunks,
        "data-parallel": data_parallel_seconds(config, plan, seq, busiest, own, system, constants),
        "optimizer": optimizer_seconds(config, plan, seq, busiest, system, constants),
    }
    return StepTime(config, plan, seq, system, busiest, parts)
