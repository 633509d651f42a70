"""Times of fused kernels beside a copy, or beside matrix products alone: `python -m benchmarks.fused`."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, ClassVar

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import UNIT_ROUNDOFF, Phases, require_close, rounding
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
from benchmarks.lib.kernel_run import ONE_CANDIDATE, KernelSettings, run_kernels
from benchmarks.lib.options import command
from benchmarks.lib.row_kernels import AddRMSNorm, SwiGLU
from benchmarks.lib.sheets import BEST_OTHER, HOST, PEAKS, Sheet, metric
from benchmarks.records import Record
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_count, setting
from cs336_systems.optim.adamw import AdamW
from kernels.adamw import FusedAdamW
from kernels.cross_entropy import LinearCrossEntropyFunction, chunk_tokens

MATMULS, UPDATE = "matmuls", "step"
GATE_TOKENS = 16
IGNORED = -100


def torch_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute all logits, then their loss."""
    return F.cross_entropy(F.linear(hidden, weight), targets)


class CrossEntropy(Kernel):
    """A language model's head and its loss: three matrix products, and what is between them."""

    name = "cross-entropy"
    sizes_are = ("tokens", "d_model", "vocab")
    sizes = ((4096, 4096, 128_256), (8192, 4096, 128_256), (16384, 1600, 50_257))
    cpu_sizes = ((512, 512, 16_032), (1024, 512, 16_032), (2048, 200, 6282))
    tiny = (8, 16, 100)
    floor = MATMULS
    results = ("loss",)
    candidates: Mapping[str, Load] = {
        OURS: ours(LinearCrossEntropyFunction.apply),
        "torch": always(torch_loss),
        "compiled": compiling(torch_loss),
        # In chunks as ours.
        "liger": theirs(
            "Liger-Kernel", "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"
        ),
    }

    def flops(self, task: SizedTask, what: str) -> float:
        """2 tokens d_model vocab for the logits, and twice that for the two gradients."""
        tokens, d_model, vocab = task.sizes
        return (2.0 if task.what == FORWARD else 6.0) * tokens * d_model * vocab

    def moved(self, task: SizedTask, device: torch.device) -> int:
        """Bytes moved between the products: logits read and, with a backward, their gradient written in place."""
        tokens, _, vocab = task.sizes
        return (1 if task.what == FORWARD else 2) * tokens * vocab * task.itemsize

    def peak_bytes(self, name: str, task: SizedTask) -> int:
        """Inputs and gradients, and a chunk of logits (ours, Liger's) or all of them: torch keeps their logarithms of
        softmax, and two gradients in backward; a compiler needs two of the three at least."""
        tokens, d_model, vocab = task.sizes
        item, learns = task.itemsize, task.what == BOTH
        hidden, weight, logits = tokens * d_model * item, vocab * d_model * item, tokens * vocab * item
        inputs = hidden + weight + 8 * tokens
        if name == OURS:
            chunk = min(tokens, chunk_tokens(vocab, d_model, item)) * (-(-vocab // 64) * 64) * item
            # The weight's gradient is summed in float32; backward makes scaled copies when the chunk is gone.
            return inputs + (hidden + 4 * vocab * d_model + max(chunk, hidden + weight) if learns else chunk)
        if name == "liger":
            chunk = 2 ** (-(-tokens // -(-vocab // d_model)) - 1).bit_length()
            return inputs + min(tokens, chunk) * vocab * item + (hidden + weight if learns else 0)
        kept = 2 if name == "compiled" or not learns else 3
        return inputs + kept * logits + (hidden + weight if learns else 0)

    def inputs(self, task: SizedTask, device: torch.device) -> Inputs:
        """hidden (tokens d_model), weight (vocab d_model) and targets (tokens)."""
        tokens, d_model, vocab = task.sizes
        draw, generator = drawing(device, task.dtype)
        leaves = {"hidden": draw(tokens, d_model), "weight": draw(vocab, d_model).mul_(d_model**-0.5)}
        targets = torch.randint(vocab, (tokens,), generator=generator, device=device)
        return Inputs(leaves, [torch.ones((), device=device)] if task.what == BOTH else [], [targets])

    def gate(self, name: str, function: Function, task: SizedTask, inputs: Inputs) -> float:
        """A few tokens are enough: the targets of all others are ignored, as padding is, so that the loss is that of
        the few, and they alone have a gradient."""
        targets = inputs.others[0]
        some = spread(task.sizes[0], GATE_TOKENS, targets.device)
        bound = rounding(STAGES, task.dtype, max(task.sizes[1:]))
        ignored = torch.full_like(targets, IGNORED)
        ignored[some] = targets[some]
        functions = (lambda *leaves: function(*leaves, ignored)), partial(torch_loss, targets=targets[some])
        return require_few(name, functions, inputs.leaves, {"hidden": some}, self.results, (), inputs.grads, bound)

    def make_floor(self, task: SizedTask, device: torch.device) -> Callable[[], object]:
        """The products alone, each whole, on logits whose rows are padded to 128 bytes."""
        hidden, weight = (leaf.detach() for leaf in self.inputs(task, device).leaves.values())
        vocab = task.sizes[2]
        logits = hidden.new_empty(len(hidden), -(-vocab // 64) * 64)[:, :vocab]
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def products() -> None:
            torch.mm(hidden, weight.T, out=logits)
            if task.what == BOTH:
                torch.mm(logits, weight, out=grad_hidden)
                torch.mm(logits.T, hidden, out=grad_weight)

        return products


def parameters(inputs: Inputs, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Copies of a model's values, with the gradients themselves, as parameters."""
    made = [value.to(dtype, copy=True).requires_grad_() for value in inputs.others]
    for parameter, grad in zip(made, inputs.grads, strict=True):
        parameter.grad = grad.to(dtype)
    return made


def gpt2_shapes(sizes: tuple[int, ...], positions: int = 1024) -> list[tuple[int, ...]]:
    """Shapes of a GPT-2's parameters: (12, 768, 50257) are those of the small one, 124 M in 148 tensors."""
    layers, width, vocab = sizes
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    linear = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    block = [*norm, *norm, *(shape for each in linear for shape in (each, each[1:]))]
    return [(vocab, width), (positions, width), *(block * layers), *norm]


class AdamWStep(Kernel):
    """One update of all parameters of a model."""

    name = "adamw"
    sizes_are = ("layers", "d_model", "vocab")
    sizes = ((12, 768, 50_257),)
    cpu_sizes = ((4, 256, 8192),)
    tiny = (1, 16, 64)
    dtypes = ("fp32",)
    whats = (UPDATE,)
    options: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    candidates: Mapping[str, Load] = {
        OURS: ours(partial(FusedAdamW, **options)),
        "torch-fused": always(partial(torch.optim.AdamW, fused=True, **options)),
        "torch-foreach": always(partial(torch.optim.AdamW, foreach=True, **options)),
        "eager": always(partial(AdamW, **options)),
    }

    def parameters(self, task: SizedTask) -> int:
        """Number of updated parameters."""
        return sum(torch.Size(shape).numel() for shape in gpt2_shapes(task.sizes))

    def moved(self, task: SizedTask, device: torch.device) -> int:
        """Parameter, gradient and two moments read, all but the gradient written: 28 bytes per parameter."""
        return 28 * self.parameters(task)

    def peak_bytes(self, name: str, task: SizedTask) -> int:
        """16 bytes per parameter, the shared values, and temporaries of an operation on all tensors at once."""
        return (24 if name == "torch-foreach" else 20) * self.parameters(task)

    def inputs(self, task: SizedTask, device: torch.device) -> Inputs:
        """Values of a model's parameters, and their gradients, which all candidates share."""
        draw, _ = drawing(device)
        values = [0.02 * draw(shape) for shape in gpt2_shapes(task.sizes)]
        return Inputs({}, [draw(value.shape) for value in values], values)

    def gate(self, name: str, function: Function, task: SizedTask, inputs: Inputs) -> float:
        """Two steps, so that the moments matter, against torch's AdamW in float64: how far each tensor has moved.

        A step of lr is rounded as finely as a parameter of 0.02 allows, which is 20 times as large.
        """
        got, want = parameters(inputs), parameters(inputs, torch.float64)
        for optimizer in (function(got), torch.optim.AdamW(want, foreach=False, **self.options)):
            optimizer.step()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = -0.5 * parameter.grad
            optimizer.step()
        error, bound = 0.0, STAGES * 20 * UNIT_ROUNDOFF["fp32"]
        for number, (a, b, start) in enumerate(zip(got, want, inputs.others, strict=True)):
            moved = a.detach().double() - start, b.detach() - start
            error = max(error, require_close(f"{name}'s parameter {number}", *moved, bound))
        return error

    def phases(self, name: str, function: Function, task: SizedTask, inputs: Inputs) -> Phases:
        return {task.what: function(parameters(inputs)).step}


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CrossEntropy(), SwiGLU(), AddRMSNorm(), AdamWStep())}


KNOWN = list(dict.fromkeys(chain.from_iterable(kernel.candidates for kernel in KERNELS.values())))


def shape(record: Record) -> str:
    """The kernel and the sizes of a record."""
    config = record.config
    sizes = " x ".join(str(config[name]) for name in KERNELS[config["kernel"]].sizes_are)
    return f"{config['kernel']} {sizes} {config['dtype']}"


def rate(record: Record) -> str:
    """FLOP/s of a kernel with matrix products, bytes/s of the others."""
    unit = ("flops_per_s", "FLOP/s") if record.metrics.get("flops") else ("bytes_per_s", "B/s")
    return metric(unit[0], lambda value: f"{format_count(value)}{unit[1]}")(record)


SHEET = Sheet(
    "sizes",
    shape,
    (("rate", rate), ("of floor", metric("floor_fraction_median", "{:.0%}".format)), BEST_OTHER, HOST, *PEAKS),
    "of floor: the time of the floor, in turn with the candidates, over the candidate's. The floor is a copy of as many"
    " bytes, for cross-entropy (tokens x d_model x vocab) the matrix products alone, of which 80% are the goal. "
    "rate: counts no more than what the floor does, bytes or FLOPs. adamw (layers x d_model x vocab of a GPT-2): one "
    "step of all its parameters. predicted: FLOPs / the rate of the largest product "
    "+ bytes / the rate of a large copy. / best other: time over the fastest other's. host, on a GPU: for how long a "
    "call keeps the CPU busy. predicted peak: inputs, results, gradients, state, and logits as far as they are kept",
    lambda config: bool(config["pass"] != FORWARD),
)
KERNEL_NAMES = click.Choice(list(KERNELS))


@dataclass(frozen=True)
class FusedSettings(KernelSettings):
    """Options of the command line, one field each."""

    candidate: tuple[str, ...] = setting((), ONE_CANDIDATE, type=click.Choice(list(KNOWN)))
    kernel: tuple[str, ...] = setting((), "Only this kernel; may be repeated.  [default: all]", type=KERNEL_NAMES)

    def kernels(self) -> list[str]:
        """The kernels that were asked for."""
        return [name for name in KERNELS if name in (self.kernel or KERNELS)]

    def tasks(self, device: torch.device) -> list[SizedTask]:
        """Measurements in order: all kernels' first shapes, then the second ones, in case the budget ends."""
        columns = []
        for name in self.kernels():
            kernel, dtype = KERNELS[name], self.dtype or KERNELS[name].dtypes[0]
            shapes = (kernel.tiny,) if self.smoke else kernel.cpu_sizes if device.type == "cpu" else kernel.sizes
            whats = kernel.whats if dtype in kernel.dtypes else ()
            columns.append([[SizedTask(name, shape, dtype, what) for what in whats] for shape in shapes])
        return [task for row in zip_longest(*columns, fillvalue=[]) for tasks in row for task in tasks]


@command(FusedSettings)
def main(settings: FusedSettings) -> None:
    """Time fused kernels, the unfused code, and a lower bound (a copy, or the matrix products), beside predictions."""
    if settings.smoke:
        settings = replace(settings, rounds=2)
    device = settings.on
    work = [(KERNELS[task.kernel], task) for task in settings.tasks(device)]
    if not work:
        raise UserError(f"nothing to measure: {', '.join(settings.kernels())} is not measured in {settings.dtype}")
    remark = "" if settings.smoke else "on a CPU shapes are scaled down to what it computes in a moment"
    run_kernels("fused", settings, work, SHEET, remark)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
