"""What a device can do at best, the two numbers of a roofline (Williams et al., CACM 52(4), 2009), and what eager torch
adds to them: a start of each operator, and a first touch of new memory."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["forward", "backward", "forward-backward", "step"]
MODES: tuple[Mode, ...] = ("forward", "backward", "forward-backward", "step")

# Bytes from which glibc's malloc maps every block anew (mallopt(3): M_MMAP_THRESHOLD, which grows to 32 MiB).
MAPPED = 2**25


@dataclass(frozen=True)
class Hardware:
    """One device's ceilings and where they come from."""

    name: str
    matmul_flops: float  # FLOP/s of a large matrix product in the precision at hand
    bandwidth: float  # bytes/s that a large copy reads and writes together
    source: str
    launch: float = 0.0  # seconds that the host takes to start an operator
    first_touch: float = 0.0  # seconds a byte of memory that the system has just given: page faults
    asynchronous: bool = False  # operators are started ahead of a device that runs them, as on a GPU

    def __post_init__(self) -> None:
        if self.matmul_flops <= 0 or self.bandwidth <= 0:
            raise ValueError(f"{self.name}: {self.matmul_flops} FLOP/s and {self.bandwidth} bytes/s must be positive")

    def waiting(self, launches: int, busy: float) -> float:
        """Seconds that starting so many operators adds to the `busy` ones in which they are computed: all of them, or
        on a device that runs behind the host those that it has nothing to do in."""
        given_out = launches * self.launch
        return max(0.0, given_out - busy) if self.asynchronous else given_out
