"""Candidates for one shape: each passes the gate, then they take turns with cold caches, A B A B."""

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Phases, Timer, WrongResultError, interleave, ratios
from benchmarks.records import Status
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_seconds
from cs336_systems.host.machine import out_of_memory

OURS = "ours"
FOREIGN = ("liger", "quack", "sdpa")  # other projects: their failures are no faults of this one
SAMPLE_MS = 5.0  # a sample is the median of as many calls as fit into this,
MOST_CALLS = 20  # and of no more than these
SLEEP_CYCLES = 2.0e9  # of a GPU in a second, at most
LONGEST_LEAD = 0.01  # seconds that a GPU sleeps ahead of a call, at most
NO_KERNEL = ("No available kernel", "No viable backend")  # how PyTorch's own attention refuses, by version
DRIVER = ("CUDA error", "Triton Error [CUDA]")  # how torch and Triton begin what the driver says


class UnavailableError(Exception):
    """A candidate is not installed here, or does not take such inputs."""


def format_ms(milliseconds: float) -> str:
    """Like `format_seconds`, but 0.0123 -> `12.3 us`: kernels are short."""
    return format_seconds(milliseconds / 1e3) if milliseconds >= 0.9995 else f"{milliseconds * 1e3:.3g} us"


def spread(count: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Up to `wanted` different indices from the first to the last of `count`, evenly."""
    return torch.linspace(0, count - 1, min(count, wanted), device=device, dtype=torch.float64).round().long().unique()


@dataclass
class Entry:
    """A candidate that passed the gate: its phases, and the samples in milliseconds that each has collected."""

    phases: Phases
    metrics: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    lead: float = 0.0  # seconds for which the GPU is kept busy ahead of a call
    samples: dict[str, list[float]] = field(default_factory=dict)


def ran_out(error: Exception) -> bool:
    """True if memory ran out: in torch's allocator, or in the driver when a launch asked it for more."""
    driver = any(f"{who}: out of memory" in str(error) for who in DRIVER)
    return isinstance(error, RuntimeError) and (driver or out_of_memory(error))


def refuse(name: str, error: Exception, faults: list[str]) -> tuple[Status, str]:
    """Status and reason of a candidate without a time, from its error; what is wrong with ours is added to `faults`.
    Raises the error again if the device is lost for all."""
    if ran_out(error):
        return "out-of-memory", "out of memory"
    if any(who in str(error) for who in DRIVER):
        raise error
    if isinstance(error, WrongResultError):
        faults.append(f"wrong result: {error}")
        return "unsupported", faults[-1]
    reason = next(iter(str(error).splitlines()), "")
    if reason.startswith(NO_KERNEL):
        return "unsupported", "PyTorch has no such kernel for these inputs"
    if not isinstance(error, UnavailableError | UserError):
        reason = f"{type(error).__name__}: {reason}"[:300]
        faults += [] if name.startswith(FOREIGN) else [f"{name}: {reason}"]
    return "unsupported", reason


class Stopwatch:
    """Times phases with cold caches, and without the host's time to launch them.

    Ahead of each call a GPU overwrites its L2 cache, then sleeps while the host runs ahead: what is timed then waits in
    the queue. On a CPU a call is timed as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.filler = torch.empty(0)
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.filler = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def laps(self, entry: Entry) -> dict[str, list[float]]:
        """The milliseconds of each phase in each of the entry's calls."""
        timer = Timer(self.device)
        for _ in range(entry.calls):
            if self.device.type == "cuda":
                self.filler.zero_()
                torch.cuda._sleep(int(entry.lead * SLEEP_CYCLES))
            for run in entry.phases.values():
                timer.lap(run)
        times, count = timer.milliseconds(), len(entry.phases)
        return {name: times[start::count] for start, name in enumerate(entry.phases)}

    def sample(self, entry: Entry) -> float:
        """Add one sample to each phase, and to their sum if they are several; returns the sum in milliseconds."""
        laps = self.laps(entry)
        totals = [sum(lap) for lap in zip(*laps.values(), strict=True)]
        for name, times in (laps if len(laps) == 1 else laps | {"forward-backward": totals}).items():
            entry.samples.setdefault(name, []).append(statistics.median(times))
        return statistics.median(totals)

    def settle(self, entry: Entry) -> None:
        """Choose the number of calls per sample and, by the time for which a call keeps the host busy, how far the host
        has to run ahead of a GPU."""
        if self.device.type == "cuda":
            seconds = []
            for _ in range(3):
                torch.cuda.synchronize(self.device)
                start = time.perf_counter()
                for run in entry.phases.values():
                    run()
                seconds.append(time.perf_counter() - start)  # the GPU's work is not awaited
            entry.metrics["host_us"], entry.lead = 1e6 * min(seconds), min(2 * min(seconds), LONGEST_LEAD)
        lap = sum(times[0] for times in self.laps(entry).values())
        entry.calls = max(1, min(MOST_CALLS, int(SAMPLE_MS / lap)))


@dataclass
class Contest:
    """The candidates for one shape: those that take turns, and those that were refused, with status and reason."""

    clock: Stopwatch
    faults: list[str]
    entries: dict[str, Entry] = field(default_factory=dict)
    refusals: dict[str, tuple[Status, str]] = field(default_factory=dict)

    def enter(self, name: str, prepare: Callable[[], Entry]) -> None:
        """Let a candidate in if it can be prepared, which includes its gate."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's attention has one for every reason why it refuses
                entry = prepare()
            self.clock.settle(entry)
            self.entries[name] = entry
        except Exception as error:  # a peer may raise anything; the others are still to be measured
            self.refusals[name] = refuse(name, error, self.faults)
            gc.collect()
            torch.cuda.empty_cache()

    def play(self, rounds: int) -> None:
        """Let the candidates take turns. If memory runs out in spite of the gate, none of them has a speed."""
        try:
            interleave({name: partial(self.clock.sample, entry) for name, entry in self.entries.items()}, rounds)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            self.refusals |= {name: refuse(name, error, self.faults) for name in self.entries}
            self.entries.clear()

    def against_others(self, name: str, what: str, ignored: str = "") -> dict[str, Any]:
        """The fastest other candidate, and the ratio of the times to it pair by pair; empty if there is none."""
        others = {other: entry.samples[what] for other, entry in self.entries.items() if other not in (name, ignored)}
        if not others:
            return {}
        best = min(others, key=lambda other: statistics.median(others[other]))
        return {"best_other": best} | ratios(self.entries[name].samples[what], others[best])
