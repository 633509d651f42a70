"""What a device can do at best: the two numbers of a roofline (Williams et al., CACM 52(4), 2009)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device's ceilings and where they come from."""

    name: str
    matmul_flops: float  # FLOP/s of a large matrix product in the precision at hand
    bandwidth: float  # bytes/s that a large copy reads and writes together
    source: str

    def __post_init__(self) -> None:
        if self.matmul_flops <= 0 or self.bandwidth <= 0:
            raise ValueError(f"{self.name}: {self.matmul_flops} FLOP/s and {self.bandwidth} bytes/s must be positive")
