"""Closed forms that a course prints: bytes of collectives, memory by ZeRO stage, activations, and exposed time.

Tests hold each to what the library is observed to send and keep (`train.observation`). N is the number of ranks, P the
bytes of parameters, A those of one activation (batch seq d_model):

    all-reduce 2 P (N-1)/N, reduce-scatter and all-gather P (N-1)/N each     Patarasu and Yuan, 2009
    tensor parallelism, a block, forward and backward: 8 A (N-1)/N           arXiv:1909.08053, section 3
    ZeRO with AdamW in fp32, a parameter: 4 + 4 + 8/N in stage 1             arXiv:1910.02054, section 3
    activations of a block in half precision: s b h (34 + 5 a s / h)         arXiv:2205.05198, table 2
    the bubble of a pipeline: `schedule.bubble_fraction`                     arXiv:2104.04473, section 2.2
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.traffic import TRAFFIC as TRAFFIC
from cs336_systems.traffic import sent


@dataclass(frozen=True)
class Link:
    """The connection of ranks: seconds of the smallest collective, and bytes/s out of each rank while all send."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, ranks: int, verb: str = "all-reduce") -> float:
        """A bandwidth-optimal collective on a tensor of `nbytes` in all, or a message to one rank."""
        return self.latency + sent("send" if verb == "receive" else verb, ranks) * nbytes / self.bandwidth


def exposed_seconds(buckets: Sequence[float], seconds: Sequence[float], backward: float, overlap: bool) -> float:
    """Seconds of the reductions of `buckets` (bytes, in the order of backward) that backward does not hide. A bucket is
    ready when backward has come as far as its share of all bytes; reductions run one after another, at `seconds` each.
    Without overlap they start when backward ends."""
    if not overlap:
        return sum(seconds)
    ready = end = 0.0
    for nbytes, duration in zip(buckets, seconds, strict=True):
        ready += backward * nbytes / sum(buckets)
        end = max(end, ready) + duration
    return max(0.0, end - backward)


def zero_memory(parameters: int, replicated: int, ranks: int, stage: int) -> dict[str, float]:
    """Bytes of a rank between backward and step in fp32 with AdamW: 4 for each parameter, 4 gradient, 8 state.
    `replicated` of the parameters (norms, biases) are not sharded in stage 3."""
    sharded = parameters / ranks
    rest = (parameters - replicated) / ranks + replicated if stage == 3 else float(parameters)
    return {
        "parameters": 4 * rest,
        "gradients": 4 * (rest if stage != 2 else sharded),
        "optimizer": 8 * (rest if stage in (0, 3) else sharded),
    }


def parameter_bytes(half: bool) -> tuple[int, int, int]:
    """Bytes for each parameter of weight, gradient and AdamW's state: 4 + 4 + 8 in float32, 2 + 2 + 12 with a float32
    master in half precision (arXiv:1910.02054, section 3.1)."""
    return (2, 2, 12) if half else (4, 4, 8)


def tensor_parallel_bytes(activation: int, ranks: int) -> float:
    """Bytes that a rank sends for one block, forward and backward, of `activation` bytes (batch seq d_model). That is
    four all-reduces; under sequence parallelism four all-gathers and four reduce-scatters, and two more all-gathers of
    the inputs that are not kept (arXiv:2205.05198, section 4.2.2), which are not counted here."""
    return 4 * sent("all-reduce", ranks) * activation


def block_activations(
    seq: int, batch: int, d_model: int, heads: int, tp: int = 1, sequence: bool = False, recompute: str = "none"
) -> float:
    """Bytes that a block with biases, GELU, LayerNorm, dropout and naive attention keeps for backward in 16 bits: s b h
    (10 + 24 / t + 5 a s / (h t)), or s b h / t (34 + 5 a s / h) under sequence parallelism. Selective `recompute`,
    "attention", saves the scores; "segments" keeps the input alone, 2 s b h."""
    tokens = seq * batch * d_model
    if recompute == "segments":
        return 2 * tokens / (tp if sequence else 1)
    scores = 0 if recompute == "attention" else 5 * heads * seq * seq * batch / tp
    return tokens * (34 / tp if sequence else 10 + 24 / tp) + scores
