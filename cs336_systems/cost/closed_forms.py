"""Closed forms that a course prints: seconds of collectives, those that backward does not hide, memory by ZeRO stage.

Tests hold them to what the library is observed to send and keep (`train.observation`). N is the number of ranks, P the
bytes of parameters:

    all-reduce 2 P (N-1)/N, reduce-scatter and all-gather P (N-1)/N each     Patarasu and Yuan, 2009
    ZeRO with AdamW in fp32, a parameter: 4 + 4 + 8/N in stage 1             arXiv:1910.02054, section 3
    the bubble of a pipeline: `schedule.bubble_fraction`                     arXiv:2104.04473, section 2.2
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
