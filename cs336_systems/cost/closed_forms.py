"""Seconds of a pass of this project's own code, and closed forms that a course prints: seconds of collectives, those
that backward does not hide, memory by ZeRO stage.

A pass is predicted from counts of its operators and the device's measured ceilings. Each operator takes as long as its
FLOPs at the peak or its bytes at the memory bandwidth, whichever is more (the roofline; Williams et al., CACM 52(4),
2009); its launch and, on a CPU, the first touch of large tensors are added, and nothing overlaps in eager torch. Small
products' lower efficiency is left out, so tiny models take longer than predicted.

Tests hold the closed forms to what is observed (`train.observation`). N is the number of ranks, P parameters' bytes:

    all-reduce 2 P (N-1)/N, reduce-scatter and all-gather P (N-1)/N each     Patarasu and Yuan, 2009
    ZeRO with AdamW in fp32, a parameter: 4 + 4 + 8/N in stage 1             arXiv:1910.02054, section 3
    the bubble of a pipeline: `schedule.bubble_fraction`                     arXiv:2104.04473, section 2.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cs336_systems.layout import MAPPED
from cs336_systems.traffic import sent

if TYPE_CHECKING:  # it needs torch, a prediction does not
    from cs336_systems.host.observe import Counts

Mode = Literal["forward", "backward", "forward-backward", "step"]
MODES: tuple[Mode, ...] = ("forward", "backward", "forward-backward", "step")


@dataclass(frozen=True)
class Hardware:
    """One device's ceilings and where they come from."""

    name: str
    matmul_flops: float  # FLOP/s of a large matrix product in the precision at hand
    bandwidth: float  # bytes/s that a large copy reads and writes together
    source: str
    launch: float = 0.0  # seconds that the host takes to start an operator
    first_touch: float = 0.0  # seconds per byte of memory that the system has just given: page faults
    asynchronous: bool = False  # operators are started ahead of a device that runs them, as on a GPU

    def __post_init__(self) -> None:
        if self.matmul_flops <= 0 or self.bandwidth <= 0:
            raise ValueError(f"{self.name}: {self.matmul_flops} FLOP/s and {self.bandwidth} bytes/s must be positive")

    def waiting(self, launches: int, busy: float) -> float:
        """Seconds that launching this many operators adds to the `busy` seconds of computing them: all of it, or on an
        asynchronous device only the time in which it has nothing to do."""
        given_out = launches * self.launch
        return max(0.0, given_out - busy) if self.asynchronous else given_out


def predict(phases: Mapping[str, Counts], hardware: Hardware) -> dict[str, float]:
    """Seconds of some phases by kind of work; their sum is the prediction. All of the phase "optimizer" is one kind."""
    seconds = {"matrix products": 0.0, "element-wise": 0.0, "optimizer": 0.0}
    for phase, counts in phases.items():
        for (flops, nbytes), count in counts.work.items():
            kind = "optimizer" if phase == "optimizer" else "matrix products" if flops else "element-wise"
            seconds[kind] += count * max(flops / hardware.matmul_flops, nbytes / hardware.bandwidth)
    started = sum(counts.work.total() for counts in phases.values())
    touched = sum(counts.new_bytes(MAPPED) for counts in phases.values())
    seconds["launches"] = hardware.waiting(started, sum(seconds.values()))
    return seconds | {"first touch": hardware.first_touch * touched}


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
