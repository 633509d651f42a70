"""One rank of a plan, and the types of its work: kernels, collectives and operators.

An operator is one step of a layer on one rank for one microbatch, as large runs compute it: 16-bit activations, and
fused element-wise kernels.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cs336_systems.cost.plan import Plan
from cs336_systems.cost.shape import head_widths
from cs336_systems.presets import ModelConfig

Group = Literal["dense", "sparse", "embedding", "head"]  # a block without or with experts, or an end of the model


class Kernel(NamedTuple):
    """One kernel, or `kernels` alike: `number` GEMMs (rows inner) x (inner columns), or element-wise work."""

    flops: float
    nbytes: float  # read and written, each tensor once
    rows: int = 0
    columns: int = 0
    inner: int = 0
    number: int = 1  # of GEMMs in it
    kernels: int = 1
    width: int = 2  # bytes of a number
    fused: bool = False  # attention in one kernel


class Collective(NamedTuple):
    """A collective along an axis of ranks ("tp", "cp", "ep"); bytes of the whole tensor."""

    verb: str
    axis: str
    nbytes: float


@dataclass(frozen=True)
class Operator:
    """One step of a layer on one rank, for one microbatch."""

    name: str
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    weights: int = 0  # elements on this rank
    kept: float = 0.0  # bytes for backward
    sent: tuple[Collective, ...] = ()  # in forward
    returned: tuple[Collective, ...] = ()  # in backward
    core: bool = False  # of attention, between its linear layers
    expert: bool = False  # its weights differ from rank to rank of ep


@dataclass(frozen=True)
class Rank:
    """One rank of a plan, with its part of a microbatch of sequences of `seq` tokens."""

    config: ModelConfig
    plan: Plan
    seq: int

    @property
    def tokens(self) -> int:
        return self.plan.micro_batch * self.seq // self.plan.cp

    @property
    def stream(self) -> float:
        """Bytes of the residual stream, (tokens d_model)."""
        return float(self.plan.width * self.tokens * self.config.d_model)

    @property
    def resting(self) -> float:
        """Bytes of the residual stream between tensor-parallel layers, where sequence parallelism splits it."""
        return self.stream / self.plan.tp if self.plan.sequence else self.stream

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values. With fewer key/value heads than ranks each rank has one whole head."""
        (key, value), heads = head_widths(self.config), max(self.config.kv_heads // self.plan.tp, 1)
        return self.config.num_heads // self.plan.tp * key, heads * key, heads * value

    @property
    def mixed(self) -> int:
        """Columns of attention's result, before the linear layer out."""
        return self.config.num_heads // self.plan.tp * head_widths(self.config)[1]

    def bytes_of(self, columns: int) -> float:
        """Bytes of (tokens columns)."""
        return float(self.plan.width * self.tokens * columns)

    @property
    def fused(self) -> bool:
        """True if neighbouring element-wise operations are one kernel; in plain torch each is a kernel of its own."""
        return self.config.kernels == "triton"

    def product(self, rows: int, inner: int, columns: int, count: int = 1, number: int = 0) -> Kernel:
        """`count` GEMMs (rows inner) x (inner columns) in one kernel, of numbers of `number` bytes."""
        number = number or self.plan.width
        moved = float(count * (number * (rows * inner + inner * columns) + self.plan.width * rows * columns))
        return Kernel(2.0 * count * rows * inner * columns, moved, rows, columns, inner, count, width=number)

    def linear(
        self, name: str, rows: int, inner: int, columns: int, count: int = 1, wide: bool = False, **rest: Any
    ) -> Operator:
        """GEMM (rows inner) x (inner columns), and in backward the gradients of both factors. In FP8, unless `wide`,
        input and gradient are cast first, each into two layouts, as Hopper's GEMMs want both factors transposed."""
        number = self.plan.width if wide else self.plan.number
        ahead: tuple[Kernel, ...] = (self.product(rows, inner, columns, count, number),)
        back: tuple[Kernel, ...]
        back = self.product(rows, columns, inner, count, number), self.product(inner, rows, columns, count, number)
        if number < self.plan.width:
            ahead = (*ahead, sweep(float((self.plan.width + 2) * count * rows * inner)))
            back = (*back, sweep(float((self.plan.width + 2) * count * rows * columns)))
            rest["kept"] = rest["kept"] / self.plan.width  # the input in 8 bits
        return Operator(name, ahead, back, count * inner * columns, **rest)


def sweep(nbytes: float, kernels: int = 1) -> Kernel:
    """Element-wise kernels that move `nbytes`."""
    return Kernel(0.0, nbytes, kernels=kernels)
