"""Collectives beside computing: all-reduce over rings, gradient buckets, and how many devices a strategy can use before
communication takes longer than compute. Each function computes the numbers of its template, by their names.

The inequalities are of a gated feed-forward of three D by F matrices, two-byte numbers, and B tokens over all devices.
"""

# The letters are those of the formulas.
# ruff: noqa: N803

from math import ceil, floor, log2, sqrt
from typing import Any

from cs336_systems.cost.course.answers import given, require
from cs336_systems.cost.flops import count_parameters
from cs336_systems.cost.machines import system_preset
from cs336_systems.presets import model_preset

_MODEL, SYSTEM = model_preset("xl", 2026), system_preset("H100")
WIDTH, HIDDEN, SPEED, EGRESS = _MODEL.d_model, _MODEL.d_ff, SYSTEM.matmul_flops, SYSTEM.inside.bandwidth
_GRADIENTS = 4 * sum(count_parameters(model_preset("xl", 2025)).values())


def ring_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Reduce-scatter and all-gather around a ring: 2 (N - 1) messages of S / N bytes."""
    return 2 * (N - 1) * (a + S / (N * W))


def alternate_ring_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Send every whole tensor once around the ring: N - 1 messages of S bytes."""
    return (N - 1) * (a + S / W)


def tree_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Up and down two trees, each for half of the tensor and in many small pieces (Sanders, Speck and Träff, Parallel
    Computing 35, 2009): what NCCL calls tree."""
    return 2 * (a * log2(N) + S / W)


def rings(N: int = 8, S: float = 1e9, W: float = EGRESS, a: float = 3e-6) -> dict[str, Any]:
    """All-reduce of S bytes over N devices with W bytes/s out of each and a seconds per message."""
    require(N >= 2, "N must be at least 2, since one device has nothing to send")
    require(N <= S, f"S = {given(S)} bytes cannot be cut into N = {given(N)} pieces; S must be at least N")
    piece, least_bytes = S / N, 2 * (N - 1) / N * S
    reduce_scatter = all_gather = both_directions = ring_seconds(N, S, W) / 2
    ring, ring_latency = 2 * all_gather, ring_seconds(N, S, W, a)
    alternate, ratio, pair = alternate_ring_seconds(N, S, W), N / 2, N == 2
    algorithm_bandwidth = S / ring
    # Two devices send as many messages either way.
    alternate_wins_below = a * W * N / (N - 2) if N > 2 else None
    tree_wins_below = a * W * N * (N - 1 - log2(N)) if N > 2 else None
    ways = {"ring": ring_seconds, "alternative": alternate_ring_seconds, "pair of trees": tree_seconds}
    fastest = min(ways, key=lambda way: ways[way](N, S, W, a))
    fastest_seconds = ways[fastest](N, S, W, a)
    return locals()


def overhead(s: float, w: float, o: float, n: float, compute: float | None = None) -> float:
    """Seconds that the reductions of n equal buckets (s bytes together) end after backward. `compute` is how long
    backward takes; None is the course's assumption that it takes as long as the bytes, s / w. A reduction takes s / (n
    w) + o and waits for its bucket and for the one before."""
    backward = s / w if compute is None else compute
    reduction = s / (n * w) + o
    return reduction + (n - 1) * max(0.0, reduction - backward / n)


def best_count(s: float, w: float, o: float, compute: float | None = None) -> int:
    """The whole number of buckets with the least `overhead`. Few buckets leave a long last one, many pay o each time.
    Where backward is longer than the bytes take, it hides the calls too as long as n o <= compute - s / w; beyond, the
    overhead is s / w + n o - compute + compute / n."""
    backward = s / w if compute is None else compute
    real = max(sqrt(backward / o), (backward - s / w) / o)
    return min(max(1, floor(real)), ceil(real), key=lambda n: overhead(s, w, o, n, compute))


def buckets(s: float = _GRADIENTS, w: float = 300e9, o: float = 30e-6, n: int = 320, r: float = 3.0) -> dict[str, Any]:
    """The bucket equation for s bytes of parameters, an all-reduce of w bytes/s, o seconds per call, n buckets."""
    require(n <= s, f"n = {given(n)} must be at most s = {given(s)}, or a bucket holds less than a byte")
    bucket, backward = s / n, s / w
    transfer = bucket / w
    reduction = transfer + o
    end = transfer + n * reduction
    best_real, best_bucket, least = sqrt(s / (w * o)), sqrt(s * o * w), 2 * sqrt(s * o / w)
    best = best_count(s, w, o)
    best_overhead, flat = overhead(s, w, o, best), s / w + o
    compute = r * s / w
    general, general_best = overhead(s, w, o, n, compute), best_count(s, w, o, compute)
    general_least = overhead(s, w, o, general_best, compute)
    one, best_one, general_one = n == 1, best == 1, general_best == 1
    return {**locals(), "overhead": overhead(s, w, o, n)}


def _check(C: float, W: float, **shares: tuple[str, int, str, int]) -> None:
    """Refuse a device slower than its link, and devices that get less than one token or column. A share is a letter and
    a count of devices, and a letter and a count of what they divide."""
    require(C >= 2 * W, f"C = {given(C)} FLOP/s is too slow for W = {given(W)} B/s; C must be at least 2 W")
    for what, (devices, count, whole, size) in shares.items():
        less = f"{devices} = {given(count)} devices get less than one of {whole} = {given(size)} {what}"
        require(count <= size, f"{less}; {devices} must be at most {whole}")


def data_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 8, C: float = SPEED, W: float = EGRESS
) -> dict[str, Any]:
    """Passes of N-way data parallelism, for FSDP with sharded weights: FLOPs, seconds, and the largest N. FSDP gathers
    weights in forward, half an all-reduce, and in backward gathers them again and reduce-scatters gradients."""
    _check(C, W, tokens=("N", N, "B", B))
    forward_flops, backward_flops = 6 * B * D * F / N, 12 * B * D * F / N
    gradient_bytes, step_bytes = 6 * D * F, 18 * D * F * (N - 1) / N
    forward_compute, forward_communication = 6 * B * D * F / (N * C), ring_seconds(N, gradient_bytes, W) / 2
    backward_compute, backward_communication = 2 * forward_compute, 2 * forward_communication
    share = forward_communication / forward_compute
    largest = 1 + B * W / C
    devices = floor(largest)
    hidden = devices >= N
    return locals()


def tensor_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 4, C: float = SPEED, W: float = EGRESS
) -> dict[str, Any]:
    """Forward and backward with the hidden width split over N: FLOPs, seconds, and the largest N."""
    _check(C, W, columns=("N", N, "F", F))
    forward_flops, backward_flops = 6 * B * D * F / N, 12 * B * D * F / N
    forward_compute = 6 * B * D * F / (N * C)
    backward_compute = 2 * forward_compute
    forward_communication = backward_communication = ring_seconds(N, 2 * B * D, W)
    forward_share = forward_communication / forward_compute
    backward_share = forward_share / 2
    largest_forward, largest_backward = 1 + 3 * F * W / (2 * C), 1 + 3 * F * W / C
    forward_hidden, backward_hidden = floor(largest_forward) >= N, floor(largest_backward) >= N
    forward_devices, backward_devices = min(F, floor(largest_forward)), min(F, floor(largest_backward))
    return locals()


def fsdp_tensor_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, X: int = 8, Y: int = 4, C: float = SPEED, W: float = EGRESS
) -> dict[str, Any]:
    """Forward on an X by Y grid, and the most devices with the two axes overlapped and not."""
    _check(C, W, tokens=("X", X, "B", B), columns=("Y", Y, "F", F))
    forward_flops, compute = 6 * B * D * F / (X * Y), 6 * B * D * F / (X * Y * C)
    fsdp, tp = ring_seconds(X, 6 * D * F / Y, W) / 2, ring_seconds(Y, 2 * B * D / X, W)
    together = max(fsdp, tp)
    a, b = B * W / C, 3 * F * W / (2 * C)
    largest_overlapped, half = (1 + a) * (1 + b), (a * b + a + b) / (2 * a * b)
    best_x, best_y = a * half, b * half
    # Where an axis would be shorter than one device, the other is alone.
    both_axes = min(a, b) * half >= 1
    largest_apart = a * b * half**2 if both_axes else 1 + max(a, b)
    apart_over_overlapped = largest_apart / largest_overlapped
    shares = (X - 1) / a, (Y - 1) / b
    overlapped_share, apart_share = max(shares), sum(shares)
    overlapped_hidden, apart_hidden = overlapped_share <= 1, apart_share <= 1
    devices_overlapped, devices_apart = floor(largest_overlapped), floor(largest_apart)
    return locals()
