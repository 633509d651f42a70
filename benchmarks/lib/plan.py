"""Plan of a benchmark of whole passes: its settings, memory and time of each pass, and its record."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import torch

from benchmarks.harness import Measurement, summarise, suspicions
from benchmarks.lib.options import COUNT
from benchmarks.lib.workload import PHASES, Case, ModelOptions, model_config
from benchmarks.records import Record
from cs336_systems.cost import Hardware, Mode, backward_flops, forward_flops, least_forward_flops, predict
from cs336_systems.cost.probe import probe
from cs336_systems.host.console import setting
from cs336_systems.host.machine import device_name, environment
from cs336_systems.model.precision import set_matmul_precision
from cs336_systems.presets import Precision
from kernels.launch import INTERPRETED

PATIENCE = 120.0  # seconds of one run, unless --steps says otherwise


@dataclass(frozen=True)
class PassSettings(ModelOptions):
    """Options of the command line, one field each."""

    all_sizes: bool = setting(False, "Measure every size of the year's edition.")
    mode: Mode | None = setting(None, "Kind of pass.  [default: every pass that fits]")
    # The first step makes the optimizer's state, so the second is the first like all others.
    warmup: int = setting(2, "Untimed passes before the timed ones; 0 shows a cold start.", type=click.IntRange(0))
    steps: int | None = setting(
        None, "Timed passes.  [default: 5, or as few as 2 where 5 would take minutes]", type=COUNT
    )

    def record_config(self, size: str, case: Case, mode: Mode) -> dict[str, Any]:
        """Settings that identify this measurement."""
        return {"size": size, "year": self.year, "mode": mode} | model_config(case) | {"warmup": self.warmup}


@dataclass(frozen=True)
class Bench:
    """The settings, and the machine with its measured speed."""

    settings: PassSettings
    device: torch.device
    hardware: Hardware
    usable: int  # bytes of tensors that this machine can hold
    environment: dict[str, Any]

    def predicted(self, case: Case, mode: Mode) -> dict[str, Any]:
        """Predictions under the names of the record's metrics, and their parts."""
        seconds, parts = predict(case.passes.of(mode), self.hardware), case.passes.memory(mode)
        return {
            "mean_ms": 1e3 * sum(seconds.values()),
            "peak_memory_bytes": sum(parts.values()),
            "ms_by_kind": {kind: 1e3 * value for kind, value in seconds.items()},
            "memory_by_part": parts,
        }

    def fits(self, case: Case, mode: Mode) -> bool:
        return bool(self.predicted(case, mode)["peak_memory_bytes"] <= self.usable)

    def seconds(self, case: Case, timed: Mode) -> float:
        """Predicted seconds of one timed pass; a backward includes the forward before it."""
        mode: Mode = "forward-backward" if timed == "backward" else timed
        return float(self.predicted(case, mode)["mean_ms"]) / 1e3

    def passes(self, case: Case, timed: Mode) -> int:
        """Number of runs of a mode, warm-up included; by default 5 timed ones, or as many as PATIENCE allows."""
        affordable = int(PATIENCE / self.seconds(case, timed)) - self.settings.warmup
        return self.settings.warmup + (self.settings.steps or max(2, min(5, affordable)))

    def plan(self, case: Case) -> dict[Mode, tuple[Mode, ...]]:
        """The runs to make, each with the modes that it measures: a whole step shows the passes inside it, too."""
        if self.settings.mode:
            return {self.settings.mode: (self.settings.mode,)} if self.fits(case, self.settings.mode) else {}
        runs: dict[Mode, tuple[Mode, ...]] = {"forward": ("forward",)} if self.fits(case, "forward") else {}
        if self.fits(case, "step"):
            runs["step"] = ("backward", "forward-backward", "step")
        elif self.fits(case, "forward-backward"):
            runs["forward-backward"] = ("backward", "forward-backward")
        return runs

    def missing(self, size: str, case: Case, mode: Mode) -> Record:
        """The record of a mode that does not fit, with the memory that it would need."""
        config, predicted = self.settings.record_config(size, case, mode), self.predicted(case, mode)
        return Record("e2e", config, self.environment, predicted=predicted, status="out-of-memory")

    def record(self, size: str, case: Case, mode: Mode, samples: list[float], peak: int | None) -> Record:
        """The record of one mode's samples (milliseconds) and peak memory (bytes)."""
        config, predicted = self.settings.record_config(size, case, mode), self.predicted(case, mode)
        seq = case.config.context_length
        forward = sum(forward_flops(case.config, case.batch, seq).values())
        backward = backward_flops(case.config, case.batch, seq)
        flops = {"forward": forward, "backward": backward}.get(mode, forward + backward)
        metrics: dict[str, Any] = summarise(samples)
        seconds = metrics["mean_ms"] / 1e3
        metrics |= {"flops": flops, "tokens_per_s": case.batch * seq / seconds, "flops_per_s": flops / seconds}
        metrics |= {"mfu": flops / seconds / self.hardware.matmul_flops, "peak_memory_bytes": peak}
        metrics |= {"peak_flops_per_s": self.hardware.matmul_flops, "bandwidth_bytes_per_s": self.hardware.bandwidth}
        least = least_forward_flops(case.config, case.batch, seq) * flops / forward
        flags = suspicions(metrics, least, predicted["memory_by_part"]["parameters"], self.hardware)
        flags += instead_of_kernels(case)
        return Record("e2e", config, self.environment, samples, metrics, predicted, flags)


def instead_of_kernels(case: Case) -> list[str]:
    """Code that ran instead of the fused kernels that were asked for; empty if they ran."""
    config = case.config
    if case.device.type == "cuda" or (config.kernels == "torch" and config.attention != "flash"):
        return []
    return [
        "fused kernels in Triton's interpreter, whose time means nothing"
        if INTERPRETED
        else "plain torch in place of the fused kernels, which a CPU cannot run"
    ]


def make_bench(settings: PassSettings, device: torch.device, usable: int) -> Bench:
    """Measure the machine's speed in the precision that is asked for; `usable` is its memory in bytes."""
    set_matmul_precision(device, settings.precision)  # the probe measures products of this precision, too
    hardware = measure_once(device, settings.precision, budget=0.02 if settings.smoke else 0.5)
    return Bench(settings, device, hardware, usable, environment(device, settings.commit))


@cache
def measure_once(device: torch.device, precision: Precision, budget: float) -> Hardware:
    """The probe's figures, shared by everything that one command compares."""
    return probe(device, precision, device_name(device), budget)


def peak_of(done: Measurement, mode: Mode, compiled: bool) -> int | None:
    """The mode's own peak in bytes: before its first update, a step holds no optimizer state yet.

    A compiled model's first pass holds the compiler, so its backward's own peak is not known.
    """
    before = {} if compiled else done.first_peak
    peaks = before if mode in ("backward", "forward-backward") else done.peak or before
    phases = PHASES["forward-backward"] if mode == "backward" else PHASES[mode]
    return max((peaks[name] for name in phases if name in peaks), default=None)
