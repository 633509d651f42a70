"""Arithmetic: rounding of sums by accumulator, and lower bounds of a kernel's time (RMSNorm, softmax, leaderboards)."""

# The letters are those of the formulas.
# ruff: noqa: N803

from math import floor, isfinite, log2
from typing import Any

import numpy as np

from cs336_systems.cost.course.answers import given, quantity, require, require_format
from cs336_systems.cost.machines import system_preset

_H100, _H200, _B200 = system_preset("H100"), system_preset("H200"), system_preset("B200")
_H100_FP32 = 67e12  # FLOP/s of its data sheet; `machines.py` has tensor cores only


def _check_time(t: float, least: float) -> None:
    require(t >= least, f"t must be at least {quantity(least, 's')}, what the products take at full speed")


def norm_roofline(R: int = 50_000, H: int = 8192, e: int = 4, V: float = _H200.bandwidth) -> dict[str, Any]:
    """RMSNorm over R rows of H numbers of e bytes: bytes of a fused kernel and of separate operators."""
    require_format(e)
    tensor = e * R * H
    fused_forward = 2 * tensor / V
    eager_forward = 7 * tensor / V
    fusion = 7 / 2
    fused_backward = 3 * tensor / V
    intensity = 4 / (2 * e)
    balance = _H200.matmul_flops / V
    return locals()


def softmax_share(
    S: int = 1024, d: int = 64, e: int = 4, C: float = _H100_FP32, V: float = _H100.bandwidth
) -> dict[str, Any]:
    """Softmax against the two products of one attention head, in FLOPs and in time."""
    require_format(e)
    product_flops, softmax_flops = 4 * S * S * d, 5 * S * S
    flops_ratio = product_flops / softmax_flops
    product_seconds = product_flops / C
    softmax_seconds = 2 * e * S * S / V
    time_ratio = product_flops / C * V / (2 * e * S * S)
    return locals()


def leaderboard_flash(
    h: int = 16, S: int = 16_384, d: int = 64, t: float = 5.364e-3, C: float = _H100.matmul_flops
) -> dict[str, Any]:
    """The 2025 leaderboard: causal attention of h heads forward and backward, t seconds measured."""
    product = h * S * S * d  # 2 S² d FLOPs, of which the mask leaves half
    forward, backward, total = 2 * product, 5 * product, 7 * product
    least, reached = total / C, total / t
    share = total / t / C
    _check_time(t, least)
    return locals()


def leaderboard_step(
    L: int = 34, D: int = 4096, F: int = 11_008, V: int = 151_936, S: int = 32_768, B: int = 2, N: int = 2,
    t: float = 3.837, C: float = _B200.matmul_flops, H: float = _B200.memory,
) -> dict[str, Any]:  # fmt: skip
    """The 2026 leaderboard: a training step of an 8 B model on N devices, t seconds measured."""
    tokens, blocks, table = B * S, L * (4 * D * D + 3 * D * F), V * D
    parameters = blocks + 2 * table + (2 * L + 1) * D
    products, attention = 6 * (blocks + table) * tokens, 7 * B * L * S * S * D
    total, state = products + attention, 16 * parameters
    least, reached = total / (N * C), total / (N * t)
    share = total / (N * t * C)
    _check_time(t, least)
    one_device, all_devices = state / H, state / (N * H)
    fits = "it must be sharded" if state > H else "it fits, if activations fit beside it"
    room = f"{quantity(N, 'devices')} cannot hold it" if state > N * H else fits
    logits = 2 * tokens * V
    return locals()


def accumulate(addend: float, times: int, kind: type[np.floating[Any]]) -> float:
    """`times` additions to zero, addend and each sum rounded to a kind of number, as hardware does it."""
    with np.errstate(over="ignore"):
        return float(np.full(times, addend, kind).cumsum(dtype=kind)[-1])


def accumulation(x: float = 0.01, n: int = 1000) -> dict[str, Any]:
    """The sum of n times x with fp32 and fp16 addends and accumulators. Raises UserError if fp16 cannot hold x or the
    total, or if n is too large to add up one by one."""
    held = x < 65_520 and np.float16(x) != 0
    require(held, f"x = {given(x)} must be from 6e-8 to 65504, which fp16 can hold")
    require(n <= 10**6, f"n must be at most {10**6}, not {given(n)}")
    half, half_half = float(np.float16(x)), accumulate(x, n, np.float16)
    require(isfinite(half_half), f"{n} times {given(x)} pass 65504, the largest fp16 number")
    exact, half_error = n * x, half - x
    single_error = n * half_error
    single_single, single_half = accumulate(x, n, np.float32), accumulate(half, n, np.float32)
    spacing = 2.0 ** max(floor(log2(half_half)) - 10, -24)
    half_spacing = spacing / 2
    most = accumulate(x, 10_000, np.float16)  # by then a sum of 11 binary digits is 2^12 times the addend
    stops_at, passes = (most, None) if isfinite(most) else (None, "")
    single_missed, half_missed = abs(single_half - exact), abs(half_half - exact)
    lesson = "as much" if half_missed == single_missed else "less, since roundings happen to cancel"
    if half_missed > single_missed:
        lesson = "it is the accumulator that must be precise"
    return locals()
