"""The 2025 edition's XXL model: its memory, how far it must be sharded, and the batch that hides communication."""

# The letters are those of the formulas.
# ruff: noqa: N803, N806

from math import ceil, sqrt
from typing import Any

from cs336_systems.cost.course.answers import require
from cs336_systems.cost.machines import GIB, system_preset

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


def xxl_memory(D: int = 16_384, F: int = 53_248, L: int = 126, H: float = _H100, T: int = 8192) -> dict[str, Any]:
    """Part (a): bytes of state and of activations, and how many devices of H bytes they fill; T tokens."""
    parameters, saved_per_token = _parameters(D, F, L), _saved(D, F, L)
    copy, state, saved = _FP32 * parameters, _STATE * parameters, saved_per_token * T
    gpus, gpus_with_batch = ceil(state / H), ceil((state + saved) / H)
    gpus_binary = ceil(state / (H / 1e9 * 2**30))
    tokens_per_gpu = H / saved_per_token
    return locals()


def xxl_fsdp(D: int = 16_384, F: int = 53_248, L: int = 126, M: float = 95e9, T: int = 1024) -> dict[str, Any]:
    """Part (b): devices over which state and half of the activations are sharded, so that each needs less than M."""
    state, half = _STATE * _parameters(D, F, L), _saved(D, F, L) * T / 2
    state_over_memory, whole_half_fits = state / M, half < M
    devices_state, devices_half = _least(state / M), _least((state + half) / M)
    devices_other_half_whole = _least((state + half) / (M - half)) if whole_half_fits else None
    tokens_most = 2 * M / _saved(D, F, L)
    return locals()


def xxl_batch(
    X: int = 16, Y: int = 4, W: float = 18e10, C: float = 4.6e14, Mx: int = 2, My: int = 1, D: int = 16_384,
    F: int = 53_248,
) -> dict[str, Any]:  # fmt: skip
    """Part (c) and (d): the fewest tokens a device for which the forward pass is bound by compute, in each reading."""
    require(
        min(X, Y) >= 2, f"xxl-batch: X = {X} and Y = {Y} must be at least 2: one device sends nothing along its axis"
    )
    alpha, N, tp_share = C / W, X * Y, C * Y / (W * My * F)
    free_apart = 4 * alpha**2 / (Mx * My * F)
    free_overlapped = eight_bit = free_apart / 4
    bound = tp_share < 1  # otherwise TP alone takes longer than compute, and the mesh as given has no answer
    given_overlapped = alpha / (Mx * Y) if bound else None
    given_apart = alpha / (Mx * Y) / (1 - tp_share) if bound else None
    exact = alpha / (Mx * Y) * (X - 1) / X if bound else None
    batch = alpha / (Mx * Y) * N if bound else None
    best_x = N * sqrt(free_apart * Mx / (F * My))
    on_mesh = 1 <= best_x <= N
    tp_too_slow = None if bound else tp_share
    return locals()


XXL = (xxl_memory, xxl_fsdp, xxl_batch)
