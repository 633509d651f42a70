"""Arithmetic: rounding of sums by accumulator, and lower bounds of a kernel's time (RMSNorm, softmax, leaderboards).

A function computes the numbers of the template of its name, each by a formula that is the number's name.
"""

# The letters are those of the formulas.
# ruff: noqa: N803

import struct
from collections.abc import Callable
from math import floor, log2
from typing import Any

from cs336_systems.cost.course.answers import given, quantity, require
from cs336_systems.cost.machines import system_preset
from cs336_systems.errors import UserError

_H100, _H200, _B200 = system_preset("H100"), system_preset("H200"), system_preset("B200")
_H100_FP32 = 67e12  # its data sheet; `machines.py` has tensor cores only


def _check_format(name: str, e: int) -> None:
    require(e in (1, 2, 4, 8), f"{name}: a number has e = 1, 2, 4 or 8 bytes, not {given(e)}")


def _check_time(name: str, t: float, least: float) -> None:
    require(t >= least, f"{name}: t must be at least {quantity(least, 's')}, what the products take at full speed")


def norm_roofline(R: int = 50_000, H: int = 8192, e: int = 4, V: float = _H200.bandwidth) -> dict[str, Any]:
    """RMSNorm over R rows of H numbers of e bytes: bytes of a fused kernel and of separate operators."""
    _check_format("norm-roofline", e)
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
    _check_format("softmax-share", e)
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
    _check_time("leaderboard-flash", t, least)
    return locals()


def leaderboard_step(
    L: int = 34,
    D: int = 4096,
    F: int = 11_008,
    V: int = 151_936,
    S: int = 32_768,
    B: int = 2,
    N: int = 2,
    t: float = 3.837,
    C: float = _B200.matmul_flops,
    H: float = _B200.memory,
) -> dict[str, Any]:
    """The 2026 leaderboard: a training step of an 8 B model on N devices, t seconds measured."""
    tokens, blocks, table = B * S, L * (4 * D * D + 3 * D * F), V * D
    parameters = blocks + 2 * table + (2 * L + 1) * D
    products, attention = 6 * (blocks + table) * tokens, 7 * B * L * S * S * D
    total, state = products + attention, 16 * parameters
    least, reached = total / (N * C), total / (N * t)
    share = total / (N * t * C)
    _check_time("leaderboard-step", t, least)
    one_device, all_devices = state / H, state / (N * H)
    fits = "it must be sharded" if state > H else "it fits, if activations fit beside it"
    room = f"{quantity(N, 'devices')} cannot hold it" if state > N * H else fits
    logits = 2 * tokens * V
    return locals()


def half(x: float) -> float:
    """The nearest fp16 number, ties to even."""
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


def single(x: float) -> float:
    """The nearest fp32 number, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def accumulate(addend: float, times: int, rounded: Callable[[float], float]) -> float:
    """`times` additions to zero, each rounded. The exact sum of two fp16 or fp32 numbers is a double's, so one rounding
    is what the hardware does."""
    total = 0.0
    for _ in range(times):
        total = rounded(total + addend)
    return total


def accumulation(x: float = 0.01, n: int = 1000) -> dict[str, Any]:
    """The sum of n times x with fp32 and fp16 addends and accumulators. Raises UserError if fp16 cannot hold x or the
    total, or if n is too large to add up one by one."""
    message = f"accumulation: x = {given(x)} must be from 6e-8 to 65504, which fp16 can hold"
    require(x < 65_520 and half(x) != 0, message)
    require(n <= 10**6, f"accumulation: n must be at most {10**6}, not {given(n)}")
    try:
        half_half = accumulate(half(x), n, half)
    except OverflowError:
        raise UserError(f"accumulation: {n} times {given(x)} pass 65504, the largest fp16 number") from None
    exact, half_error = n * x, half(x) - x
    single_error = n * half_error
    single_single, single_half = accumulate(single(x), n, single), accumulate(half(x), n, single)
    spacing = 2.0 ** max(floor(log2(half_half)) - 10, -24)
    half_spacing = spacing / 2
    stops_at = _stall(half(x))
    passes = "" if stops_at is None else None
    single_missed, half_missed = abs(single_half - exact), abs(half_half - exact)
    lesson = "as much" if half_missed == single_missed else "less, since roundings happen to cancel"
    if half_missed > single_missed:
        lesson = "it is the accumulator that must be precise"
    return locals()


def _stall(addend: float) -> float | None:
    """The fp16 total that no longer grows; None if it overflows first."""
    total = 0.0
    try:
        while (after := half(total + addend)) != total:
            total = after
    except OverflowError:
        return None
    return total


ARITHMETIC = (accumulation, norm_roofline, softmax_share, leaderboard_flash, leaderboard_step)
