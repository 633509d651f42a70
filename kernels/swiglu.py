"""The gated activation of SwiGLU in Triton: silu(gate) * up in one pass forward, both gradients in one pass backward.

    y = a s u    with a = gate, u = up and s = 1 / (1 + exp(-a))

Every element is worth a dozen operations and costs its transport. Forward reads two numbers and writes one; backward
reads three and writes two, because it computes s anew instead of keeping silu(gate). Plain torch writes silu(gate) in
between and reads it back, twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import reference
from kernels.backend import jit, runs_triton, tl
from kernels.checks import require_floating, require_same_device, require_shape
from kernels.elementwise import launch_over
from kernels.ops import define


@jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """y = a s u; `elementwise.launch_over` says why the elements are counted in units."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.cast(units, tl.int64) * UNIT
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(y_ptr + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@jit
def swiglu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, units,
    NEED_GATE: tl.constexpr, NEED_UP: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/da = dL/dy u s (1 + a (1 - s)) and dL/du = dL/dy a s; what is not needed is neither read nor written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.cast(units, tl.int64) * UNIT
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    if NEED_GATE:
        up = tl.load(up_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(grad_gate_ptr + at, grad * up * s * (1.0 + gate * (1.0 - s)), mask=inside)
    if NEED_UP:
        tl.store(grad_up_ptr + at, grad * gate * s, mask=inside)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    if not runs_triton(gate, up):
        return reference.swiglu(gate, up)
    y = torch.empty_like(gate)
    launch_over(swiglu_kernel, gate, up, y)
    return y


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    if not runs_triton(gate, up):
        grad_gate, grad_up = reference.swiglu_backward(grad, gate, up)
        return grad_gate if need_gate else gate.new_empty(0), grad_up if need_up else up.new_empty(0)
    grad_gate, grad_up = _fake_backward(grad, gate, up, need_gate, need_up)
    flags = {"NEED_GATE": need_gate, "NEED_UP": need_up}
    launch_over(swiglu_backward_kernel, grad, gate, up, grad_gate, grad_up, **flags)
    return grad_gate, grad_up


def _fake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape if need_gate else 0), up.new_empty(up.shape if need_up else 0)


_forward_op = define("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu, _fake_swiglu)
_backward_op = define(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, bool need_gate, bool need_up) -> (Tensor, Tensor)",
    _swiglu_backward,
    _fake_backward,
)


class SwiGLUFunction(torch.autograd.Function):
    """`reference.swiglu` fused: apply(gate, up), both (... d_ff) -> (... d_ff).

    Any mix of float32, float16 and bfloat16; y has gate's dtype. Keeps gate and up for backward. Raises TypeError for
    integers, ValueError for an up of another shape or device.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        require_floating(gate=gate, up=up)
        require_same_device(gate=gate, up=up)
        require_shape("up", up, tuple(gate.shape), "gate")
        ctx.save_for_backward(gate, up)
        return _forward_op(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_gate, need_up = ctx.needs_input_grad
        grad_gate, grad_up = _backward_op(grad, *ctx.saved_tensors, need_gate, need_up)
        return grad_gate if need_gate else None, grad_up if need_up else None
