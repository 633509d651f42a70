"""The analytic model: what a configuration needs, in parameters, FLOPs, bytes and seconds, before it is run.

Pure Python, except `probe`, which measures this machine and is imported by name where it is wanted.
"""

from cs336_systems.cost.flops import backward_flops, forward_flops, least_forward_flops, recompute_flops
from cs336_systems.cost.hardware import Hardware
from cs336_systems.cost.memory import MODES, PRECISIONS, Mode, Precision, memory, saved_activations
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.step import predict

__all__ = [
    "MODES",
    "PRECISIONS",
    "Hardware",
    "Mode",
    "Precision",
    "backward_flops",
    "count_parameters",
    "forward_flops",
    "least_forward_flops",
    "memory",
    "predict",
    "recompute_flops",
    "saved_activations",
]
