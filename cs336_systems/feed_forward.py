"""The feed-forward of a block: two layers with a GELU between, or the gated SwiGLU (arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.presets import FeedForwardKind, ModelConfig
from kernels.swiglu import SwiGLUFunction


def activate(kind: FeedForwardKind, fused: bool, up: Tensor, gate: Tensor | None) -> Tensor:
    """The hidden activation (... d_ff) of one projection, or of two where the kind is gated."""
    if gate is not None:
        return SwiGLUFunction.apply(gate, up) if fused else F.silu(gate) * up
    return F.gelu(up, approximate="tanh" if kind == "gelu-tanh" else "none")


class FeedForward(nn.Module):
    """(batch seq d_model) -> the same, through d_ff."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.fused = config.feed_forward, config.kernels == "triton"
        if self.kind == "swiglu":  # in the order in which they are called, which FSDP gathers ahead by
            self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) if self.kind == "swiglu" else None
        return self.down(activate(self.kind, self.fused, self.up(x), gate))
