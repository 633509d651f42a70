"""Whole passes of a model: options, a fixed random batch, the passes over it, their plan, prediction and record."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.harness import Measurement, measure, summarise, suspicions
from benchmarks.lib.options import COUNT, DeviceOptions
from benchmarks.records import Record
from cs336_systems import presets
from cs336_systems.cost import MODES, Hardware, Mode, backward_flops, forward_flops, least_forward_flops, predict
from cs336_systems.cost.capacity import require_fit
from cs336_systems.cost.observed import Passes, observe_passes
from cs336_systems.cost.probe import probe
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting
from cs336_systems.host.machine import PeakMemory, device_name, environment
from cs336_systems.model.precision import autocast, set_matmul_precision
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.optim.adamw import AdamW
from cs336_systems.presets import ModelConfig, Precision
from kernels.launch import INTERPRETED

# The phases that a mode's sample adds up; backward is timed after a forward that is not counted.
PHASES: dict[Mode, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
PATIENCE = 120.0  # seconds of one run, unless --steps says otherwise
EDITIONS = f"Edition of the course that the sizes are from, {presets.COURSE_YEARS[0]} to {presets.COURSE_YEARS[-1]}."


@dataclass(frozen=True)
class Case:
    """Shape of a model and of the (batch context_length) tokens of one pass."""

    config: ModelConfig
    batch: int
    precision: Precision
    compiled: bool
    device: torch.device
    seed: int = 0

    @property
    def passes(self) -> Passes:
        """Counts of the passes, before they are run."""
        return observe_passes(self.config, self.batch, self.config.context_length, self.precision, self.device.type)

    def require_fit(self, name: str, mode: Mode, usable: int, modes: tuple[Mode, ...] = MODES) -> None:
        """Raises UserError, saying what would fit, if a mode needs more than the usable bytes."""

        def needs(config: ModelConfig, batch: int, seq: int, mode: Mode) -> dict[str, int]:
            return observe_passes(config, batch, seq, self.precision, self.device.type).memory(mode)

        require_fit(name, self.config, self.batch, self.config.context_length, mode, needs, usable, modes)

    def make_model(self, config: ModelConfig) -> TransformerLM:
        torch.manual_seed(self.seed)
        return TransformerLM(config, self.device)

    def make_batch(self, config: ModelConfig, batch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, batch, config.context_length)
        tokens, targets = torch.randint(config.vocab_size, shape, generator=generator).to(self.device)
        return tokens, targets


@dataclass(frozen=True)
class ModelOptions(DeviceOptions):
    """A preset and what is changed of it."""

    size: str = setting("small", "Model preset.")
    year: int = setting(presets.DEFAULT_YEAR, EDITIONS)
    precision: Precision = setting("fp32", "Precision of matrix products; bf16 and fp16 are mixed precision.")
    norm: presets.Norm | None = setting(None, "Normalisation.  [default: the preset's]")
    attention: presets.Attention | None = setting(None, "Implementation of attention.  [default: the preset's]")
    kernels: presets.Kernels | None = setting(None, "Fused kernels for norm, gate and loss.  [default: the preset's]")
    compile: bool = setting(False, "Compile the model with torch.compile.")
    recompute: presets.Recompute = setting("none", "Activations that backward recomputes instead of keeping them.")
    recompute_every: int = setting(1, "Blocks in a recomputed segment.", type=COUNT)
    batch_size: int | None = setting(None, "Sequences in a pass.  [default: the edition's]", type=COUNT)
    context: int | None = setting(None, "Tokens in a sequence.  [default: the edition's]", type=COUNT)

    def case(self, size: str, device: torch.device) -> Case:
        """One size with these options. Raises UserError for a size or a choice that does not exist, and for one that
        would be ignored."""
        if self.recompute_every > 1 and self.recompute != "segments":
            raise UserError(f"--recompute-every needs --recompute segments, not {self.recompute}; add it, or drop both")
        chosen = presets.preset(size, self.year)
        same = ("norm", "attention", "kernels", "recompute", "recompute_every")
        config = chosen.model.override(context_length=self.context, **{name: getattr(self, name) for name in same})
        return Case(config, self.batch_size or chosen.batch_size, self.precision, self.compile, device)


def model_config(case: Case) -> dict[str, Any]:
    """Settings of the model and its tokens for a record."""
    config = case.config
    return {
        "precision": case.precision,
        "norm": config.norm,
        "attention": config.attention,
        # Named where it is unusual only: records from before there was a choice keep their configuration.
        **({"kernels": config.kernels} if config.kernels != "torch" else {}),
        "compile": case.compiled,
        "recompute": config.recompute,
        "recompute_every": config.recompute_every,
        "batch_size": case.batch,
        "context": config.context_length,
    }


def compile_model(model: Any, device: torch.device) -> Any:
    """A model, or a function, through torch.compile, sharing weights. Raises UserError where there is no compiler.

    Dynamo remembers shapes by code, not by model: without a reset and with dynamic shapes, what ran before (the gate, a
    smaller size) would change what is compiled, and after eight variants nothing would be.
    """
    compilers = ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc")
    if not any(map(shutil.which, compilers)):
        raise UserError(f"--compile needs one of {', '.join(compilers)} on the PATH for --device {device.type}")
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, dynamic=False)


class Workload:
    """A model, a batch and, for a whole step, an optimizer, with the passes as functions without arguments."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.memory = PeakMemory(case.device)  # first, so that the weights count
        self.weights = case.make_model(case.config)
        self.model = compile_model(self.weights, case.device) if case.compiled else self.weights
        self.tokens, self.targets = case.make_batch(case.config, case.batch)
        self.autocast = autocast(case.device, case.precision)
        self.optimizer = AdamW(self.weights.parameters())
        # torch's first guess, 2^16, overflows now and then, and a skipped update would be timed as a fast one.
        self.scaler = torch.amp.GradScaler(case.device.type, init_scale=2.0**10, enabled=case.precision == "fp16")
        self.loss = torch.zeros(())

    def forward_only(self) -> None:
        with torch.no_grad():
            self.forward()

    def forward(self) -> None:
        with self.autocast:
            self.loss = lm_loss(self.model, self.tokens, self.targets)

    def backward(self) -> None:
        self.scaler.scale(self.loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def phases(self, mode: Mode) -> dict[str, Callable[[], None]]:
        """The mode's phases in order, and the forward that a backward needs."""
        if mode == "forward":
            return {"forward": self.forward_only}
        passes = {"forward": self.forward, "backward": self.backward}
        return passes | ({"optimizer": self.update} if mode == "step" else {})

    def run(
        self, mode: Mode, warmup: int, steps: int, advance: Callable[[str], None] = lambda note: None
    ) -> Measurement:
        """Time the mode's phases."""
        device = self.case.device
        set_matmul_precision(device, self.case.precision)
        return measure(self.phases(mode), device, warmup, steps, self.memory, self.optimizer.zero_grad, advance)


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
