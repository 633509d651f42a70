"""The 2026 leaderboard's training step: an 8B model at a context of 32,768, as deep as one GPU can hold it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.gate import STAGES, make_it_matter
from benchmarks.harness import measure, require_close
from benchmarks.lib.kernel import UNIT_ROUNDOFF
from benchmarks.lib.workload import compile_model
from cs336_systems.cost import Hardware, count_parameters, forward_flops, least_forward_flops, recompute_flops
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes
from cs336_systems.host.machine import PeakMemory
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.presets import ModelConfig
from kernels.adamw import FusedAdamW

FULL = ModelConfig(
    vocab_size=151_936, context_length=32_768, d_model=4096, d_ff=11_008, num_layers=34, num_heads=32,
    positions="rotary", feed_forward="swiglu", tied_head=False, attention="flash", kernels="triton",
    recompute="segments",
)  # fmt: skip
# The same model for a machine without a GPU, where the step is shown to work and its time means little.
LAPTOP = replace(FULL, vocab_size=4096, context_length=256, d_model=256, d_ff=688, num_layers=2, num_heads=4)
TINY = replace(LAPTOP, vocab_size=256, context_length=32, d_model=32, d_ff=64, num_layers=1, num_heads=2)
BATCH = 2
GATE_CONTEXT = 128


@dataclass(frozen=True)
class LeaderboardStep:
    """A training step: the model, its batch, and whether it is compiled."""

    config: ModelConfig
    batch: int
    compiled: bool

    @property
    def tolerance(self) -> float:
        """Relative tolerance of one block in bf16: some roundings to it, and sums in float32 (see `gate.check`)."""
        longest = max(self.config.d_ff, self.config.vocab_size)
        return STAGES * (UNIT_ROUNDOFF["bf16"] + longest**0.5 * UNIT_ROUNDOFF["fp32"])

    @property
    def bytes_needed(self) -> int:
        """Peak bytes of a step: bf16 weights and gradients, float32 moments, each block's input, the insides of
        the block that is run again (its rotations in float32), and the gradients of the head."""
        config = self.config
        tokens = self.batch * config.context_length
        insides = 2 * tokens * (18 * config.d_model + 6 * config.d_ff)
        head = config.vocab_size * (6 * config.d_model + 2 * min(tokens, 4096))
        kept = 2 * tokens * config.d_model * config.num_layers
        return 12 * sum(count_parameters(config).values()) + kept + insides + head

    def predict(self, hardware: Hardware) -> dict[str, Any]:
        """Matrix products at the measured peak (forward three times, and once more what is recomputed), and AdamW's
        22 bytes per parameter at the measured bandwidth; element-wise work is left out. `flops` leave out recompute."""
        config, context = self.config, self.config.context_length
        forward = least_forward_flops(config, self.batch, context)
        whole = sum(forward_flops(config, self.batch, context).values())
        again = recompute_flops(config, self.batch, context) * forward / whole
        update = 22 * sum(count_parameters(config).values()) / hardware.bandwidth
        seconds = (3 * forward + again) / hardware.matmul_flops + update
        return {"median_ms": 1e3 * seconds, "flops": 3 * forward, "peak_memory_bytes": self.bytes_needed}


def largest_step(
    full: ModelConfig, layers: int | None, batch: int | None, compiled: bool, usable: int
) -> LeaderboardStep:
    """The deepest model that fits, at batch 2 if it can be. Raises UserError if what was asked for does not fit."""
    for depth in (layers,) if layers else range(full.num_layers, 0, -1):
        for size in (batch,) if batch else (BATCH, 1):
            step = LeaderboardStep(replace(full, num_layers=depth), size, compiled)
            if step.bytes_needed <= usable:
                return step
    need = format_bytes(step.bytes_needed)
    raise UserError(
        f"--layers {layers or 1} at batch {size} needs {need}, {format_bytes(usable)} are usable; ask for less"
    )


def gate_step(step: LeaderboardStep, device: torch.device) -> float:
    """One block of the model in bf16 against the same weights in float64: the largest error of the loss and of every
    gradient. Raises WrongResultError."""
    context = min(GATE_CONTEXT, step.config.context_length)
    config = replace(step.config, num_layers=1, context_length=context)
    tokens, targets = torch.randint(config.vocab_size, (2, 2, context), device=device)
    candidate = TransformerLM(config, device)
    make_it_matter(candidate)
    candidate.bfloat16()
    reference = TransformerLM(replace(config, attention="naive", kernels="torch", recompute="none"), device).double()
    reference.load_state_dict(candidate.state_dict())
    run = compile_model(candidate, device) if step.compiled else candidate
    losses = [lm_loss(model, tokens, targets) for model in (run, reference)]
    for loss in losses:
        loss.backward()
    worst = require_close("the loss of a block", losses[0].detach(), losses[1].detach(), step.tolerance)
    for (name, parameter), exact in zip(candidate.named_parameters(), reference.parameters(), strict=True):
        if exact.grad is not None:
            got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            worst = max(worst, require_close(f"the gradient of {name}", got, exact.grad, step.tolerance))
    return worst


def time_step(step: LeaderboardStep, steps: int, device: torch.device) -> tuple[list[float], int | None]:
    """Milliseconds of training steps (zero_grad, forward, loss, backward, AdamW), and peak memory in bytes.

    Raises UserError for a loss that is no number.
    """
    memory = PeakMemory(device)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in float32 the weights alone would fill a quarter of the GPU
    try:
        model = TransformerLM(step.config, device)
    finally:
        torch.set_default_dtype(default)
    run: nn.Module = compile_model(model, device) if step.compiled else model
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    tokens, targets = torch.randint(step.config.vocab_size, (2, step.batch, step.config.context_length), device=device)

    loss = torch.zeros(())

    def train() -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = lm_loss(run, tokens, targets)
        loss.backward()
        optimizer.step()

    with console.progress("step-2026", steps + 2) as advance:
        done = measure({"step": train}, device, 2, steps, memory, advance=advance)
    if not torch.isfinite(loss):
        raise UserError(f"the loss is {loss.item()}, so no speed is reported")
    return done.samples_ms["step"], done.peak.get("step")
