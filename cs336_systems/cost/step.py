"""Seconds of a pass, predicted from counts of its operators and the device's measured ceilings.

Each operator takes as long as its FLOPs at the device's peak or as its bytes at its memory bandwidth, whichever is more
(the roofline; Williams et al., CACM 52(4), 2009). Added to that are each operator's launch and, on a CPU, the first
touch of large tensors. All are added, not overlapped: eager torch runs one operator after another. The lower efficiency
of small products is left out, so tiny models take longer than predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cs336_systems.layout import MAPPED

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
