"""Seconds of a pass from what was counted of it and the device's measured ceilings.

Each operator takes as long as its FLOPs at the device's peak or as its bytes at its memory bandwidth, whichever is more
(the roofline; Williams et al., CACM 52(4), 2009). Added to that are a start of each operator and, on a CPU, the first
touch of large tensors. All are added, not overlapped: eager torch runs one operator after another. The lower efficiency
of small products is left out, so tiny models take longer than predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cs336_systems.cost.hardware import MAPPED, Hardware

if TYPE_CHECKING:  # it needs torch, a prediction does not
    from cs336_systems.host.observe import Counts


def predict(phases: Mapping[str, Counts], hardware: Hardware) -> dict[str, float]:
    """Seconds of some phases by kind of work; their sum is the prediction. All of the phase "optimizer" is one kind."""
    seconds = {"matrix products": 0.0, "element-wise": 0.0, "optimizer": 0.0}
    for phase, counts in phases.items():
        for (flops, nbytes), count in counts.work.items():
            kind = "optimizer" if phase == "optimizer" else "matrix products" if flops else "element-wise"
            seconds[kind] += count * max(flops / hardware.matmul_flops, nbytes / hardware.bandwidth)
    started = sum(counts.operators for counts in phases.values())
    touched = sum(counts.new_bytes(MAPPED) for counts in phases.values())
    seconds["launches"] = hardware.waiting(started, sum(seconds.values()))
    return seconds | {"first touch": hardware.first_touch * touched}
