"""The 2025 edition's XXL model: its memory, how far it must be sharded, and the batch that hides communication."""

# The letters are those of the formulas.
# ruff: noqa: N803, N806

from math import ceil, sqrt

from cs336_systems.cost.course.answers import require
from cs336_systems.cost.machines import GIB, system_preset
from cs336_systems.cost.template import Value

_BF16, _FP32 = 2, 4
_STATE = 4 * _FP32  # weight, accumulated gradient and two moments of a parameter
_H100 = system_preset("H100").memory / GIB * 1e9  # a GB as the course has it


def _parameters(D: int, F: int, L: int) -> float:
    return float(2 * L * D * F)


def _saved(D: int, F: int, L: int) -> float:
    """Bytes a token keeps for backward: the inputs of both products of each block."""
    return float(_BF16 * L * (D + F))


def _least(bound: float) -> int:
    """The smallest whole number above a bound."""
    return int(bound) + 1


def xxl_memory(D: int = 16_384, F: int = 53_248, L: int = 126, H: float = _H100, T: int = 8192) -> dict[str, Value]:
    """Part (a): bytes of state and of activations, and how many devices of H bytes they fill; T tokens."""
    P, a = _parameters(D, F, L), _saved(D, F, L)
    return {
        "parameters": P,
        "copy": _FP32 * P,
        "state": _STATE * P,
        "gpus": ceil(_STATE * P / H),
        "saved_per_token": a,
        "saved": a * T,
        "gpus_with_batch": ceil((_STATE * P + a * T) / H),
        "tokens_per_gpu": H / a,
        "gpus_binary": ceil(_STATE * P / (H / 1e9 * 2**30)),
    }


def xxl_fsdp(D: int = 16_384, F: int = 53_248, L: int = 126, M: float = 95e9, T: int = 1024) -> dict[str, Value]:
    """Part (b): devices over which state and half of the activations are sharded, so that each needs less than M."""
    a, state = _saved(D, F, L), _STATE * _parameters(D, F, L)
    half = a * T / 2
    return {
        "state": state,
        "state_over_memory": state / M,
        "devices_state": _least(state / M),
        "half": half,
        "devices_half": _least((state + half) / M),
        "whole_half_fits": half < M,
        "devices_other_half_whole": _least((state + half) / (M - half)) if half < M else None,
        "tokens_most": 2 * M / a,
    }


def xxl_batch(
    X: int = 16,
    Y: int = 4,
    W: float = 18e10,
    C: float = 4.6e14,
    Mx: int = 2,
    My: int = 1,
    D: int = 16_384,
    F: int = 53_248,
) -> dict[str, Value]:
    """Part (c) and (d): the fewest tokens a device for which the forward pass is bound by compute, in each reading."""
    require(
        min(X, Y) >= 2, f"xxl-batch: X = {X} and Y = {Y} must be at least 2: one device sends nothing along its axis"
    )
    alpha, N, tp = C / W, X * Y, C * Y / (W * My * F)
    free, given = 4 * alpha**2 / (Mx * My * F), alpha / (Mx * Y)
    best_x = N * sqrt(free * Mx / (F * My))
    bound = tp < 1  # otherwise TP alone takes longer than compute, and the mesh as given has no answer
    return {
        "alpha": alpha,
        "tp_share": tp,
        "free_apart": free,
        "given_overlapped": given if bound else None,
        "given_apart": given / (1 - tp) if bound else None,
        "free_overlapped": free / 4,
        "best_x": best_x,
        "on_mesh": 1 <= best_x <= N,
        "exact": given * (X - 1) / X if bound else None,
        "batch": given * N if bound else None,
        "eight_bit": free / 4,
        "tp_too_slow": None if bound else tp,
    }


XXL = (xxl_memory, xxl_fsdp, xxl_batch)
