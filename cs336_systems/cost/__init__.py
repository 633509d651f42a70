"""The analytic model: what a configuration needs, in parameters, FLOPs, bytes and seconds, before it is run.

`step` predicts this project's own runs from what was counted of them (`observed`); `step_time` and `plan_memory` runs
on machines that few have, `search` the best of their plans. `notebook/` is the roofline notebook that the project
comes from, `course/` the accounting questions of a course, `fitting/` where constants come from. All do without torch,
except `observed` and the probes, which measure this machine.
"""

from cs336_systems.cost.capacity import memory
from cs336_systems.cost.flops import backward_flops, forward_flops, least_forward_flops, recompute_flops
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.step import MODES, Hardware, Mode, predict

__all__ = [
    "MODES", "Hardware", "Mode", "backward_flops", "count_parameters", "forward_flops", "least_forward_flops", "memory",
    "predict", "recompute_flops",
]  # fmt: skip
