"""Candidates of `benchmarks.attention`: their FLOPs, their memory, and the check of results before timing."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Phases
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
    tolerance,
)
from benchmarks.lib.workload import compile_model
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


def load_compiled(task: AttentionTask, device: torch.device) -> Function:
    """Load the course's attention, compiled by torch.compile."""
    return compile_model(load_eager(task, device), device)


def load_tiled(task: AttentionTask, device: torch.device) -> Function:
    """FlashAttention-2's algorithm in plain torch, tile by tile."""
    return lambda q, k, v: TiledAttentionFunction.apply(q, k, v, task.causal)


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
    "tiled": load_tiled,
    "eager": load_eager,
    "compiled": load_compiled,
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
    bound = tolerance(task, max(task.seq, task.dim), STAGES)
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
