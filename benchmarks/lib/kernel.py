"""A kernel to time: its candidates, costs and lower bound, and the check of results before timing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch

from benchmarks.lib.contest import Entry, Stopwatch, UnavailableError, compiled
from cs336_systems.host.machine import PeakMemory
from kernels.launch import HAVE_TRITON

DtypeName = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward-backward"
COPY = "copy"
# Roundings that follow one another: two or three to the result, and in backward as many again and a difference.
STAGES = 8

Function = Callable[..., Any]
Sizes = tuple[int, ...]


class Task(Protocol):
    """One shape in one dtype; its string names it in remarks."""

    @property
    def dtype(self) -> DtypeName: ...

    @property
    def shape(self) -> str: ...


T = TypeVar("T", bound=Task)
Load = Callable[[Any, torch.device], Function]  # makes a candidate for a task


class Kernel(ABC, Generic[T]):
    """Description of a kernel: candidates, costs, lower bound, and how to check a result."""

    name: ClassVar[str]
    floor: ClassVar[str] = ""  # name of the lower bound that takes turns with the candidates, if there is one
    fraction: ClassVar[str] = "floor_fraction"  # metric of the floor's time over the candidate's
    rounds: int = 15
    candidates: Mapping[str, Load]
    in_place: ClassVar[tuple[str, ...]] = ()  # candidates whose backward writes over their inputs
    times_host: ClassVar[bool] = True  # measures for how long a call keeps the host of a GPU busy

    @abstractmethod
    def config(self, name: str, task: T, what: str) -> dict[str, Any]:
        """Settings that identify the measurement of a pass."""

    @abstractmethod
    def passes(self, task: T) -> tuple[str, ...]:
        """The passes that are timed at once; the last one is the sum of all."""

    @abstractmethod
    def flops(self, task: T, what: str) -> float:
        """FLOPs of the matrix products of a pass."""

    @abstractmethod
    def moved(self, task: T, device: torch.device) -> int:
        """The least that the passes read and write, in bytes; 0 if only their products count."""

    @abstractmethod
    def peak_bytes(self, name: str, task: T) -> int | None:
        """Peak bytes of a candidate, inputs and results included; None if they are not predicted."""

    def bytes_needed(self, name: str, task: T) -> int:
        """Bytes that have to be free for a candidate to take part."""
        return self.peak_bytes(name, task) or 0

    @abstractmethod
    def few(self, task: T) -> T:
        """A shape for the check in Triton's interpreter."""

    @abstractmethod
    def inputs(self, task: T, device: torch.device) -> Any:
        """Inputs, random but the same for all."""

    @abstractmethod
    def gate(self, name: str, function: Function, task: T, inputs: Any) -> float:
        """The largest error of a candidate at the shape that is timed, against float64. Raises WrongResultError."""

    @abstractmethod
    def phases(self, name: str, function: Function, task: T, inputs: Any) -> dict[str, Callable[[], object]]:
        """Functions to time one after the other, without arguments."""

    def kept(self, forward: Callable[[], object], device: torch.device, others: int) -> int:
        """Bytes in use after the first phase, which is run for it; asked only of a kernel with several phases."""
        raise NotImplementedError

    def prepare(self, clock: Stopwatch, name: str, task: T, inputs: Any) -> Entry:
        """Check a candidate, and measure its memory and the host time of a call. Raises the error that keeps it out.

        On a CPU, the memory of a compiled candidate is unknown: the compiler itself was in the process.
        """
        device = clock.device
        on_gpu = device.type == "cuda"
        others = torch.cuda.memory_allocated(device) - inputs.nbytes if on_gpu else -inputs.nbytes
        function = self.candidates[name](task, device)
        if name in self.in_place:
            inputs = self.inputs(task, device)  # of its own
        error = self.gate(name, function, task, inputs)
        memory = PeakMemory(device)  # only now: on a CPU, what the gate has freed may still be held
        first, *rest = phases = self.phases(name, function, task, inputs)

        def once() -> None:
            for run in phases.values():
                run()

        metrics: dict[str, Any] = {"peak_memory_bytes": None} | ({"before_backward_bytes": None} if rest else {})
        if not rest:
            once()  # an optimizer makes its state
        if on_gpu and self.times_host:
            metrics["host_us"] = 1e6 * clock.host_seconds(once)
        if on_gpu or name != "compiled":
            memory.reset()
            if rest:
                metrics["before_backward_bytes"] = self.kept(phases[first], device, others)
                for what in rest:
                    phases[what]()
            else:
                once()
            peak = memory.read()
            metrics["peak_memory_bytes"] = None if peak is None else peak - others
        return Entry(phases, error, metrics)

    def make_floor(self, task: T, device: torch.device) -> Callable[[], object]:
        """Lower bound on the time of every candidate: the function to time, of a kernel that names a `floor`."""
        raise NotImplementedError

    def published(self, task: T) -> dict[str, float]:
        """Published results of all passes together, as metrics."""
        return {}


def always(function: Function) -> Load:
    """Make a candidate that needs only torch."""
    return lambda task, device: function


def compiling(function: Function) -> Load:
    """Make a candidate of torch.compile."""
    return lambda task, device: compiled(function, device)


def only_triton(function: Function, task: object, device: torch.device) -> Function:
    """Load this project's kernel. Raises UnavailableError without Triton, where plain torch would replace it."""
    if not HAVE_TRITON:
        raise UnavailableError("Triton is not installed")
    return function


def ours(function: Function) -> Load:
    """Make a candidate of this project's kernel."""
    return partial(only_triton, function)


@dataclass(frozen=True)
class SizedTask:
    """One pass of one kernel; the kernel defines the meaning of the sizes."""

    kernel: str
    sizes: Sizes
    dtype: DtypeName
    what: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.shape} {self.dtype} {self.what}"

    @property
    def shape(self) -> str:
        """`50000 x 1024`."""
        return " x ".join(map(str, self.sizes))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


class SizedKernel(Kernel[SizedTask]):
    """A kernel each of whose tasks is one pass, with the shapes that are measured."""

    sizes_are: ClassVar[tuple[str, ...]] = ("rows", "columns")
    sizes: ClassVar[tuple[Sizes, ...]]
    cpu_sizes: ClassVar[tuple[Sizes, ...]]
    tiny: ClassVar[Sizes] = (64, 128)  # of a smoke run
    interpreted: ClassVar[Sizes] = (8, 64)  # of the gate in Triton's interpreter
    dtypes: ClassVar[tuple[DtypeName, ...]] = ("bf16", "fp32")  # the first is the default
    whats: ClassVar[tuple[str, ...]] = (FORWARD, BOTH)
    floor = COPY

    def config(self, name: str, task: SizedTask, what: str) -> dict[str, Any]:
        sizes = dict(zip(self.sizes_are, task.sizes, strict=True))
        return {"kernel": task.kernel, "candidate": name, "pass": what} | sizes | {"dtype": task.dtype}

    def passes(self, task: SizedTask) -> tuple[str, ...]:
        return (task.what,)

    def few(self, task: SizedTask) -> SizedTask:
        return replace(task, sizes=self.interpreted)

    def flops(self, task: SizedTask, what: str) -> float:
        return 0.0

    def other_bytes(self, task: SizedTask) -> int:
        """Other bytes in memory: tensors of the lower bound, and those that candidates keep between turns."""
        return self.moved(task, torch.device("cpu"))

    def gate_bytes(self, task: SizedTask) -> int:
        """Bytes that the check of results needs, if more than the pass."""
        return 0

    def bytes_needed(self, name: str, task: SizedTask) -> int:
        return max(self.peak_bytes(name, task) or 0, self.gate_bytes(task)) + self.other_bytes(task)

    @abstractmethod
    def make_pass(self, name: str, function: Function, task: SizedTask, inputs: Any) -> Callable[[], object]:
        """Return the function to time, without arguments."""

    def phases(self, name: str, function: Function, task: SizedTask, inputs: Any) -> dict[str, Callable[[], object]]:
        return {task.what: self.make_pass(name, function, task, inputs)}

    def make_floor(self, task: SizedTask, device: torch.device) -> Callable[[], object]:
        """A copy that moves as many bytes, half of them read and half written."""
        source = torch.ones(self.moved(task, device) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def tolerance(task: SizedTask, longest_sum: int) -> float:
    """The error that STAGES roundings and a sum in float32 explain."""
    return STAGES * (UNIT_ROUNDOFF[task.dtype] + longest_sum**0.5 * UNIT_ROUNDOFF["fp32"])
