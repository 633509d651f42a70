"""Feed-forward layers, dense and of many experts: two linear layers with a GELU between, or SwiGLU (arXiv:2002.05202).

The weights of a layer's experts are stacked. So any number of experts needs two grouped matrix products, without a loop
in Python. In bfloat16 on a GPU each product is one kernel, which reads from device memory where the rows of each expert
end (Gale et al., MegaBlocks, arXiv:2211.15841, section 4).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.presets import ModelConfig
from kernels.swiglu import SwiGLUFunction


class FeedForward(nn.Module):
    """Feed-forward layer with d_ff hidden units: (batch seq d_model) -> the same."""

    def __init__(self, config: ModelConfig, experts: int = 0) -> None:
        super().__init__()
        self.kind, self.fused = config.feed_forward, config.kernels == "triton"
        hidden = config.expert_d_ff if experts else config.d_ff
        make: Callable[..., Any] = partial(GroupedLinear, experts) if experts else nn.Linear
        if self.kind == "swiglu":  # defined in the order of calls, since FSDP gathers ahead in the order of definition
            self.gate = make(config.d_model, hidden, bias=config.bias)
        self.up = make(config.d_model, hidden, bias=config.bias)
        self.down = make(hidden, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        gate = (self.gate(x, *counts),) if self.kind == "swiglu" else ()
        return self.down(self.activate(self.up(x, *counts), *gate), *counts)

    def activate(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        """Compute the hidden units (... d_ff) from one projection or, if gated, from two."""
        if gate is not None:
            return SwiGLUFunction.apply(gate, up) if self.fused else F.silu(gate) * up
        return F.gelu(up, approximate="tanh" if self.kind == "gelu-tanh" else "none")


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x; its gradient is multiplied by `factor`."""
    if factor != 1.0 and x.requires_grad and torch.is_grad_enabled():
        x = x.view_as(x)
        x.register_hook(lambda gradient: gradient * factor)
    return x


def even_shares(rows: int, experts: int) -> list[int]:
    """Number of rows of each expert if the router is balanced, for the meta device, where counts have no values."""
    return [rows * (n + 1) // experts - rows * n // experts for n in range(experts)]


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: x (rows in) sorted by expert, weight (experts out in), counts
    (experts,) -> (rows out). Under autocast the dtypes are those of a linear layer. torch has no grouped product for
    float64, nor for rows whose size is no multiple of 16 bytes. In these cases a loop over experts computes the same,
    and the host waits for the counts."""
    casts = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    if casts and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    aligned = not any(size * x.element_size() % 16 for size in weight.shape[1:])
    # On the meta device and in torch.compile, torch has grouped products in bfloat16 only.
    shapeless = (torch.compiler.is_compiling() or x.is_meta) and x.dtype != torch.bfloat16
    if x.dtype == torch.float64 or not aligned or shapeless:
        rows = even_shares(len(x), len(weight)) if counts.is_meta else counts.tolist()
        parts = zip(x.split(rows), weight.unbind(), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)  # its backward needs one: that of a sum is expanded
    return y


class GroupedLinear(nn.Module):
    """Linear layers of several experts: x (rows in) sorted by expert, counts (experts,) -> (rows out). If results of
    several ranks are added up, `bias_share` is the share of the bias that this rank adds."""

    def __init__(self, experts: int, size_in: int, size_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, size_out, size_in))
        self.bias = nn.Parameter(torch.empty(experts, size_out)) if bias else None
        self.bias_share, self.gradient_scale = 1.0, 1.0

    def scaled(self) -> tuple[Tensor, Tensor | None]:
        """Weight (experts out in) and bias (experts out); their gradients are multiplied by `gradient_scale`."""
        bias = None if self.bias is None else scale_gradient(self.bias, self.gradient_scale) * self.bias_share
        return scale_gradient(self.weight, self.gradient_scale), bias

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        weight, bias = self.scaled()
        y = grouped_linear(x, weight, counts)
        if bias is not None:  # in place: a new tensor of this size costs more than the sum
            y += bias.to(y.dtype).repeat_interleave(counts, dim=0, output_size=len(x))
        return y


class Experts(FeedForward):
    """This rank's experts of a layer, in the order of their numbers, beginning with `first`: x (rows d_model) sorted by
    expert, counts (experts,) of rows -> (rows d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.num_experts)
        self.first = 0

    def one_by_one(self, slots: Tensor) -> Tensor:
        """Compute expert after expert in a loop, as fairseq does: slots (experts rows d_model) -> the same."""
        layers = []
        for layer in (getattr(self, name) for name in ("down", "up", "gate") if hasattr(self, name)):
            weight, bias = layer.scaled()
            # unbind, not indexing, whose backward would make a gradient of all experts' size for each expert.
            layers.append(zip(weight.unbind(), [None] * len(weight) if bias is None else bias.unbind(), strict=True))
        outputs = []
        for rows, down, *projections in zip(slots.unbind(), *layers, strict=True):
            outputs.append(F.linear(self.activate(*(F.linear(rows, *each) for each in projections)), *down))
        return torch.stack(outputs)
