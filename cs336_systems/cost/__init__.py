"""The analytic model: what a configuration needs, in parameters, FLOPs, bytes and seconds, before it is run.

Pure Python, except `probe`, which measures this machine and is imported by name where it is wanted.
"""

from cs336_systems.cost.flops import backward_flops, forward_flops, least_forward_flops, recompute_flops
from cs336_systems.cost.hardware import Hardware
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
    "Precision",
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
    "step_traffic",
]
