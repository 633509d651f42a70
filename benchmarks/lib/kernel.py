"""A kernel to time: its candidates, costs and lower bound, and the check of results before timing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from benchmarks.harness import Phases, require_close, saved_storages
from benchmarks.lib.contest import Entry, Stopwatch, UnavailableError
from benchmarks.lib.workload import compile_model
from cs336_systems.host.machine import PeakMemory
from kernels.launch import HAVE_TRITON

DtypeName = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward-backward"
COPY = "copy"
# Roundings that follow one another: two or three to the result, and in backward as many again and a difference.
STAGES = 8

Function = Callable[..., Any]
Load = Callable[[Any, torch.device], Function]  # makes a candidate for a task
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class SizedTask:
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


@dataclass
class Inputs:
    """Arguments of the candidates: tensors by name, in order, which get gradients if there are upstream gradients
    (`grads`, one for each result); then tensors without gradients."""

    leaves: dict[str, Tensor]
    grads: list[Tensor]
    others: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for leaf in self.leaves.values():
            leaf.requires_grad_(bool(self.grads))

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(t.nbytes for t in (*self.leaves.values(), *self.grads, *self.others))


def drawing(device: torch.device, dtype: DtypeName = "fp32") -> tuple[Callable[..., Tensor], torch.Generator]:
    """A function that draws normal tensors, and its generator: random numbers, but the same for all candidates."""
    generator = torch.Generator(device).manual_seed(0)
    return partial(torch.randn, generator=generator, device=device, dtype=DTYPES[dtype]), generator


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """One result or several."""
    return results if isinstance(results, tuple) else (results,)


class Kernel(ABC):
    """Description of a kernel: candidates, costs, lower bound, and how to check a result. Here are those of a kernel
    each of whose tasks is one pass (`SizedTask`)."""

    name: str
    sizes_are: ClassVar[tuple[str, ...]] = ("rows", "columns")
    sizes: ClassVar[tuple[Sizes, ...]]  # that are measured
    cpu_sizes: ClassVar[tuple[Sizes, ...]]
    tiny: ClassVar[Sizes] = (8, 64)  # of a smoke run
    dtypes: ClassVar[tuple[DtypeName, ...]] = ("bf16", "fp32")  # the first is the default
    whats: ClassVar[tuple[str, ...]] = (FORWARD, BOTH)
    results: ClassVar[Sequence[str]] = ("y",)
    floor: ClassVar[str] = COPY  # name of the lower bound that takes turns with the candidates, empty for none
    fraction: ClassVar[str] = "floor_fraction"  # metric of the floor's time over the candidate's
    rounds: int = 15
    candidates: Mapping[str, Load]
    in_place: ClassVar[tuple[str, ...]] = ()  # candidates whose backward writes over their inputs
    predicts_peak: ClassVar[bool] = True  # otherwise `peak_bytes` is a lower bound, and not recorded

    def config(self, name: str, task: Any, what: str) -> dict[str, Any]:
        """Settings that identify the measurement of a pass."""
        sizes = dict(zip(self.sizes_are, task.sizes, strict=True))
        return {"kernel": task.kernel, "candidate": name, "pass": what} | sizes | {"dtype": task.dtype}

    def passes(self, task: Any) -> tuple[str, ...]:
        """The passes that are timed at once; the last one is the sum of all."""
        return (task.what,)

    def flops(self, task: Any, what: str) -> float:
        """FLOPs of the matrix products of a pass."""
        return 0.0

    @abstractmethod
    def moved(self, task: Any, device: torch.device) -> int:
        """The least that the passes read and write, in bytes; 0 if only their products count."""

    @abstractmethod
    def peak_bytes(self, name: str, task: Any) -> int:
        """Peak bytes of a candidate, inputs and results included."""

    def bytes_needed(self, name: str, task: Any) -> int:
        """Bytes that have to be free for a candidate to take part, beside the lower bound's tensors."""
        return self.peak_bytes(name, task) + self.moved(task, torch.device("cpu"))

    @abstractmethod
    def inputs(self, task: Any, device: torch.device) -> Any:
        """Inputs, random but the same for all."""

    @abstractmethod
    def gate(self, name: str, function: Function, task: Any, inputs: Any) -> float:
        """The largest error of a candidate at the shape that is timed, against float64. Raises WrongResultError."""

    def leaves(self, name: str, inputs: Inputs) -> dict[str, Tensor]:
        """The inputs of a candidate that have gradients."""
        return inputs.leaves

    def phases(self, name: str, function: Function, task: Any, inputs: Any) -> Phases:
        """Functions to time one after the other, without arguments."""
        leaves, count = list(self.leaves(name, inputs).values()), len(inputs.grads)
        given = (*leaves, *inputs.others)
        if not count:
            return {task.what: lambda: function(*given)}
        return {task.what: lambda: torch.autograd.grad(as_tuple(function(*given))[:count], leaves, inputs.grads)}

    def prepare(self, clock: Stopwatch, name: str, task: Any, inputs: Any) -> Entry:
        """Check a candidate, and measure its memory. Raises the error that keeps it out.

        On a CPU, the memory of a compiled candidate is unknown: the compiler itself was in the process.
        """
        device = clock.device
        on_gpu = device.type == "cuda"
        others = torch.cuda.memory_allocated(device) - inputs.nbytes if on_gpu else -inputs.nbytes
        function = self.candidates[name](task, device)
        if name in self.in_place:
            inputs = self.inputs(task, device)  # of its own
        metrics: dict[str, Any] = {"gate_error": self.gate(name, function, task, inputs), "peak_memory_bytes": None}
        memory = PeakMemory(device)  # only now: on a CPU, what the gate has freed may still be held
        entry = Entry(self.phases(name, function, task, inputs), metrics)
        first, *rest = entry.phases.values()
        if rest:
            metrics["before_backward_bytes"] = None
        else:
            first()  # an optimizer makes its state
        if on_gpu or name != "compiled":
            memory.reset()
            if rest and on_gpu:
                first()
                metrics["before_backward_bytes"] = torch.cuda.memory_allocated(device) - others
            elif rest:
                with saved_storages() as saved:
                    first()
                metrics["before_backward_bytes"] = sum(storage.nbytes() for storage in saved.values())
                saved.clear()
            for run in rest or [first]:
                run()
            peak = memory.read()
            metrics["peak_memory_bytes"] = None if peak is None else peak - others
        return entry

    def make_floor(self, task: Any, device: torch.device) -> Callable[[], object]:
        """Lower bound on the time of every candidate: a copy that moves as many bytes, half of them read and half
        written."""
        source = torch.ones(self.moved(task, device) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def require_few(
    name: str,
    functions: tuple[Function, Function],
    leaves: Mapping[str, Tensor],
    places: Mapping[str, Any],
    results: Iterable[str],
    at: Any,
    grads: Sequence[Tensor],
    bound: float,
) -> float:
    """The largest error of a candidate's results, and of its gradients if there are upstream ones, at a few rows;
    `functions` are the candidate and what it should compute. Raises WrongResultError.

    The results' rows `at` need only those rows of some leaves, which `places` has by name, and all of the others. The
    upstream gradients are zero in all other rows, which then add nothing to a gradient.
    """
    function, exact = functions
    wide = {what: leaf.detach()[places.get(what, ())].double().requires_grad_() for what, leaf in leaves.items()}
    wanted, got = as_tuple(exact(*wide.values())), as_tuple(function(*leaves.values()))
    error = 0.0
    for what, y, want in zip(results, got, wanted, strict=False):  # one of the others returns more
        error = max(error, require_close(f"{name}'s {what}", y[at], want, bound))
    if not grads:
        return error
    few = [torch.zeros_like(grad) for grad in grads]
    for zeros, grad in zip(few, grads, strict=True):
        zeros[at] = grad[at]
    ideals = torch.autograd.grad(wanted, list(wide.values()), [grad[at].double() for grad in grads])
    found = torch.autograd.grad(got[: len(grads)], list(leaves.values()), few)
    for what, each, ideal in zip(leaves, found, ideals, strict=True):
        error = max(error, require_close(f"{name}'s gradient of {what}", each[places.get(what, ())], ideal, bound))
    return error


def always(function: Function) -> Load:
    """Make a candidate that needs only torch."""
    return lambda task, device: function


def compiling(function: Function) -> Load:
    """Make a candidate of torch.compile."""
    return lambda task, device: compile_model(function, device)


def ours(function: Function) -> Load:
    """Make a candidate of this project's kernel; without Triton it is unavailable, since plain torch would replace
    it."""

    def load(task: object, device: torch.device) -> Function:
        if not HAVE_TRITON:
            raise UnavailableError("Triton is not installed")
        return function

    return load


def theirs(package: str, module: str, name: str, *more: Any, **options: Any) -> Load:
    """Make a candidate of another project's function, which takes `more` after the inputs."""

    def load(task: object, device: torch.device) -> Function:
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
            raise UnavailableError(f"{package} is not installed" if absent else f"{package}: {error}") from None
        function = getattr(found, "apply", found)
        return lambda *inputs: function(*inputs, *more, **options)

    return load
