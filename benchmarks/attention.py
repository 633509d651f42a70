"""Time of attention, kernel by kernel, and bytes that it keeps: `python -m benchmarks.attention --grid flash`."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Phases, rounding
from benchmarks.lib.contest import OURS, UnavailableError, spread
from benchmarks.lib.kernel import (
    BACKWARD,
    BOTH,
    DTYPES,
    FORWARD,
    DtypeName,
    Function,
    Inputs,
    Kernel,
    Load,
    drawing,
    ours,
    require_few,
)
from benchmarks.lib.kernel_run import ONE_CANDIDATE, KernelSettings, run_kernels
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.sheets import BEST_OTHER, PEAKS, Sheet, metric
from benchmarks.lib.workload import compile_model
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, setting
from cs336_systems.model.attention import naive_attention
from kernels.flash_attention import MAX_DIM, FlashAttention2
from kernels.tiled_attention import TiledAttentionFunction

GATE_QUERIES = 16
# Roundings that follow one another: scores, scale, exp, weights, their sum, product; in backward D, dP, dS, product.
STAGES = 10
# Of two matrix products backward makes four, and computes the scores a second time: 2.5 times forward's FLOPs.
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class AttentionTask:
    """One shape: q, k and v (batch seq dim); `batch` counts heads too."""

    grid: str
    batch: int
    seq: int
    dim: int
    dtype: DtypeName
    causal: bool
    backward: bool = True  # with a backward, or a forward that keeps nothing for one

    def __str__(self) -> str:
        return f"{self.batch} x {self.seq} x {self.dim} {self.dtype}{' causal' * self.causal}"


def flops(task: AttentionTask, what: str) -> float:
    """4 batch seq^2 dim for the two products of forward, half of it with a causal mask, 2.5 times it for backward."""
    forward = 4.0 * task.batch * task.seq**2 * task.dim / (2 if task.causal else 1)
    return {FORWARD: forward, BACKWARD: BACKWARD_FLOPS * forward, BOTH: (1 + BACKWARD_FLOPS) * forward}[what]


# Bytes a score at the peak of a forward alone and of one with backward, (fp32, bf16): naive attention holds the scaled
# scores and the weights, then the weights and two gradients; weights are in float32 and, for bf16, in that too.
SCORE_BYTES = {
    ("eager", False): (8, 10),
    ("eager", True): (12, 14),
    ("sdpa-math", False): (12, 12),
    ("sdpa-math", True): (14, 16),
    ("compiled", False): (4, 2),  # a lower bound: what the compiler fuses is not known
    ("compiled", True): (8, 4),
}


def peak_bytes(name: str, task: AttentionTask) -> int:
    """Bytes that a candidate needs at its peak: inputs, outputs, gradients, and scores if it keeps them."""
    item = DTYPES[task.dtype].itemsize
    tensors = (8 if task.backward else 4) * task.batch * task.seq * task.dim * item
    per_score = SCORE_BYTES.get((name, task.backward), (0, 0))[task.dtype == "bf16"]
    mask = item * task.seq**2 if task.causal and name in ("eager", "compiled") else 0
    return tensors + per_score * task.batch * task.seq**2 + mask


def load_eager(task: AttentionTask, device: torch.device) -> Function:
    """Load the course's attention, which keeps all scores; a batch of single heads becomes heads of one sequence."""
    bias = None
    if task.causal:
        dtype = DTYPES[task.dtype]
        hidden = torch.full((task.seq, task.seq), torch.finfo(dtype).min, dtype=dtype, device=device)
        bias = hidden.triu(1)
    return lambda q, k, v: naive_attention(q[None], k[None], v[None], bias)[0]


def load_ours(task: AttentionTask, device: torch.device) -> Function:
    """FlashAttention-2 as a kernel, where Triton compiles it. Raises UnavailableError for a dim that it cannot do."""
    if task.dim > MAX_DIM:
        raise UnavailableError(f"takes dims up to {MAX_DIM}, not {task.dim}")
    return ours(lambda q, k, v: FlashAttention2.apply(q, k, v, task.causal))(task, device)


def load_sdpa(backend: SDPBackend, task: AttentionTask, device: torch.device) -> Function:
    """Load one of PyTorch's own. It raises RuntimeError for inputs that it does not take."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=task.causal)[0]

    return attend


CANDIDATES: dict[str, Load] = {
    OURS: load_ours,
    # FlashAttention-2's algorithm in plain torch.
    "tiled": lambda task, device: lambda q, k, v: TiledAttentionFunction.apply(q, k, v, task.causal),
    "eager": load_eager,
    "compiled": lambda task, device: compile_model(load_eager(task, device), device),
    "sdpa-flash": partial(load_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": partial(load_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-cudnn": partial(load_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-math": partial(load_sdpa, SDPBackend.MATH),
}


def inputs(task: AttentionTask, device: torch.device) -> Inputs:
    """q, k, v and the upstream gradient, (batch seq dim) each, random but the same for all."""
    draw, _ = drawing(device, task.dtype)
    shape = (task.batch, task.seq, task.dim)
    leaves = {name: draw(shape) for name in "qkv"}
    return Inputs(leaves, [draw(shape)] if task.backward else [])


def some_queries(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, is_causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v, for q (batch len(queries) dim) that stand at these places of the sequence."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        hidden = torch.arange(k.shape[-2], device=q.device) > queries[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(dim=-1) @ v


def gate(name: str, function: Function, task: AttentionTask, inputs: Inputs) -> float:
    """The largest error of a candidate at the shape that is timed, against float64. Raises WrongResultError.

    The output of a few queries, from the first to the last, needs only them.
    """
    queries = spread(task.seq, GATE_QUERIES, inputs.leaves["q"].device)
    bound = rounding(STAGES, task.dtype, max(task.seq, task.dim))
    at, functions = (slice(None), queries), (function, partial(some_queries, queries=queries, is_causal=task.causal))
    return require_few(name, functions, inputs.leaves, {"q": at}, ["output"], at, inputs.grads, bound)


class Attention(Kernel):
    """Attention: forward, and backward by itself, of one call."""

    floor = ""
    flops = staticmethod(flops)
    peak_bytes = staticmethod(peak_bytes)
    gate = staticmethod(gate)
    inputs = staticmethod(inputs)

    def __init__(self, candidates: Sequence[str], rounds: int, name: str) -> None:
        self.candidates, self.rounds, self.name = {each: CANDIDATES[each] for each in candidates}, rounds, name

    def config(self, name: str, task: AttentionTask, what: str) -> dict[str, Any]:
        shape = asdict(task)
        return {"candidate": name, "pass": what, "keeps": shape.pop("backward")} | shape

    def passes(self, task: AttentionTask) -> tuple[str, ...]:
        return (FORWARD, BACKWARD, BOTH) if task.backward else (FORWARD,)

    def moved(self, task: AttentionTask, device: torch.device) -> int:
        return 0

    def phases(self, name: str, function: Function, task: AttentionTask, inputs: Inputs) -> Phases:
        """Forward, and the backward of its latest output."""
        leaves, held = list(inputs.leaves.values()), list[Tensor]()
        if not task.backward:
            return {FORWARD: lambda: function(*leaves)}
        return {
            FORWARD: lambda: held.append(function(*leaves)),
            BACKWARD: lambda: torch.autograd.grad(held.pop(), leaves, inputs.grads),
        }


Grid = Literal["course", "flash", "leaderboard"]
COURSE_SEQUENCES, FLASH_SEQUENCES = (256, 1024, 4096, 8192, 16384), tuple(2**power for power in range(7, 17))
DIMS = (16, 32, 64, 128)
GRID_CANDIDATES: dict[str, tuple[str, ...]] = {
    "course": (OURS, "eager", "compiled"),
    "flash": tuple(name for name in CANDIDATES if name != "compiled"),
    "leaderboard": tuple(name for name in CANDIDATES if name not in ("compiled", "tiled")),
}
ROUNDS = {"course": 100, "flash": 15, "leaderboard": 30}
LEADERBOARD = (
    AttentionTask("leaderboard", 16, 16384, 64, "bf16", causal=True),
    AttentionTask("leaderboard", 16, 16384, 128, "bf16", causal=False, backward=False),
)


def shape(record: Record) -> str:
    """The shape of a record."""
    config = record.config
    return "{batch} x {seq} x {dim} {dtype}".format(**config) + " causal" * config["causal"]


SHEET = Sheet(
    "batch x seq x dim",
    shape,
    (
        ("FLOP/s", metric("flops_per_s", format_count)),
        ("MFU", metric("mfu", "{:.0%}".format)),
        BEST_OTHER,
        ("kept", metric("before_backward_bytes", format_bytes)),
        *PEAKS,
    ),
    "FLOPs: 4 batch seq^2 dim forward, half with a causal mask; backward 2.5 x. predicted: FLOPs / the rate of the "
    "largest matrix product measured, MFU the FLOP/s over that rate. / best other: time over the fastest other's, in "
    "turns. kept: memory in use before backward (CPU: what forward keeps for it). "
    "predicted peak: inputs, outputs, gradients, and naive attention's scores",
    lambda config: bool(config["pass"] == (BOTH if config["keeps"] else FORWARD)),
)


@dataclass(frozen=True)
class AttentionSettings(KernelSettings):
    """Options of the command line, one field each."""

    candidate: tuple[str, ...] = setting((), ONE_CANDIDATE, type=click.Choice(list(CANDIDATES)))
    grid: Grid = setting("course", "Shapes of one of the write-up's tasks.")
    sequence: tuple[int, ...] = setting((), "Context instead of the grid's; may be repeated.", type=COUNT)
    dim: tuple[int, ...] = setting((), "Head dimension instead of the grid's; may be repeated.", type=COUNT)

    def tasks(self) -> list[AttentionTask]:
        """The shapes of the grid, short sequences first, from which the time of long ones is estimated."""
        if self.grid == "leaderboard":
            return [
                replace(task, seq=seq, dim=dim, dtype=self.dtype or task.dtype)
                for task in LEADERBOARD
                for seq in self.sequence or (task.seq,)
                for dim in self.dim or (task.dim,)
            ]
        flash = self.grid == "flash"
        dtypes: tuple[DtypeName, ...] = ("bf16", "fp32") if flash else ("fp32",)
        return [
            AttentionTask(self.grid, 1 if flash else 8, seq, dim, dtype, causal=flash)
            for dtype in ((self.dtype,) if self.dtype else dtypes)
            for dim in self.dim or DIMS
            for seq in self.sequence or (FLASH_SEQUENCES if flash else COURSE_SEQUENCES)
        ]


def run(settings: AttentionSettings) -> None:
    """Time attention forward and backward on the shapes of one of the write-up's tasks, with predictions."""
    if settings.smoke:
        sequence, dim = settings.sequence or (64,), settings.dim or (16,)
        settings = replace(settings, sequence=sequence, dim=dim, rounds=2)
    kernel = Attention(GRID_CANDIDATES[settings.grid], ROUNDS[settings.grid], f"the grid {settings.grid}")
    work = [(kernel, task) for task in settings.tasks()]
    run_kernels("attention", settings, work, SHEET)


main = command(AttentionSettings)(run)

if __name__ == "__main__":
    sys.exit(console.run_command(main))
