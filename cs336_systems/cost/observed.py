"""Counts of a model's passes without running them: its own code on fake tensors under `host.observe.Observer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.host.observe import Counts, Observer
from cs336_systems.model.precision import autocast
from cs336_systems.model.transformer import TransformerLM, lm_loss
from cs336_systems.optim.adamw import AdamW
from cs336_systems.presets import ModelConfig, Precision

PARTS = ("parameters", "gradients", "optimizer state", "activations")
# The phases of each pass that is timed. A backward needs the forward before it.
PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("evaluation",),
    "backward": ("backward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}


@dataclass(frozen=True)
class Passes:
    """Counts by phase: "evaluation", a forward without backward, and "forward", "backward", "optimizer" of a step."""

    phases: Mapping[str, Counts]
    kept: int  # bytes that autograd keeps from forward to backward, parameters and their casts apart

    def of(self, mode: str) -> dict[str, Counts]:
        """The phases of a mode: forward, backward, forward-backward or step."""
        return {phase: self.phases[phase] for phase in PHASES[mode]}

    def memory(self, mode: str) -> dict[str, int]:
        """Bytes by part at the fullest moment of a mode; their sum is the peak. Only a step has optimizer state."""
        peaks = [counts.peak for counts in self.of("forward-backward" if mode == "backward" else mode).values()]
        fullest = max(peaks, key=lambda peak: sum(peak.values()))
        parts = {part: fullest.get(part, 0) for part in PARTS}
        parts["activations"] += sum(nbytes for kind, nbytes in fullest.items() if kind not in PARTS)
        return parts if mode == "step" else parts | {"optimizer state": 0}


def expert_rows(config: ModelConfig, tokens: int) -> int | None:
    """Rows of a layer's experts if they have a capacity, all slots of which a balanced router fills in training."""
    number = config.num_experts
    return number * (config.mixture.capacity(tokens, number, training=True) or 0) or None if number else None


@cache
def observe_passes(
    config: ModelConfig,
    batch: int,
    seq: int,
    precision: Precision = "fp32",
    device: str = "cpu",
    keeps_gradients: bool = False,
) -> Passes:
    """Count all passes of the model over (batch seq) tokens, as on `device`, which must exist, after a first step.
    With `keeps_gradients` that step's gradients stay in memory and the next are added to them, as in a wrapper's flat
    buffers. Raises UserError for what the model refuses."""
    model = TransformerLM(config, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):  # the parameters, before they are fake
        model.to_empty(device=device)
        tokens, targets = (torch.empty((batch, seq), dtype=torch.int64, device=device) for _ in range(2))
        parameters, optimizer = list(model.parameters()), AdamW(model.parameters())
        with Observer(parameters=parameters) as seen:
            seen.rows = expert_rows(config, batch * seq)
            for each in parameters:
                each.grad = torch.empty_like(each)
            seen.label("gradients", (each.grad for each in parameters if each.grad is not None))
            optimizer.step()
            if not keeps_gradients:
                optimizer.zero_grad()
            state = (value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor))
            seen.label("optimizer state", state)
            seen.begin("evaluation")
            with torch.no_grad(), autocast(tokens.device, precision):
                lm_loss(model, tokens, targets)
            seen.begin("forward")
            with autocast(tokens.device, precision):
                loss = lm_loss(model, tokens, targets)
            kept = seen.saved_bytes()
            seen.begin("backward")
            loss.backward()
            seen.label("gradients", (each.grad for each in parameters if each.grad is not None))
            for each in parameters:  # BERT's classifier of pairs has no part in this loss
                each.grad = torch.empty_like(each) if each.grad is None else each.grad
            seen.begin("optimizer")
            optimizer.step()
    return Passes(seen.phases, kept)
