"""The analytic model: parameters, FLOPs, bytes and seconds of a configuration, predicted before it is run.

`step` predicts this project's own runs from counts of their operators (`observed`), `step_time` and `plan_memory` large
runs on any machine, and `search` finds the best plan. Only `observed` and `probe`, which measures, need torch.
"""

from cs336_systems.cost.capacity import memory
from cs336_systems.cost.closed_forms import MODES, Hardware, Mode, predict
from cs336_systems.cost.domain import time_range
from cs336_systems.cost.flops import (
    backward_flops,
    count_parameters,
    forward_flops,
    least_forward_flops,
    recompute_flops,
)
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.search import search
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import step_time

__all__ = [
    "MODES", "STACKS", "Hardware", "Mode", "Plan", "backward_flops", "count_parameters", "forward_flops",
    "least_forward_flops", "memory", "predict", "recompute_flops", "search", "step_time", "system_preset", "time_range",
]  # fmt: skip
