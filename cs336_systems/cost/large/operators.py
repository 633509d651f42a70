"""What an operator is to the model of time: the kernels it runs, the bytes it keeps for backward, and what it sends.

An operator is one step of a layer on one rank for one microbatch. `block_operators.py` lists those of a block,
`end_operators.py` those of embedding, head and loss.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cs336_systems.cost.large.plan import Plan
from cs336_systems.presets import ModelConfig


class Work(NamedTuple):
    """One kernel, or `kernels` alike: `number` matrix products (rows inner) x (inner columns), or element-wise work."""

    flops: float
    nbytes: float  # read and written, each tensor once
    rows: int = 0
    columns: int = 0
    inner: int = 0
    number: int = 1  # of products in it
    kernels: int = 1
    width: int = 2  # bytes of a number
    fused: bool = False  # attention in one kernel


class Collective(NamedTuple):
    """What is sent along an axis of ranks ("tp", "cp", "ep"): bytes of the whole tensor."""

    verb: str
    axis: str
    nbytes: float


@dataclass(frozen=True)
class Operator:
    """One step of a layer on one rank, for one microbatch."""

    name: str
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    weights: int = 0  # elements on this rank
    kept: float = 0.0  # bytes for backward
    sent: tuple[Collective, ...] = ()  # in forward
    returned: tuple[Collective, ...] = ()  # in backward
    core: bool = False  # what selective recomputation runs again (arXiv:2205.05198, section 5)
    expert: bool = False  # its weights differ from rank to rank of ep

    @property
    def flops(self) -> tuple[float, float]:
        """(forward, backward) FLOPs."""
        return sum(work.flops for work in self.forward), sum(work.flops for work in self.backward)

    @property
    def nbytes(self) -> tuple[float, float]:
        """(forward, backward) bytes read and written."""
        return sum(work.nbytes for work in self.forward), sum(work.nbytes for work in self.backward)


@dataclass(frozen=True)
class Rank:
    """One rank of a plan with its part of a microbatch of `seq` tokens: what its operators are made of."""

    config: ModelConfig
    plan: Plan
    seq: int

    @property
    def tokens(self) -> int:
        """Of this rank's part of the sequences."""
        return self.plan.micro_batch * self.seq // self.plan.cp

    @property
    def stream(self) -> float:
        """Bytes of (tokens d_model)."""
        return float(self.plan.width * self.tokens * self.config.d_model)

    @property
    def resting(self) -> float:
        """Bytes of the same between tensor-parallel layers, where sequence parallelism splits it."""
        return self.stream / self.plan.tp if self.plan.sequence else self.stream

    @property
    def keys(self) -> int:
        """Width of the keys, or the values. With fewer heads of them than ranks each rank has one whole head."""
        return max(self.config.kv_heads // self.plan.tp, 1) * self.config.head_dim

    @property
    def fused(self) -> bool:
        """Whether element-wise work next to each other is one kernel; else each operation of plain torch is one."""
        return self.config.kernels == "triton"

    def product(self, rows: int, inner: int, columns: int, count: int = 1) -> Work:
        """`count` products (rows inner) x (inner columns) in one kernel."""
        moved = float(self.plan.width * count * (rows * inner + inner * columns + rows * columns))
        return Work(2.0 * count * rows * inner * columns, moved, rows, columns, inner, count, width=self.plan.width)

    def linear(self, name: str, rows: int, inner: int, columns: int, count: int = 1, **rest: Any) -> Operator:
        """(rows inner) x (inner columns), and backward the gradients of both factors."""
        back = self.product(rows, columns, inner, count), self.product(inner, rows, columns, count)
        return Operator(name, (self.product(rows, inner, columns, count),), back, count * inner * columns, **rest)


def sweep(nbytes: float, kernels: int = 1) -> Work:
    """Element-wise work that moves so many bytes."""
    return Work(0.0, nbytes, kernels=kernels)


def norm(rank: Rank, name: str) -> Operator:
    """A norm in one kernel; backward reads the stream and its gradient, and adds up that of the weight in another.

    Plain torch has LayerNorm in one kernel, but squares, averages and scales for RMSNorm one after another.
    """
    vectors = 2 if rank.config.norm == "layernorm" else 1
    if vectors == 2 or rank.fused:
        work = (sweep(2 * rank.resting),), (sweep(3 * rank.resting, 2),)
    else:
        work = (sweep(8 * rank.resting, 4),), (sweep(14 * rank.resting, 8),)
    weights = rank.config.d_model * (2 if vectors == 2 and rank.config.bias else 1)
    return Operator(name, *work, weights=weights, kept=rank.resting)


def entry(rank: Rank) -> dict[str, Any]:
    """What the first product of a branch sends: the gradient of its input is a sum over tensor parallelism.

    Under sequence parallelism the input is gathered, in backward once more (arXiv:2205.05198, section 4.2.2).
    """
    if not rank.plan.sequence:
        return {"returned": (Collective("all-reduce", "tp", rank.stream),)}
    gather, scatter = (Collective(verb, "tp", rank.stream) for verb in ("all-gather", "reduce-scatter"))
    return {"sent": (gather,), "returned": (gather, scatter)}


def leave(rank: Rank, name: str) -> Operator:
    """The sum over tensor parallelism; then bias, dropout and residual stream, in one kernel or a kernel each."""
    stream, mask = rank.resting, rank.resting / rank.plan.width if rank.config.dropout else 0.0
    sent = (Collective("reduce-scatter" if rank.plan.sequence else "all-reduce", "tp", rank.stream),)
    returned = (Collective("all-gather", "tp", rank.stream),) if rank.plan.sequence else ()
    apart = 0 if rank.fused else (2 if rank.config.bias else 0) + (2 if rank.config.dropout else 0)
    work = (sweep((3 + apart) * stream + mask, 1 + apart // 2),)
    back = (sweep(2 * stream + mask if rank.config.dropout else stream),)
    return Operator(name, work, back, kept=mask, sent=sent, returned=returned)
