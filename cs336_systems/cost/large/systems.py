"""The machines that a prediction can be made for: one accelerator's ceilings, and a network of two tiers.

Figures are of data sheets, for one accelerator, dense (not sparse), and in one direction where a link is concerned:
data sheets count both. What is reached in practice is not here but in `efficiency.py`, once for all machines, except
`attainable`: what the vendor's library reaches on large 16-bit products at the clock that power allows.
"""

from dataclasses import dataclass, field

from cs336_systems.cost.large.plan import Overlap
from cs336_systems.cost.parallel import Link
from cs336_systems.errors import UserError


@dataclass(frozen=True)
class System:
    """One kind of accelerator and what joins many of them; every figure for a single accelerator."""

    name: str
    matmul_flops: float  # FLOP/s of 16-bit products with 32-bit sums, dense
    wide_flops: float  # the same of 32-bit numbers, in TF32 where there is that
    attainable: float  # the share of these that the largest products reach
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes
    processors: int  # that share a product's tiles: streaming multiprocessors
    node: int  # accelerators that the faster network joins
    inside: Link  # of a node: seconds a message needs at least, bytes/s out of one accelerator
    between: Link  # nodes, the same
    sources: dict[str, str] = field(default_factory=dict, compare=False)  # of each figure
    touch: float = 0.0  # seconds a byte of memory that the system has just given: page faults of a CPU
    measured: dict[str, float] = field(default_factory=dict, compare=False)  # constants that are this machine's own
    overlap: Overlap = "data"  # what the frameworks of its time send while layers compute

    def rate(self, width: int) -> float:
        """FLOP/s that large products of numbers of so many bytes reach."""
        return (self.wide_flops if width == 4 else self.matmul_flops) * self.attainable


# Seconds that a ring's step takes, in large messages (NCCL's own model, src/graph/tuning.cc, protocol Simple).
_NVLINK, _NETWORK = 3.4e-6, 14e-6
DEFAULT_SYSTEM = "A100-80GB"
GIB = 2**30  # what data sheets call a GB of an accelerator's memory, as its driver reports it

_A100_SHEET = "NVIDIA A100 data sheet and whitepaper v1.0, table 1"
_H100_SHEET = "NVIDIA H100 data sheet and whitepaper v1.03, table 2: SXM5, dense"
_MAMF = "the largest of stas00/ml-engineering's table of achievable matmul FLOPS (compute/accelerator)"
_RING = "NCCL src/graph/tuning.cc, ring, protocol Simple"
_V100_SOURCES = {
    "overlap": "Megatron-LM of its time: reductions of gradients",
    "matmul_flops": "NVIDIA Tesla V100 whitepaper WP-08608, table 1",
    "wide_flops": "the same; no TF32, so 32-bit units",
    "attainable": "110 TFLOP/s, judged: cuBLAS is quoted at 95 to 110, products in registers at 116",
    "bandwidth": "data sheet; 4096 bit x 877 MHz x 2 = 898 GB/s",
    "memory": "data sheet",
    "processors": "data sheet",
    "node": "DGX-2: 16 behind NVSwitch",
    "inside": f"6 links of 25 GB/s in a direction; latency: {_RING}",
    "between": f"DGX-2 user guide: 8 ports of 100 Gb/s for 16 accelerators; latency: {_RING}",
}
_A100_SOURCES = {
    "overlap": "Megatron-LM of its time: reductions of gradients",
    "matmul_flops": _A100_SHEET,
    "wide_flops": f"{_A100_SHEET}: TF32",
    "attainable": f"271.2 TFLOP/s: {_MAMF}",
    "bandwidth": f"{_A100_SHEET}: 1555 GB/s with 40 GB, 2039 GB/s with 80 GB",
    "memory": _A100_SHEET,
    "processors": _A100_SHEET,
    "node": "DGX A100: 8 behind NVSwitch",
    "inside": f"12 links of 25 GB/s in a direction; latency: {_RING}",
    "between": f"DGX A100 user guide: one HDR port of 200 Gb/s for each; latency: {_RING}",
}
_THETA_SOURCES = _A100_SOURCES | {
    "between": f"ALCF user guide: 20 HDR200 switches, 8 ports a node; latency: {_RING}",
}
_H100_SOURCES = {
    "overlap": "recipes of NeMo and Megatron-Core: tensor-parallel gathers and scatters, messages, gradients",
    "matmul_flops": _H100_SHEET,
    "wide_flops": f"{_H100_SHEET}: TF32",
    "attainable": f"0.80 in bursts ({_MAMF}); 0.75 judged for hours at 700 W",
    "bandwidth": "data sheet: HBM3 of 3350 GB/s on the H100, HBM3e of 4800 GB/s on the H200",
    "memory": "data sheet: 80 GB on the H100, 141 GB on the H200",
    "processors": _H100_SHEET,
    "node": "DGX H100: 8 behind NVSwitch",
    "inside": f"18 links of 25 GB/s in a direction; latency: {_RING}",
    "between": f"DGX H100 user guide: one NDR port of 400 Gb/s for each; latency: {_RING}",
}
_B200_SOURCES = {
    "overlap": "recipes of NeMo and Megatron-Core: tensor-parallel gathers and scatters, messages, gradients",
    "matmul_flops": "NVIDIA DGX B200 data sheet: 18 PFLOP/s dense for 8",
    "wide_flops": "the same: TF32, 9 PFLOP/s dense for 8",
    "attainable": f"0.78 in bursts ({_MAMF}), less as much as judged for the H100",
    "bandwidth": "data sheet",
    "memory": "DGX B200 data sheet: 1440 GB for 8",
    "processors": "device queries in public logs; no data sheet says it",
    "node": "DGX B200: 8 behind NVSwitch",
    "inside": f"18 links of 50 GB/s in a direction; latency: {_RING}",
    "between": f"DGX B200 data sheet: one port of 400 Gb/s for each; latency: {_RING}",
}
_SYSTEMS = (
    System(
        "V100-32GB-DGX2", 125e12, 15.7e12, 0.88, 900e9, 32 * GIB, 80, 16, Link(_NVLINK, 150e9), Link(_NETWORK, 6.25e9),
        _V100_SOURCES,
    ),
    System(
        "A100-40GB", 312e12, 156e12, 0.87, 1555e9, 40 * GIB, 108, 8, Link(_NVLINK, 300e9), Link(_NETWORK, 25e9),
        _A100_SOURCES,
    ),
    System(
        "A100-80GB", 312e12, 156e12, 0.87, 2039e9, 80 * GIB, 108, 8, Link(_NVLINK, 300e9), Link(_NETWORK, 25e9),
        _A100_SOURCES,
    ),
    System(
        "ThetaGPU", 312e12, 156e12, 0.87, 1555e9, 40 * GIB, 108, 8, Link(_NVLINK, 300e9), Link(_NETWORK, 25e9),
        _THETA_SOURCES,
    ),
    System(
        "H100", 989.4e12, 494.7e12, 0.75, 3350e9, 80 * GIB, 132, 8, Link(_NVLINK, 450e9), Link(_NETWORK, 50e9),
        _H100_SOURCES, overlap="all",
    ),
    System(
        "H200", 989.4e12, 494.7e12, 0.75, 4800e9, 141 * GIB, 132, 8, Link(_NVLINK, 450e9), Link(_NETWORK, 50e9),
        _H100_SOURCES, overlap="all",
    ),
    System(
        "B200", 2250e12, 1125e12, 0.73, 8000e9, 180 * GIB, 148, 8, Link(_NVLINK, 900e9), Link(_NETWORK, 50e9),
        _B200_SOURCES, overlap="all",
    ),
)  # fmt: skip
SYSTEMS = {system.name.lower(): system for system in _SYSTEMS}


def system_preset(name: str) -> System:
    """The named machine, in capitals or not. Raises UserError for a name that is not known, listing those that are."""
    if name.lower() not in SYSTEMS:
        raise UserError(f"no machine is called {name!r}: choose from {', '.join(each.name for each in _SYSTEMS)}")
    return SYSTEMS[name.lower()]


def nearest_system(name: str) -> System | None:
    """The machine that a run's own words mean: a known name that they begin with, or its family with "H100-SXM5-80GB",
    and of two A100 the one with 80 GB unless they say 40; None for words that name no known family."""
    asked = name.lower().replace("_", "-").replace(" ", "-")
    for known in sorted(SYSTEMS, key=len, reverse=True):
        if asked == known or asked.startswith(f"{known}-"):
            return SYSTEMS[known]
    if "a100" in asked:
        return SYSTEMS["a100-40gb" if "40" in asked.replace("a100", "") else "a100-80gb"]
    families = {"v100": "v100-32gb-dgx2", "theta": "thetagpu", "h100": "h100", "h200": "h200", "b200": "b200"}
    return next((SYSTEMS[known] for family, known in families.items() if family in asked), None)
