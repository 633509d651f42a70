"""Experts: so many feed-forwards side by side, their weights stacked, each for a run of rows.

All of them are two grouped matrix products, however many there are, without a loop in Python; in bfloat16 on a GPU each
is one kernel, which reads on the device where each expert's rows end (Gale et al., MegaBlocks, arXiv:2211.15841,
section 4).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cs336_systems.feed_forward import activate
from cs336_systems.presets import ModelConfig


class _ScaleGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, whose gradient is multiplied by `factor`."""
    scaled: Tensor = x if factor == 1.0 else _ScaleGradient.apply(x, factor)
    return scaled


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each expert's matrix times its rows: x (rows in), weight (experts out in), counts (experts,) -> (rows out).

    Rows are in the order of experts. Under autocast the dtypes are those of a linear layer. torch has no grouped
    product for float64, nor for widths of which a row is no multiple of 16 bytes; there a loop over experts does the
    same, and the host waits for the counts.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    aligned = not any(size * x.element_size() % 16 for size in weight.shape[1:])
    compiled = torch.compiler.is_compiling() and x.dtype != torch.bfloat16  # torch knows no shapes of others' products
    if x.dtype == torch.float64 or not aligned or compiled:
        parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)  # its backward takes no expanded gradient, such as that of a sum
    return y


class GroupedLinear(nn.Module):
    """A linear layer for each of several experts: x (rows in) in the order of experts, `counts` (experts,) rows of
    each -> (rows out). A rank that adds its result to other ranks' has a share of the bias."""

    def __init__(self, experts: int, size_in: int, size_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, size_out, size_in))
        self.bias = nn.Parameter(torch.empty(experts, size_out)) if bias else None
        self.bias_share, self.gradient_scale = 1.0, 1.0

    def scaled(self) -> tuple[Tensor, Tensor | None]:
        """Weight (experts out in) and bias (experts out), whose gradients are scaled."""
        bias = None if self.bias is None else scale_gradient(self.bias, self.gradient_scale) * self.bias_share
        return scale_gradient(self.weight, self.gradient_scale), bias

    def each(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight (out in) and bias (out,) of every expert. Backward stacks their gradients once: indexing would make a
        gradient as large as all of them for each."""
        weight, bias = self.scaled()
        return list(zip(weight.unbind(), [None] * len(weight) if bias is None else bias.unbind(), strict=True))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        weight, bias = self.scaled()
        y = grouped_linear(x, weight, counts)
        if bias is not None:  # in place: a new tensor of this size costs more than the sum
            y += bias.to(y.dtype).repeat_interleave(counts, dim=0, output_size=len(x))
        return y


class Experts(nn.Module):
    """Feed-forwards of some experts of a layer, by the number of the first in the whole model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.fused = config.feed_forward, config.kernels == "triton"
        self.first, count, hidden = 0, config.num_experts, config.expert_d_ff
        if self.kind == "swiglu":
            self.gate = GroupedLinear(count, config.d_model, hidden, config.bias)
        self.up = GroupedLinear(count, config.d_model, hidden, config.bias)
        self.down = GroupedLinear(count, hidden, config.d_model, config.bias)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows x (rows d_model) in the order of experts, `counts` (experts,) of each -> the same shape."""
        gate = self.gate(x, counts) if self.kind == "swiglu" else None
        return self.down(activate(self.kind, self.fused, self.up(x, counts), gate), counts)

    def one_by_one(self, slots: Tensor) -> Tensor:
        """An expert at a time, as fairseq has it: slots (experts rows d_model) -> the same."""
        layers = [getattr(self, name).each() for name in ("up", "down", "gate") if hasattr(self, name)]
        outputs = []
        for rows, up, down, *gate in zip(slots.unbind(), *layers, strict=True):
            hidden = activate(self.kind, self.fused, F.linear(rows, *up), F.linear(rows, *gate[0]) if gate else None)
            outputs.append(F.linear(hidden, *down))
        return torch.stack(outputs)
