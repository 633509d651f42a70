"""Measurement, on one rank or several: warm up, keep every sample, interleave what is compared, reject results that are
wrong or too fast."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cs336_systems.comm import Group, all_gather, all_reduce
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import PeakMemory

Phases = Mapping[str, Callable[[], object]]
Sample = TypeVar("Sample")

NOISY = 0.05  # standard deviation over mean from which a measurement is flagged
SLACK = 1.05  # a figure may pass a measured ceiling by this much: the ceiling is a measurement, too
CACHED_BYTES = 2**28  # fewer bytes may never have left a cache


class Timer:
    """Times laps in milliseconds: with CUDA events on a GPU, on the device's own time line, else with the clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def lap(self, run: Callable[[], object]) -> None:
        start = self._mark()
        run()
        self.marks.append((start, self._mark()))

    def milliseconds(self) -> list[float]:
        """Every lap's time; waits until the device has passed the last one."""
        if self.device.type != "cuda":
            return [(stop - start) * 1e3 for start, stop in self.marks]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in self.marks]


@dataclass
class Measurement:
    """Samples in milliseconds by phase, and the peak memory of each phase in the first iteration and in the rest."""

    samples_ms: dict[str, list[float]]
    first_peak: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def total(self, phases: Sequence[str]) -> list[float]:
        """Sample by sample, the sum over some phases."""
        return [sum(lap) for lap in zip(*(self.samples_ms[name] for name in phases), strict=True)]


def measure(
    phases: Phases,
    device: torch.device,
    warmup: int,
    steps: int,
    memory: PeakMemory | None = None,
    before: Callable[[], object] = lambda: None,
    advance: Callable[[str], None] = lambda note: None,
) -> Measurement:
    """Run the phases in order warmup + steps times and time each; `before` runs untimed ahead of every iteration.

    `memory`, if given, is read after each phase; the first iteration's peak is kept apart because an optimizer makes
    its state at its first step. Only the warm-up is thrown away, so warmup=0 shows what a cold start costs.
    """
    result = Measurement({name: [] for name in phases})
    for iteration in range(warmup + steps):
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timer = Timer(device)
        for name, run in phases.items():
            if memory:
                memory.reset()
            timer.lap(run)
            if memory and (peak := memory.read()) is not None:
                kept = result.peak if iteration else result.first_peak
                kept[name] = max(peak, kept.get(name, 0))
        for name, lap in zip(phases, timer.milliseconds(), strict=True):
            if iteration >= warmup:
                result.samples_ms[name].append(lap)
        advance("warming up" if iteration < warmup else "")
    return result


def gather_times(samples_ms: Sequence[float], group: Group, device: torch.device) -> Tensor:
    """Every rank's samples in milliseconds (rank sample), on every rank. All ranks give equally many."""
    times = torch.zeros(group.size(), len(samples_ms), dtype=torch.float64, device=device)
    times[group.rank()] = torch.tensor(samples_ms, dtype=torch.float64)
    all_gather(times.view(-1), group, "times").wait()
    return times.cpu()


def now(device: torch.device) -> float:
    """Seconds on the clock, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def line_up(group: Group, device: torch.device) -> None:
    """Let the ranks start as one."""
    all_reduce(torch.zeros(1, device=device), group, "line up").wait()


def time_ranks(
    run: Callable[[], object], group: Group, device: torch.device, warmup: int, steps: int,
    advance: Callable[[str], None] = lambda note: None,
) -> Tensor:  # fmt: skip
    """Let all ranks do `run` together, warmup + steps times: milliseconds of those that count (rank sample).

    A small all-reduce before each, untimed, lets the ranks start together; the time until the last is done is then
    `times.amax(dim=0)`.
    """
    done = measure({"run": run}, device, warmup, steps, before=partial(line_up, group, device), advance=advance)
    return gather_times(done.samples_ms["run"], group, device)


def summarise(samples_ms: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, median and range of samples in milliseconds."""
    return {
        "mean_ms": statistics.fmean(samples_ms),
        "std_ms": statistics.stdev(samples_ms) if len(samples_ms) > 1 else 0.0,
        "median_ms": statistics.median(samples_ms),
        "min_ms": min(samples_ms),
        "max_ms": max(samples_ms),
    }


def interleave(
    candidates: Mapping[str, Callable[[], Sample]], rounds: int, advance: Callable[[str], None] = lambda note: None
) -> dict[str, list[Sample]]:
    """Let candidates, each of which measures itself once and returns what it found, take turns: A B A B.

    A disturbance of the machine affects all of them, so ratios within a round are more reliable than times.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            samples[name].append(run())
            advance(name)
    return samples


def take_turns(
    candidates: Mapping[str, Callable[[], Sample]], rounds: int, expected_seconds: float = 0.0, quiet: bool = False
) -> dict[str, list[Sample]]:
    """Interleave candidates under a progress bar, which `quiet` ranks do not show; `expected_seconds` are for all."""
    with console.progress("taking turns", len(candidates) * rounds, expected_seconds, quiet) as advance:
        return interleave(candidates, rounds, advance)


def ratios(samples_ms: Sequence[float], baseline_ms: Sequence[float]) -> dict[str, float]:
    """The ratio to a baseline pair by pair, of samples that were measured in turn: median and quartiles."""
    pairs = [a / b for a, b in zip(samples_ms, baseline_ms, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    return {"ratio_median": middle, "ratio_low": low, "ratio_high": high}


def suspicions(summary: Mapping[str, float], flops: float, bytes_moved: float, hardware: Hardware) -> list[str]:
    """Reasons to doubt a measurement: faster than the hardware's ceilings (a synchronisation was missed), or
    too noisy to quote. `flops` and `bytes_moved` are the least that one sample must do."""
    found, seconds = [], summary["mean_ms"] / 1e3
    if flops / seconds > SLACK * hardware.matmul_flops:
        found.append(f"faster than the measured matrix-product peak by {flops / seconds / hardware.matmul_flops:.2f} x")
    if bytes_moved > CACHED_BYTES and bytes_moved / seconds > SLACK * hardware.bandwidth:
        found.append(f"faster than the measured memory bandwidth by {bytes_moved / seconds / hardware.bandwidth:.2f} x")
    return found + noise(summary)


def noise(summary: Mapping[str, float]) -> list[str]:
    """Reasons why a measurement is too noisy to quote."""
    if summary["std_ms"] <= NOISY * summary["mean_ms"]:
        return []
    return [f"noisy: standard deviation {summary['std_ms'] / summary['mean_ms']:.0%} of the mean"]


@contextmanager
def saved_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that autograd keeps for backward of what runs in the block, by address."""
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield saved


UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}


def rounding(stages: int, precision: str, longest_sum: int) -> float:
    """The relative error, in the L2 norm, that rounding explains.

    To first order each of `stages` roundings that follow one another adds one unit roundoff, and a float32 sum of n
    terms about sqrt(n) of its own (Higham, Accuracy and Stability of Numerical Algorithms, sections 2.6 and 3.1).
    """
    return stages * (UNIT_ROUNDOFF[precision] + longest_sum**0.5 * UNIT_ROUNDOFF["fp32"])


class WrongResultError(UserError):
    """A candidate's result differs from its reference, so its speed means nothing."""


def require_close(name: str, candidate: Tensor, reference: Tensor, tolerance: float) -> float:
    """The correctness gate: the relative L2 error of candidate to reference, both of one shape.

    It is infinite where the reference is zero and the candidate is not. Raises WrongResultError if it exceeds the
    tolerance or is not a number.
    """
    wide = reference.double()
    off, size = (torch.linalg.vector_norm(each).item() for each in (candidate.double() - wide, wide))
    error = off / size if size else math.inf if off else 0.0
    if not error <= tolerance:
        raise WrongResultError(
            f"{name} is off its reference by {error:.2e}, more than {tolerance:.2e}: no speed reported"
        )
    return error
