"""Workload of the end-to-end benchmarks: options of a model, a fixed random batch, and the passes over it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Measurement, measure
from benchmarks.lib.options import COUNT, DeviceOptions
from cs336_systems import presets
from cs336_systems.cost import MODES, Mode
from cs336_systems.cost.capacity import require_fit
from cs336_systems.cost.observed import Passes, observe_passes
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting
from cs336_systems.host.machine import PeakMemory
from cs336_systems.model.precision import autocast, set_matmul_precision
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.optim.adamw import AdamW
from cs336_systems.presets import ModelConfig, Precision

# The phases that a mode's sample adds up; backward is timed after a forward that is not counted.
PHASES: dict[Mode, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}


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
