"""Candidates of `benchmarks.norms`, the bytes that their passes move, and the check of results before timing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import require_close
from benchmarks.lib.contest import OURS, Entry, Stopwatch, UnavailableError, compiled, peer, spread
from benchmarks.lib.kernel_run import DTYPES, UNIT_ROUNDOFF, DtypeName
from kernels import reference
from kernels.launch import HAVE_TRITON
from kernels.rmsnorm import TritonRMSNormFunction

EPS = 1e-5
FORWARD, BOTH = "forward", "forward-backward"
GATE_ROWS = 64
# Roundings that follow one another: normalise, scale, and in backward the two products, their mean and the difference.
STAGES = 8

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """One pass over x (rows columns)."""

    rows: int
    columns: int
    dtype: DtypeName
    what: str

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} {self.dtype} {self.what}"


def bytes_moved(shape: Shape, partial_rows: int) -> int:
    """The least that a pass reads and writes.

    Forward: x, y, the weight, and 1 / rms in float32. Backward: x, dy, dx, the weight, 1 / rms, and the weight's
    gradient, which `partial_rows` programs write in float32, each a row, and a second kernel adds up.
    """
    item = DTYPES[shape.dtype].itemsize
    matrix, weight = shape.rows * shape.columns * item, shape.columns * item
    forward = 2 * matrix + weight + 4 * shape.rows
    backward = 3 * matrix + 2 * weight + 4 * shape.rows + 2 * partial_rows * shape.columns * 4
    return forward if shape.what == FORWARD else forward + backward


def partial_rows(device: torch.device) -> int:
    """Partial sums of a weight's gradient that a GPU needs to be busy: two for each of its multiprocessors."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def memory_needed(shape: Shape) -> int:
    """Bytes of what every candidate needs: x and y, dy and dx with a backward, and the copy's source and target."""
    matrices = 4 if shape.what == FORWARD else 9
    return matrices * shape.rows * shape.columns * DTYPES[shape.dtype].itemsize


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in plain torch, operation by operation."""
    return reference.rmsnorm(x, weight, EPS)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's LayerNorm, which computes more, but has long been fused."""
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def torch_rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own RMSNorm. Without an eps it would take that of x's dtype, 0.008 in bfloat16."""
    return F.rms_norm(x, weight.shape, weight, EPS)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    """This project's kernel."""
    return TritonRMSNormFunction.apply(x, weight, EPS)


def load_ours(device: torch.device) -> Function:
    """This project's kernel, where Triton compiles it."""
    if not HAVE_TRITON:
        raise UnavailableError("Triton is not installed")
    return ours


def load_liger(device: torch.device) -> Function:
    """Liger-Kernel's; not in place, which would write over dy."""
    function = peer("Liger-Kernel", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


def load_quack(device: torch.device) -> Function:
    """quack's, in CuTe."""
    function = peer("quack", "quack", "rmsnorm")
    return lambda x, weight: function(x, weight, eps=EPS)


@dataclass(frozen=True)
class Norm:
    """A candidate: how to get it, what it has to equal, and how many weights it has."""

    load: Callable[[torch.device], Function]
    reference: Function = rmsnorm
    weights: int = 1


CANDIDATES = {
    "layernorm": Norm(lambda device: layernorm, layernorm, weights=2),
    "eager": Norm(lambda device: rmsnorm),
    "torch": Norm(lambda device: torch_rmsnorm),
    "compiled": Norm(lambda device: compiled(rmsnorm, device)),
    OURS: Norm(load_ours),
    "liger": Norm(load_liger),
    "quack": Norm(load_quack),
}


class Inputs:
    """x, the upstream gradient (rows columns), a weight and a bias (columns), random but the same for all."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=DTYPES[shape.dtype])
        learns = shape.what == BOTH
        self.x = draw(shape.rows, shape.columns).requires_grad_(learns)
        self.grad = draw(shape.rows if learns else 0, shape.columns)
        offsets = torch.tensor([[1.0], [0.0]], device=device, dtype=self.x.dtype)
        self.weights = tuple(w.requires_grad_(learns) for w in (offsets + 0.1 * draw(2, shape.columns)).unbind())


def gate(name: str, function: Function, norm: Norm, shape: Shape, inputs: Inputs) -> float:
    """The largest error of a candidate at the shape that is timed, against float64. Raises WrongResultError.

    Rows do not depend on each other, so a few, from the first to the last, are enough; the upstream gradient is zero in
    all others, which then add nothing to the weights' gradient.
    """
    x, weights = inputs.x, inputs.weights[: norm.weights]
    rows = spread(shape.rows, GATE_ROWS, x.device)
    wide = [t.detach().double().requires_grad_() for t in (x[rows], *weights)]
    longest = max(shape.columns, len(rows))
    tolerance = STAGES * (UNIT_ROUNDOFF[shape.dtype] + longest**0.5 * UNIT_ROUNDOFF["fp32"])
    y, want = function(x, *weights), norm.reference(*wide)
    error = require_close(f"{name}'s y", y[rows], want, tolerance)
    if shape.what == FORWARD:
        return error
    grad = torch.zeros_like(x)
    grad[rows] = inputs.grad[rows]
    wanted = torch.autograd.grad(want, wide, grad[rows].double())
    grad_x, *grad_weights = torch.autograd.grad(y, (x, *weights), grad)
    for what, got, ideal in zip(("dx", "dw", "db"), (grad_x[rows], *grad_weights), wanted, strict=False):
        error = max(error, require_close(f"{name}'s {what}", got, ideal, tolerance))
    return error


def make_pass(function: Function, norm: Norm, shape: Shape, inputs: Inputs) -> Callable[[], object]:
    """Return the function to time, without arguments."""
    x, weights = inputs.x, inputs.weights[: norm.weights]
    if shape.what == FORWARD:
        return lambda: function(x, *weights)
    return lambda: torch.autograd.grad(function(x, *weights), (x, *weights), inputs.grad)


@cache
def host_us(clock: Stopwatch, name: str, dtype: DtypeName, what: str) -> float:
    """Host microseconds of one call on a tiny shape; on a CPU, all of its time."""
    norm, shape = CANDIDATES[name], Shape(16, 1024, dtype, what)
    run = make_pass(norm.load(clock.device), norm, shape, Inputs(shape, clock.device))
    run()
    return 1e6 * clock.host_seconds(run, calls=50)


def prepare(clock: Stopwatch, name: str, shape: Shape, inputs: Inputs) -> Entry:
    """Check a candidate. Raises the error that keeps it from taking part."""
    norm = CANDIDATES[name]
    host = host_us(clock, name, shape.dtype, shape.what)  # first: compiling for a shape forgets the last
    function = norm.load(clock.device)
    error = gate(name, function, norm, shape, inputs)
    return Entry({shape.what: make_pass(function, norm, shape, inputs)}, error, {"host_us": host})


def prepare_copy(clock: Stopwatch, shape: Shape) -> Entry:
    """A copy that moves as many bytes as the pass, half of them read and half written."""
    half = bytes_moved(shape, partial_rows(clock.device)) // 2
    source = torch.ones(half, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return Entry({shape.what: lambda: target.copy_(source)}, 0.0)
