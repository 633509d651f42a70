"""Description of a kernel for `benchmarks.fused`, and the two that work row by row: SwiGLU, and RMSNorm of a sum."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import require_close
from benchmarks.lib.contest import OURS, UnavailableError, compiled, peer, spread
from benchmarks.lib.kernel_run import DTYPES, UNIT_ROUNDOFF, DtypeName
from benchmarks.lib.norm_candidates import BOTH, FORWARD, partial_rows
from kernels import reference
from kernels.launch import HAVE_TRITON
from kernels.rmsnorm import TritonAddRMSNormFunction
from kernels.swiglu import SwiGLUFunction

COPY = "copy"
EPS = 1e-5
GATE_ROWS = 64
# Roundings that follow one another: two or three to the result, and in backward as many again and a difference.
STAGES = 8

Sizes = tuple[int, ...]
Function = Callable[..., Any]
Load = Callable[[torch.device], Function]


@dataclass(frozen=True)
class FusedTask:
    """One pass of one kernel; the kernel defines the meaning of the sizes."""

    kernel: str
    sizes: Sizes
    dtype: DtypeName
    what: str

    def __str__(self) -> str:
        return f"{self.kernel} {' x '.join(map(str, self.sizes))} {self.dtype} {self.what}"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


def tolerance(task: FusedTask, longest_sum: int) -> float:
    """The error that STAGES roundings and a sum in float32 explain."""
    return STAGES * (UNIT_ROUNDOFF[task.dtype] + longest_sum**0.5 * UNIT_ROUNDOFF["fp32"])


def only_triton(function: Function, device: torch.device) -> Function:
    """Load this project's kernel. Raises UnavailableError without Triton, where plain torch would replace it."""
    if not HAVE_TRITON:
        raise UnavailableError("Triton is not installed")
    return function


def always(function: Function) -> Load:
    """Make a candidate that needs only torch."""
    return lambda device: function


def make_copy(nbytes: int, device: torch.device) -> Callable[[], object]:
    """A copy that moves so many bytes, half of them read and half written."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class Kernel(ABC):
    """Description of a kernel: shapes, candidates, costs, lower bound, and how to check a result."""

    sizes_are: ClassVar[tuple[str, ...]] = ("rows", "columns")
    sizes: ClassVar[tuple[Sizes, ...]]
    cpu_sizes: ClassVar[tuple[Sizes, ...]]
    tiny: ClassVar[Sizes] = (64, 128)  # of a smoke run
    interpreted: ClassVar[Sizes] = (8, 64)  # of the gate in Triton's interpreter
    dtypes: ClassVar[tuple[DtypeName, ...]] = ("bf16", "fp32")  # the first is the default
    passes: ClassVar[tuple[str, ...]] = (FORWARD, BOTH)
    floor: ClassVar[str] = COPY
    candidates: ClassVar[Mapping[str, Load]]
    in_place: ClassVar[tuple[str, ...]] = ()  # candidates whose backward writes over their inputs

    def flops(self, task: FusedTask) -> float:
        """FLOPs of the matrix products."""
        return 0.0

    @abstractmethod
    def moved(self, task: FusedTask, device: torch.device) -> int:
        """The least that a pass reads and writes, in bytes."""

    @abstractmethod
    def peak_bytes(self, name: str, task: FusedTask) -> int:
        """Peak bytes of a candidate, inputs and results included."""

    def other_bytes(self, task: FusedTask) -> int:
        """Other bytes in memory: tensors of the lower bound, and those that candidates keep between turns."""
        return self.moved(task, torch.device("cpu"))

    def gate_bytes(self, task: FusedTask) -> int:
        """Bytes that the check of results needs, if more than the pass."""
        return 0

    @abstractmethod
    def inputs(self, task: FusedTask, device: torch.device) -> Any:
        """Inputs, random but the same for all."""

    @abstractmethod
    def gate(self, name: str, function: Function, task: FusedTask, inputs: Any) -> float:
        """The largest error of a candidate at the shape that is timed, against float64. Raises WrongResultError."""

    @abstractmethod
    def make_pass(self, function: Function, task: FusedTask, inputs: Any) -> Callable[[], object]:
        """Return the function to time, without arguments."""

    def make_floor(self, task: FusedTask, device: torch.device) -> Callable[[], object]:
        """Lower bound on the time of every candidate."""
        return make_copy(self.moved(task, device), device)


class RowInputs:
    """Matrices (rows columns), weights (columns), and the upstream gradient of each result (rows columns)."""

    def __init__(self, task: FusedTask, device: torch.device, counts: tuple[int, int, int]) -> None:
        matrices, weights, results = counts
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=DTYPES[task.dtype])
        learns = task.what == BOTH
        self.matrices = [draw(task.sizes).requires_grad_(learns) for _ in range(matrices)]
        self.weights = [(1 + 0.1 * draw(task.sizes[1])).requires_grad_(learns) for _ in range(weights)]
        self.grads = [draw(task.sizes) for _ in range(results if learns else 0)]
        self.nbytes = sum(t.nbytes for t in (*self.matrices, *self.weights, *self.grads))


class RowKernel(Kernel):
    """A kernel whose rows are independent, except in the gradient of a weight, which is a sum over them."""

    counts: ClassVar[tuple[int, int, int]]  # matrices read, weights, results
    reference: ClassVar[Function]
    between: ClassVar[Mapping[tuple[str, str], int]] = {}  # matrices that a candidate needs besides, or shares

    def inputs(self, task: FusedTask, device: torch.device) -> RowInputs:
        return RowInputs(task, device, self.counts)

    def peak_bytes(self, name: str, task: FusedTask) -> int:
        """Matrices, results, and with a backward upstream gradients and gradients."""
        matrices, _, results = self.counts
        gradients = matrices + results if task.what == BOTH else 0
        between = self.between.get((name, task.what), 0)
        copies = matrices if name in self.in_place else 0
        return (matrices + results + gradients + between + copies) * task.sizes[0] * task.sizes[1] * task.itemsize

    def gate(self, name: str, function: Function, task: FusedTask, inputs: RowInputs) -> float:
        """A few rows, from the first to the last, are enough; the upstream gradient is zero in all others, which then
        add nothing to a weight's gradient."""
        leaves = [*inputs.matrices, *inputs.weights]
        rows, bound = spread(task.sizes[0], GATE_ROWS, leaves[0].device), tolerance(task, max(task.sizes[1], GATE_ROWS))
        wide = [t.detach()[rows].double().requires_grad_() for t in inputs.matrices]
        wide += [t.detach().double().requires_grad_() for t in inputs.weights]
        wanted, got = as_tuple(type(self).reference(*wide)), as_tuple(function(*leaves))
        error = 0.0
        for number, (y, want) in enumerate(zip(got, wanted, strict=True)):
            error = max(error, require_close(f"{name}'s result {number}", y[rows], want, bound))
        if task.what == FORWARD:
            return error
        grads = [torch.zeros_like(grad) for grad in inputs.grads]
        for zeros, grad in zip(grads, inputs.grads, strict=True):
            zeros[rows] = grad[rows]
        ideals = torch.autograd.grad(wanted, wide, [grad[rows].double() for grad in grads])
        for number, (each, ideal) in enumerate(zip(torch.autograd.grad(got, leaves, grads), ideals, strict=True)):
            part = each[rows] if number < len(inputs.matrices) else each
            error = max(error, require_close(f"{name}'s gradient {number}", part, ideal, bound))
        return error

    def make_pass(self, function: Function, task: FusedTask, inputs: RowInputs) -> Callable[[], object]:
        leaves = [*inputs.matrices, *inputs.weights]
        if task.what == FORWARD:
            return lambda: function(*leaves)
        return lambda: torch.autograd.grad(as_tuple(function(*leaves)), leaves, inputs.grads)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """One result or several."""
    return results if isinstance(results, tuple) else (results,)


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up in two operations."""
    return F.silu(gate) * up


def load_liger_swiglu(device: torch.device) -> Function:
    """Liger-Kernel's, whose backward writes the gradients over gate and up."""
    function = peer("Liger-Kernel", "liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    return lambda gate, up: function.apply(gate, up)


class SwiGLU(RowKernel):
    """silu(gate) up."""

    sizes = ((8192, 11008), (32768, 4096))
    cpu_sizes = ((1024, 11008), (4096, 4096))
    counts, reference = (2, 0, 1), staticmethod(reference.swiglu)
    between: ClassVar[Mapping[tuple[str, str], int]] = {("torch", FORWARD): 1, ("torch", BOTH): 1}  # silu(gate)
    in_place = ("liger",)
    candidates: ClassVar[Mapping[str, Load]] = {
        OURS: partial(only_triton, SwiGLUFunction.apply),
        "torch": always(torch_swiglu),
        "compiled": partial(compiled, torch_swiglu),
        "liger": load_liger_swiglu,
    }

    def moved(self, task: FusedTask, device: torch.device) -> int:
        """Forward: gate, up, y. Backward: dy, gate, up, dgate, dup."""
        return (3 if task.what == FORWARD else 8) * task.sizes[0] * task.sizes[1] * task.itemsize


def reference_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The equations in the dtype of the inputs."""
    return reference.rmsnorm(x + residual, weight, EPS), x + residual


def torch_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's sum, then its RMSNorm."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def our_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """This project's kernel."""
    return TritonAddRMSNormFunction.apply(x, residual, weight, EPS)


class AddRMSNorm(RowKernel):
    """rmsnorm(x + residual), and the sum."""

    sizes = ((8192, 4096), (32768, 8192))
    cpu_sizes = ((4096, 4096), (2048, 8192))
    counts, reference = (2, 1, 2), staticmethod(reference_add_rmsnorm)
    between: ClassVar[Mapping[tuple[str, str], int]] = {(OURS, BOTH): -1}  # one gradient for x and residual
    candidates: ClassVar[Mapping[str, Load]] = {
        OURS: partial(only_triton, our_add_rmsnorm),
        "torch": always(torch_add_rmsnorm),
        "compiled": partial(compiled, torch_add_rmsnorm),
    }

    def moved(self, task: FusedTask, device: torch.device) -> int:
        """Forward: x, residual, sum, y, the weight and 1 / rms. Backward: dy, the gradient of the sum, the sum and one
        gradient, which is that of x and of residual; the weight's as in `norm_candidates.bytes_moved`."""
        rows, columns = task.sizes
        matrix, weight = rows * columns * task.itemsize, columns * task.itemsize
        forward = 4 * matrix + weight + 4 * rows
        backward = 4 * matrix + 2 * weight + 4 * rows + 2 * partial_rows(device) * columns * 4
        return forward if task.what == FORWARD else forward + backward
