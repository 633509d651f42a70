"""The analytic model: what a configuration needs, in parameters, FLOPs, bytes and seconds, before it is run.

The files of this folder count what this project's own code does, exactly. `large/` predicts runs on machines that few
have, `search` the best of their plans; `notebook/` is the roofline notebook that the project comes from, `course/` the
accounting questions of a course, `fitting/` where constants come from. Pure Python, except `probe`, which measures this
machine, and `fitting.calibration`, which solves equations; both are imported by name where they are wanted.
"""

from cs336_systems.cost.flops import backward_flops, forward_flops, least_forward_flops, recompute_flops
from cs336_systems.cost.hardware import Hardware
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.search import Search, search
from cs336_systems.cost.large.step_time import StepTime, step_time
from cs336_systems.cost.large.systems import System, system_preset
from cs336_systems.cost.layout import Layout, rank_parameters
from cs336_systems.cost.layout_memory import layout_memory, rank_memory
from cs336_systems.cost.layout_step import predict_step, sample_flops
from cs336_systems.cost.layout_traffic import step_traffic
from cs336_systems.cost.memory import MODES, PRECISIONS, Mode, Precision, saved_activations
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.peak import memory
from cs336_systems.cost.step import predict

__all__ = [
    "MODES",
    "PRECISIONS",
    "Hardware",
    "Layout",
    "Mode",
    "Plan",
    "Precision",
    "Search",
    "StepTime",
    "System",
    "backward_flops",
    "count_parameters",
    "forward_flops",
    "layout_memory",
    "least_forward_flops",
    "memory",
    "predict",
    "predict_step",
    "rank_memory",
    "rank_parameters",
    "recompute_flops",
    "sample_flops",
    "saved_activations",
    "search",
    "step_time",
    "step_traffic",
    "system_preset",
]
