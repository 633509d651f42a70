"""Collectives beside computing: all-reduce over rings, gradient buckets, and how many devices a strategy can use before
communication takes longer than compute (the 2026 edition's inequalities).

The inequalities are of one gated feed-forward layer with three D by F matrices, numbers of two bytes, and a batch of B
tokens over all devices.
"""

# The letters are those of the formulas.
# ruff: noqa: N803

from math import ceil, floor, log2, sqrt

from cs336_systems.cost.course.answers import given, require
from cs336_systems.cost.machines import system_preset
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.template import Value
from cs336_systems.presets import model_preset

_MODEL, SYSTEM = model_preset("xl", 2026), system_preset("H100")
WIDTH, HIDDEN, SPEED, EGRESS = _MODEL.d_model, _MODEL.d_ff, SYSTEM.matmul_flops, SYSTEM.inside.bandwidth
_GRADIENTS = 4 * sum(count_parameters(model_preset("xl", 2025)).values())


def ring_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Reduce-scatter and all-gather around a ring: 2 (N - 1) messages of S / N bytes."""
    return 2 * (N - 1) * (a + S / (N * W))


def alternate_ring_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Every whole tensor once around the ring: N - 1 messages of S bytes."""
    return (N - 1) * (a + S / W)


def tree_seconds(N: int, S: float, W: float, a: float = 0.0) -> float:
    """Up and down two trees, each for half of the tensor and in many small pieces (Sanders, Speck and Träff, Parallel
    Computing 35, 2009): what NCCL calls tree."""
    return 2 * (a * log2(N) + S / W)


def rings(N: int = 8, S: float = 1e9, W: float = EGRESS, a: float = 3e-6) -> dict[str, Value]:
    """All-reduce of S bytes over N devices with W bytes/s out of each and a seconds per message."""
    require(N >= 2, "rings: N must be at least 2, since one device has nothing to send")
    require(N <= S, f"rings: S = {given(S)} bytes cannot be cut into N = {given(N)} pieces; S must be at least N")
    half = ring_seconds(N, S, W) / 2
    seconds = {
        "ring": ring_seconds(N, S, W, a),
        "alternative": alternate_ring_seconds(N, S, W, a),
        "pair of trees": tree_seconds(N, S, W, a),
    }
    fastest = min(seconds, key=lambda way: seconds[way])
    return {
        "piece": S / N,
        "reduce_scatter": half,
        "all_gather": half,
        "ring": 2 * half,
        "alternate": alternate_ring_seconds(N, S, W),
        "ratio": N / 2,
        "pair": N == 2,
        "least_bytes": 2 * (N - 1) / N * S,
        "algorithm_bandwidth": S / (2 * half),
        "both_directions": half,
        "ring_latency": ring_seconds(N, S, W, a),
        # Two devices send as many messages either way.
        "alternate_wins_below": a * W * N / (N - 2) if N > 2 else None,
        "tree_wins_below": a * W * N * (N - 1 - log2(N)) if N > 2 else None,
        "fastest": fastest,
        "fastest_seconds": seconds[fastest],
    }


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


def buckets(
    s: float = _GRADIENTS, w: float = 300e9, o: float = 30e-6, n: int = 320, r: float = 3.0
) -> dict[str, Value]:
    """The bucket equation for s bytes of parameters, an all-reduce of w bytes/s, o seconds per call, n buckets."""
    require(n <= s, f"buckets: n = {given(n)} must be at most s = {given(s)}, or a bucket holds less than a byte")
    bucket, compute = s / n, r * s / w
    best, general_best = best_count(s, w, o), best_count(s, w, o, compute)
    return {
        "bucket": bucket,
        "transfer": bucket / w,
        "reduction": bucket / w + o,
        "backward": s / w,
        "end": bucket / w + n * (bucket / w + o),
        "overhead": overhead(s, w, o, n),
        "best_real": sqrt(s / (w * o)),
        "best_bucket": sqrt(s * o * w),
        "least": 2 * sqrt(s * o / w),
        "best": best,
        "best_overhead": overhead(s, w, o, best),
        "flat": s / w + o,
        "general": overhead(s, w, o, n, compute),
        "general_best": general_best,
        "general_least": overhead(s, w, o, general_best, compute),
        "one": n == 1,
        "best_one": best == 1,
        "general_one": general_best == 1,
    }


def _check(name: str, C: float, W: float, **shares: tuple[str, int, str, int]) -> None:
    """Refuse a device slower than its link, and devices that get less than one token or column. A share is a letter and
    a count of devices, and a letter and a count of what they divide."""
    require(C >= 2 * W, f"{name}: C = {given(C)} FLOP/s is too slow for W = {given(W)} B/s; C must be at least 2 W")
    for what, (devices, count, whole, size) in shares.items():
        require(
            count <= size,
            f"{name}: {devices} = {given(count)} devices get less than one of {whole} = {given(size)} {what}; "
            f"{devices} must be at most {whole}",
        )


def data_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 8, C: float = SPEED, W: float = EGRESS
) -> dict[str, Value]:
    """Backward of N-way data parallelism: FLOPs, seconds of the all-reduce, and the largest N."""
    _check("data-parallel", C, W, tokens=("N", N, "B", B))
    devices, compute, communication = floor(1 + B * W / C), 12 * B * D * F / (N * C), ring_seconds(N, 6 * D * F, W)
    return {
        "backward_flops": 12 * B * D * F / N,
        "backward_compute": compute,
        "gradient_bytes": 6 * D * F,
        "backward_communication": communication,
        "share": communication / compute,
        "largest": 1 + B * W / C,
        "devices": devices,
        "hidden": devices >= N,
    }


def fsdp(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 8, C: float = SPEED, W: float = EGRESS
) -> dict[str, Value]:
    """Forward and backward with weights sharded over N: FLOPs, seconds, and the largest N."""
    _check("fsdp", C, W, tokens=("N", N, "B", B))
    devices, gather, forward = floor(1 + B * W / C), ring_seconds(N, 6 * D * F, W) / 2, 6 * B * D * F / (N * C)
    return {
        "forward_flops": 6 * B * D * F / N,
        "forward_compute": forward,
        "forward_communication": gather,
        "backward_flops": 12 * B * D * F / N,
        "backward_compute": 2 * forward,
        "backward_communication": 2 * gather,
        "share": gather / forward,
        "largest": 1 + B * W / C,
        "devices": devices,
        "hidden": devices >= N,
        "step_bytes": 18 * D * F * (N - 1) / N,
    }


def tensor_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, N: int = 4, C: float = SPEED, W: float = EGRESS
) -> dict[str, Value]:
    """Forward and backward with the hidden width split over N: FLOPs, seconds, and the largest N."""
    _check("tensor-parallel", C, W, columns=("N", N, "F", F))
    most_forward, most_backward = floor(1 + 3 * F * W / (2 * C)), floor(1 + 3 * F * W / C)
    forward, reduce = 6 * B * D * F / (N * C), ring_seconds(N, 2 * B * D, W)
    return {
        "forward_flops": 6 * B * D * F / N,
        "forward_compute": forward,
        "forward_communication": reduce,
        "forward_share": reduce / forward,
        "forward_hidden": most_forward >= N,
        "forward_devices": min(F, most_forward),
        "largest_forward": 1 + 3 * F * W / (2 * C),
        "backward_flops": 12 * B * D * F / N,
        "backward_compute": 2 * forward,
        "backward_communication": reduce,
        "backward_share": reduce / forward / 2,
        "backward_hidden": most_backward >= N,
        "backward_devices": min(F, most_backward),
        "largest_backward": 1 + 3 * F * W / C,
    }


def grid_times(B: int, D: int, F: int, X: float, Y: float, C: float, W: float) -> dict[str, float]:
    """Seconds of a forward pass on X (FSDP) by Y (TP) devices: compute, FSDP's gather, TP's all-reduce."""
    return {
        "compute": 6 * B * D * F / (X * Y * C),
        "fsdp": 6 * D * F / Y * (X - 1) / (X * W),
        "tp": 4 * B / X * D * (Y - 1) / (Y * W),
    }


def fsdp_tensor_parallel(
    B: int = 32_768, D: int = WIDTH, F: int = HIDDEN, X: int = 8, Y: int = 4, C: float = SPEED, W: float = EGRESS
) -> dict[str, Value]:
    """Forward on an X by Y grid, and the most devices with the two axes overlapped and not."""
    _check("fsdp-tensor-parallel", C, W, tokens=("X", X, "B", B), columns=("Y", Y, "F", F))
    a, b = B * W / C, 3 * F * W / (2 * C)
    overlapped, half = (1 + a) * (1 + b), (a * b + a + b) / (2 * a * b)
    # Where an axis would be shorter than one device, the other is alone.
    both = min(a, b) * half >= 1
    apart = a * b * half**2 if both else 1 + max(a, b)
    gather, reduce = ring_seconds(X, 6 * D * F / Y, W) / 2, ring_seconds(Y, 2 * B * D / X, W)
    shares = (X - 1) / a, (Y - 1) / b
    return {
        "forward_flops": 6 * B * D * F / (X * Y),
        "compute": grid_times(B, D, F, X, Y, C, W)["compute"],
        "fsdp": gather,
        "tp": reduce,
        "together": max(gather, reduce),
        "a": a,
        "b": b,
        "largest_overlapped": overlapped,
        "half": half,
        "best_x": a * half,
        "best_y": b * half,
        "both_axes": both,
        "largest_apart": apart,
        "apart_over_overlapped": apart / overlapped,
        "overlapped_share": max(shares),
        "overlapped_hidden": max(shares) <= 1,
        "apart_share": sum(shares),
        "apart_hidden": sum(shares) <= 1,
        "devices_overlapped": floor(overlapped),
        "devices_apart": floor(apart),
    }


COMMUNICATION = (rings, buckets, data_parallel, fsdp, tensor_parallel, fsdp_tensor_parallel)
