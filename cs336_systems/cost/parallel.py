"""What data parallelism and ZeRO cost: the time of a collective, how much of it backward hides, memory by stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.volume import TRAFFIC as TRAFFIC
from cs336_systems.volume import sent


@dataclass(frozen=True)
class Link:
    """What joins the ranks: seconds that the smallest collective takes, and bytes/s out of each rank while all send."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, ranks: int, verb: str = "all-reduce") -> float:
        """A bandwidth-optimal collective on a tensor of `nbytes` in all."""
        return self.latency + sent(verb, ranks) * nbytes / self.bandwidth


def exposed_seconds(buckets: Sequence[float], seconds: Sequence[float], backward: float, overlap: bool) -> float:
    """How much of the reductions of `buckets` (bytes, in the order of backward) is not hidden behind backward.

    A bucket is ready when backward has come as far as its share of all bytes; reductions run one after another, at
    `seconds` each. Without overlap they start when backward ends.
    """
    if not overlap:
        return sum(seconds)
    ready = end = 0.0
    for nbytes, duration in zip(buckets, seconds, strict=True):
        ready += backward * nbytes / sum(buckets)
        end = max(end, ready) + duration
    return max(0.0, end - backward)


def zero_memory(parameters: int, replicated: int, ranks: int, stage: int) -> dict[str, float]:
    """Bytes a rank keeps between backward and step in fp32 with AdamW: 4 a parameter, 4 a gradient, 8 of state.

    `replicated` of the parameters (norms, biases) are not sharded in stage 3.
    """
    sharded = parameters / ranks
    rest = (parameters - replicated) / ranks + replicated if stage == 3 else float(parameters)
    return {
        "parameters": 4 * rest,
        "gradients": 4 * (rest if stage != 2 else sharded),
        "optimizer": 8 * (rest if stage in (0, 3) else sharded),
    }
