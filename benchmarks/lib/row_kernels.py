"""Kernels of `benchmarks.norms` and `benchmarks.fused` that work row by row: norms, SwiGLU, and RMSNorm of a sum."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import rounding
from benchmarks.lib.contest import OURS, spread
from benchmarks.lib.kernel import (
    BOTH,
    FORWARD,
    STAGES,
    Function,
    Inputs,
    Kernel,
    Load,
    SizedTask,
    always,
    compiling,
    drawing,
    ours,
    require_few,
    theirs,
)
from kernels import reference
from kernels.rmsnorm import TritonAddRMSNormFunction, TritonRMSNormFunction
from kernels.swiglu import SwiGLUFunction

EPS = 1e-5
GATE_ROWS = 64


class RowKernel(Kernel):
    """A kernel whose rows are independent, except in the gradient of a weight, which is a sum over them."""

    matrices: ClassVar[Sequence[str]]  # read
    weights: ClassVar[Sequence[str]] = ()
    between: ClassVar[Mapping[tuple[str, str], int]] = {}  # matrices that a candidate needs besides, or shares

    @abstractmethod
    def equations(self, name: str) -> Function:
        """Reference that a candidate is compared with, in the dtype of its inputs."""

    def inputs(self, task: SizedTask, device: torch.device) -> Inputs:
        """Matrices (rows columns), weights (columns) around 1, and results' upstream gradients (rows columns)."""
        draw, _ = drawing(device, task.dtype)
        leaves = {name: draw(task.sizes) for name in self.matrices}
        leaves |= {name: 1 + 0.1 * draw(task.sizes[1]) for name in self.weights}
        return Inputs(leaves, [draw(task.sizes) for _ in self.results] if task.what == BOTH else [])

    def peak_bytes(self, name: str, task: SizedTask) -> int:
        """Matrices, results, and with a backward upstream gradients and gradients."""
        matrices, results = len(self.matrices), len(self.results)
        gradients = matrices + results if task.what == BOTH else 0
        between = self.between.get((name, task.what), 0)
        copies = matrices if name in self.in_place else 0
        return (matrices + results + gradients + between + copies) * task.sizes[0] * task.sizes[1] * task.itemsize

    def gate(self, name: str, function: Function, task: SizedTask, inputs: Inputs) -> float:
        leaves, functions = self.leaves(name, inputs), (function, self.equations(name))
        rows = spread(task.sizes[0], GATE_ROWS, leaves[self.matrices[0]].device)
        bound, places = rounding(STAGES, task.dtype, max(task.sizes[1], GATE_ROWS)), dict.fromkeys(self.matrices, rows)
        return require_few(name, functions, leaves, places, self.results, rows, inputs.grads, bound)


def norm_bytes(rows: int, columns: int, itemsize: int, what: str, partial_rows: int) -> int:
    """The least that a pass of RMSNorm over (rows columns) reads and writes.

    Forward: x, y, the weight, and 1 / rms in float32. Backward: x, dy, dx, the weight, 1 / rms, and the weight's
    gradient, which `partial_rows` programs write in float32, each a row, and a second kernel adds up.
    """
    matrix, weight = rows * columns * itemsize, columns * itemsize
    forward = 2 * matrix + weight + 4 * rows
    backward = 3 * matrix + 2 * weight + 4 * rows + 2 * partial_rows * columns * 4
    return forward if what == FORWARD else forward + backward


def partial_rows(device: torch.device) -> int:
    """Partial sums of a weight's gradient that a GPU needs to be busy: two for each of its multiprocessors."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in plain torch, operation by operation."""
    return reference.rmsnorm(x, weight, EPS)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's LayerNorm, which computes more, but has long been fused."""
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


class Norm(RowKernel):
    """RMSNorm, and LayerNorm, which has a bias besides."""

    name = "norm"
    fraction = "copy_fraction"
    predicts_peak = False  # what the unfused candidates keep between their operations is not known
    matrices, weights = ("x",), ("weight", "bias")
    candidates: Mapping[str, Load] = {
        "layernorm": always(layernorm),
        "eager": always(rmsnorm),
        # Without an eps it would take that of x's dtype, 0.008 in bfloat16.
        "torch": always(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        "compiled": compiling(rmsnorm),
        OURS: ours(lambda x, weight: TritonRMSNormFunction.apply(x, weight, EPS)),
        # Not in place, which would write over dy.
        "liger": theirs("Liger-Kernel", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction", EPS, 0.0, "llama", False),
        "quack": theirs("quack", "quack", "rmsnorm", eps=EPS),
    }

    def config(self, name: str, task: SizedTask, what: str) -> dict[str, Any]:
        found = super().config(name, task, what)
        del found["kernel"]
        return found

    def equations(self, name: str) -> Function:
        return layernorm if name == "layernorm" else rmsnorm

    def leaves(self, name: str, inputs: Inputs) -> dict[str, Tensor]:
        return {what: leaf for what, leaf in inputs.leaves.items() if what != "bias" or name == "layernorm"}

    def moved(self, task: SizedTask, device: torch.device) -> int:
        rows, columns = task.sizes
        return norm_bytes(rows, columns, task.itemsize, task.what, partial_rows(device))


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up in two operations."""
    return F.silu(gate) * up


class SwiGLU(RowKernel):
    """silu(gate) up."""

    name = "swiglu"
    sizes = ((8192, 11008), (32768, 4096))
    cpu_sizes = ((1024, 11008), (4096, 4096))
    matrices = ("gate", "up")
    between: ClassVar[Mapping[tuple[str, str], int]] = {("torch", FORWARD): 1, ("torch", BOTH): 1}  # silu(gate)
    in_place = ("liger",)  # its backward writes the gradients over gate and up
    candidates: Mapping[str, Load] = {
        OURS: ours(SwiGLUFunction.apply),
        "torch": always(torch_swiglu),
        "compiled": compiling(torch_swiglu),
        "liger": theirs("Liger-Kernel", "liger_kernel.ops.swiglu", "LigerSiLUMulFunction"),
    }

    def equations(self, name: str) -> Function:
        return reference.swiglu

    def moved(self, task: SizedTask, device: torch.device) -> int:
        """Forward: gate, up, y. Backward: dy, gate, up, dgate, dup."""
        return (3 if task.what == FORWARD else 8) * task.sizes[0] * task.sizes[1] * task.itemsize


def reference_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The equations in the dtype of the inputs."""
    return reference.rmsnorm(x + residual, weight, EPS), x + residual


def torch_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's sum, then its RMSNorm."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


class AddRMSNorm(RowKernel):
    """rmsnorm(x + residual), and the sum."""

    name = "add-rmsnorm"
    sizes = ((8192, 4096), (32768, 8192))
    cpu_sizes = ((4096, 4096), (2048, 8192))
    matrices, weights, results = ("x", "residual"), ("weight",), ("y", "sum")
    between: ClassVar[Mapping[tuple[str, str], int]] = {(OURS, BOTH): -1}  # one gradient for x and residual
    candidates: Mapping[str, Load] = {
        OURS: ours(lambda x, residual, weight: TritonAddRMSNormFunction.apply(x, residual, weight, EPS)),
        "torch": always(torch_add_rmsnorm),
        "compiled": compiling(torch_add_rmsnorm),
    }

    def equations(self, name: str) -> Function:
        return reference_add_rmsnorm

    def moved(self, task: SizedTask, device: torch.device) -> int:
        """As RMSNorm, with the residual read and the sum written, and in backward the gradient of the sum read; its
        own gradient is that of x and of residual."""
        rows, columns = task.sizes
        more = (2 if task.what == FORWARD else 3) * rows * columns * task.itemsize
        return norm_bytes(rows, columns, task.itemsize, task.what, partial_rows(device)) + more
