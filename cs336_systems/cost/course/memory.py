"""Memory of passes and of ranks: activations, checkpointing, sharded state and its traffic, the XXL model of 2025."""

# The letters are those of the formulas.
# ruff: noqa: N803, N806

from dataclasses import replace
from math import ceil, log2, sqrt
from typing import Any

from cs336_systems.cost.closed_forms import zero_memory
from cs336_systems.cost.course.answers import given, require, require_format
from cs336_systems.cost.flops import count_parameters
from cs336_systems.cost.machines import GIB, system_preset
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.traffic import TRAFFIC

_H100 = system_preset("H100").memory / GIB * 1e9  # a GB as the course has it
# XXL model: bytes of a number; bytes of weight, accumulated gradient and two moments of a parameter.
_BF16, _FP32, _STATE = 2, 4, 16


def pass_memory(size: str = "2.7B", year: int = 2024, B: int = 16, S: int = 128) -> dict[str, Any]:
    """Peaks of forward and of a step, in fp32 and under autocast, and the residual stream."""
    from cs336_systems.cost.observed import observe_passes  # torch, which no other question needs

    require(B * S <= 2**32, f"B S must be at most 2^32 tokens, not {given(B * S)}")
    config = model_preset(size, year).override(context_length=S)
    counts = count_parameters(config)
    P, d, h = sum(counts.values()), config.d_model, config.num_heads
    passes = {precision: observe_passes(config, B, S, precision) for precision in ("fp32", "bf16")}
    peaks = {f"{mode}_{precision}": sum(each.memory(mode).values())
             for mode in ("forward", "step") for precision, each in passes.items()}  # fmt: skip
    forward_change, step_change = (peaks[f"{mode}_bf16"] - peaks[f"{mode}_fp32"] for mode in ("forward", "step"))
    forward_more, step_more = forward_change >= 0, step_change >= 0
    forward_change, step_change = abs(forward_change), abs(step_change)
    casts = 2 * (counts["attention"] + counts["feed-forward"] + config.vocab_size * d)
    parameters, state, stream = 4 * P, 16 * P, 4 * B * S * d
    parameters_share = parameters / peaks["forward_fp32"]
    matrix, scores = 4 * d * config.d_ff, 4 * B * h * S * S
    scores_from = sqrt(d * config.d_ff / (B * h))
    return locals() | peaks


def attention_memory(B: int = 8, S: int = 16_384, d: int = 64, e: int = 4, H: float = _H100) -> dict[str, Any]:
    """Bytes that a single head of attention keeps, written out and as FlashAttention-2."""
    require_format(e)
    flat, scores, row = e * B * S * d, e * B * S * S, 4 * B * S
    inputs, kept_naive, kept_flash = 3 * flat, 3 * flat + scores, 4 * flat + row
    forward_naive, backward_naive = kept_naive + scores, 5 * flat + 3 * scores
    longest = sqrt(H / (3 * e * B))
    ratio, shorter_from, work = kept_naive / kept_flash, d + 4 / e, 7 / 6
    same, less = kept_naive == kept_flash, kept_naive > kept_flash
    times = max(kept_naive, kept_flash) / min(kept_naive, kept_flash)
    return locals()


def segments_peak(L: int, k: int, s: float, b: float) -> float:
    """Bytes at the fullest moment of backward with segments of k of L blocks: s the stream, b what a block keeps."""
    return (ceil(L / k) - 1) * s + k * b


def checkpointing(size: str = "xl", year: int = 2026, B: int = 4, S: int = 2048, k: int = 4) -> dict[str, Any]:
    """Activations kept with segments of k blocks, the best k, and segments nested in halves."""
    from cs336_systems.cost.observed import observe_passes  # torch, which no other question needs

    config = model_preset(size, year).override(context_length=S)
    L = config.num_layers
    require(k <= L, f"k must be at most {L}, the blocks of {size}, not {k}")
    # A block keeps B (x S + y S^2) bytes, a model with two blocks more than one with one; two short sequences determine
    # x and y.
    some = [(replace(config, context_length=n, num_layers=layers), 1, n) for n in (16, 32) for layers in (1, 2)]
    kept = [observe_passes(*each).kept for each in some]
    one, two = kept[1] - kept[0], kept[3] - kept[2]
    y = (two - 2 * one) // 512
    s, b = 4 * B * S * config.d_model, B * ((one // 16 - 16 * y) * S + y * S * S)
    whole, segments = L * b, segments_peak(L, k, s, b)
    best_real, best = sqrt(L * s / b), min(range(1, L + 1), key=lambda each: segments_peak(L, each, s, b))
    best_bytes, textbook, block_over_stream = segments_peak(L, best, s, b), sqrt(L), b / s
    halvings = ceil(log2(L))
    nested, nested_forwards, segments_extra = halvings * s + b, 1 + halvings, 1 / 3
    return locals()


def parameters_of(size: str, year: int) -> int:
    """All parameters of a course size. Raises UserError for one that the year does not have."""
    return sum(count_parameters(model_preset(size, year)).values())


def _matrices(config: ModelConfig) -> int:
    """Weight matrices of a block: attention's projections and the feed-forward."""
    return 4 + (3 if config.feed_forward == "swiglu" else 2)


def tensors_of(config: ModelConfig) -> int:
    """Parameter tensors of a dense course model (no biases): matrices and norms of the blocks, and those outside."""
    return config.num_layers * (_matrices(config) + 2) + 2 + (config.positions == "learned") + (not config.tied_head)


def _check_ranks(N: int, P: int) -> None:
    require(N >= 2, "N must be at least 2, since one rank shards nothing and sends nothing")
    require(N <= P, f"N = {given(N)} ranks share {given(P)} parameters; N must not be more")


def optimizer_memory(size: str = "xl", year: int = 2025, N: int = 2) -> dict[str, Any]:
    """Bytes at three points of a step, with whole and with sharded AdamW state."""
    P = parameters_of(size, year)
    _check_ranks(N, P)
    whole, sharded = zero_memory(P, 0, N, 0), zero_memory(P, 0, N, 1)
    initialized, before_step = whole["parameters"], whole["parameters"] + whole["gradients"]
    moments, moments_sharded = whole["optimizer"], sharded["optimizer"]
    after_whole, after_sharded = sum(whole.values()), sum(sharded.values())
    saved = after_whole - after_sharded
    published_gib = round(sum(zero_memory(parameters_of("xl", 2024), 0, 2, 1).values()) / 2**30, 1)
    return locals()


def zero1_traffic(size: str = "xl", year: int = 2025, N: int = 2, o: float = 20e-6) -> dict[str, Any]:
    """Bytes a rank sends in a step: the assignment's sharded optimizer, and ZeRO stage 1; o seconds per call."""
    P, calls = parameters_of(size, year), tensors_of(model_preset(size, year))
    _check_ranks(N, P)
    share = (N - 1) / N * 4 * P
    all_reduce = data_parallel = TRAFFIC["all-reduce"] * share
    broadcasts = TRAFFIC["broadcast"] * share
    assignment, zero1 = all_reduce + broadcasts, (TRAFFIC["reduce-scatter"] + TRAFFIC["all-gather"]) * share
    ratio, call_seconds = assignment / zero1, calls * o
    kept = sum(zero_memory(P, 0, N, 1).values())
    return locals()


def fsdp_memory(size: str = "xl", year: int = 2026, N: int = 2, k: int = 2) -> dict[str, Any]:
    """Savings of full sharding beyond sharded optimizer state, with k layers gathered ahead."""
    P, config = parameters_of(size, year), model_preset(size, year)
    _check_ranks(N, P)
    layers = config.num_layers * _matrices(config) + 1
    require(k < layers, f"k = {given(k)} layers ahead are too many: {size} has {layers} matrices to multiply by")
    sharded, full = zero_memory(P, 0, N, 1), zero_memory(P, 0, N, 3)
    sharded_optimizer, fsdp = sum(sharded.values()), sum(full.values())
    saved, saved_gradients = sharded_optimizer - fsdp, sharded["gradients"] - full["gradients"]
    gathered = (k + 1) * 4 * config.d_model * config.d_ff
    net, pays = saved - gathered, saved > gathered
    sent, data_parallel = 3 * ((N - 1) / N * 4 * P), 2 * ((N - 1) / N * 4 * P)
    return locals()


def _saved(D: int, F: int, L: int) -> float:
    """Bytes a token keeps for backward: the inputs of both products of each block."""
    return float(_BF16 * L * (D + F))


def xxl_memory(D: int = 16_384, F: int = 53_248, L: int = 126, H: float = _H100, T: int = 8192) -> dict[str, Any]:
    """Part (a): bytes of state and of activations, and how many devices of H bytes they fill; T tokens."""
    parameters, saved_per_token = float(2 * L * D * F), _saved(D, F, L)
    copy, state, saved = _FP32 * parameters, _STATE * parameters, saved_per_token * T
    gpus, gpus_with_batch = ceil(state / H), ceil((state + saved) / H)
    gpus_binary = ceil(state / (H / 1e9 * 2**30))
    tokens_per_gpu = H / saved_per_token
    return locals()


def xxl_fsdp(D: int = 16_384, F: int = 53_248, L: int = 126, M: float = 95e9, T: int = 1024) -> dict[str, Any]:
    """Part (b): devices over which state and half of the activations are sharded, so that each needs less than M."""
    state, half = _STATE * float(2 * L * D * F), _saved(D, F, L) * T / 2
    state_over_memory, whole_half_fits = state / M, half < M
    devices_state, devices_half = int(state / M) + 1, int((state + half) / M) + 1  # the least above a bound
    devices_other_half_whole = int((state + half) / (M - half)) + 1 if whole_half_fits else None
    tokens_most = 2 * M / _saved(D, F, L)
    return locals()


def xxl_batch(
    X: int = 16, Y: int = 4, W: float = 18e10, C: float = 4.6e14, Mx: int = 2, My: int = 1, D: int = 16_384,
    F: int = 53_248,
) -> dict[str, Any]:  # fmt: skip
    """Part (c) and (d): the fewest tokens per device for which compute bounds the forward pass, in each reading."""
    require(min(X, Y) >= 2, f"X = {X} and Y = {Y} must be at least 2: one device sends nothing along its axis")
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
