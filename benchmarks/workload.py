"""The work that end-to-end benchmarks time: a model, a fixed random batch, and the passes over it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.harness import Measurement, measure, require_close
from cs336_systems.cost import Mode, Precision
from cs336_systems.errors import UserError
from cs336_systems.machine import PeakMemory
from cs336_systems.model import TransformerLM, lm_loss
from cs336_systems.optim import AdamW
from cs336_systems.precision import autocast, set_matmul_precision
from cs336_systems.presets import ModelConfig

# The phases that a mode's sample adds up; backward is timed after a forward that is not counted.
PHASES: dict[Mode, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}

# Roundings that follow one another through one block, its norms, the head and the loss, and back.
STAGES = 32
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Work:
    """What is run: a model's shape and the (batch context_length) tokens of one pass."""

    config: ModelConfig
    batch: int
    precision: Precision
    compiled: bool
    device: torch.device
    seed: int = 0

    def make_model(self, config: ModelConfig) -> TransformerLM:
        torch.manual_seed(self.seed)
        return TransformerLM(config, self.device)

    def make_batch(self, config: ModelConfig, batch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, batch, config.context_length)
        tokens, targets = torch.randint(config.vocab_size, shape, generator=generator).to(self.device)
        return tokens, targets


def compiled(model: TransformerLM) -> nn.Module:
    """The model through torch.compile, sharing its weights. Raises UserError where there is no compiler."""
    if not torch.cuda.is_available() and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("--compile needs a C++ compiler on a CPU, and g++ is not on the PATH")
    return cast(nn.Module, torch.compile(model))


class Workload:
    """A model, a batch and, for a whole step, an optimizer, with the passes as functions without arguments."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.memory = PeakMemory(work.device)  # first, so that the weights count
        self.weights = work.make_model(work.config)
        self.model = compiled(self.weights) if work.compiled else self.weights
        self.tokens, self.targets = work.make_batch(work.config, work.batch)
        self.autocast = autocast(work.device, work.precision)
        self.optimizer = AdamW(self.weights.parameters())
        self.scaler = torch.amp.GradScaler(work.device.type, enabled=work.precision == "fp16")
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

    def run(
        self, mode: Mode, warmup: int, steps: int, advance: Callable[[str], None] = lambda note: None
    ) -> Measurement:
        """Time the mode's phases, and the forward that a backward needs."""
        phases = {"forward": self.forward, "backward": self.backward, "optimizer": self.update}
        if mode == "forward":
            phases = {"forward": self.forward_only}
        elif mode != "step":
            del phases["optimizer"]
        device = self.work.device
        set_matmul_precision(device, self.work.precision)
        return measure(phases, device, warmup, steps, self.memory, self.optimizer.zero_grad, advance)


def loss_and_gradient(model: TransformerLM, run: nn.Module, work: Work, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss and every gradient behind it as one vector."""
    # Gradients of a mean over many tokens are small enough for fp16 to lose them; a power of two loses nothing else.
    scale = 1024.0 if work.precision == "fp16" else 1.0
    set_matmul_precision(work.device, work.precision)
    with autocast(work.device, work.precision):
        loss = lm_loss(run, tokens, targets)
    (loss * scale).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad / scale for p in model.parameters()]
    return torch.cat([loss.detach().flatten(), *(gradient.flatten() for gradient in gradients)])


def check(work: Work) -> tuple[float, float]:
    """The gate: one block of the model's width, as it will be timed, against plain float64. (error, tolerance).

    The error is that of the loss and all gradients as one vector, in the L2 norm. To first order each of STAGES
    roundings adds one unit roundoff, and a float32 sum of n terms about sqrt(n) of its own. Raises WrongResultError.
    """
    config = replace(work.config, num_layers=1, dropout=0.0)
    plain = replace(config, attention="naive", checkpoint="none")
    tokens, targets = work.make_batch(config, batch=2)
    candidate, reference = work.make_model(config), work.make_model(plain).double()
    reference.load_state_dict(candidate.state_dict())
    run = compiled(candidate) if work.compiled else candidate
    got = loss_and_gradient(candidate, run, work, tokens, targets)
    want = loss_and_gradient(reference, reference, replace(work, precision="fp32"), tokens, targets)
    longest = max(config.d_ff, config.vocab_size, tokens.numel())
    tolerance = STAGES * (UNIT_ROUNDOFF[work.precision] + longest**0.5 * UNIT_ROUNDOFF["fp32"])
    return require_close("one block's loss and gradient", got, want, tolerance), tolerance
