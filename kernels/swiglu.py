"""The gated activation of SwiGLU in Triton: silu(gate) * up in one pass forward, both gradients in one pass backward.

    y = a s u    with a = gate, u = up and s = 1 / (1 + exp(-a))

Memory traffic takes most of the time. Forward reads two numbers and writes one; backward reads three and writes two,
because it recomputes s instead of keeping silu(gate), which plain torch writes and reads back, twice.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.checks import check_shape, check_tensors, once_differentiable
from kernels.launch import define, jit, launch_over, new_like, runs_triton, tl


@jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """y = a s u; `launch_over` says why the elements are counted in units."""
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


@define("swiglu", lambda gate, up: new_like(gate))
def _forward_op(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    if not runs_triton(gate, up):
        return reference.swiglu(gate, up)
    y = torch.empty_like(gate)
    launch_over(swiglu_kernel, gate, up, y)
    return y


@define("swiglu_backward", lambda grad, gate, up, *needs: tuple(map(new_like, (gate, up), needs)))
def _backward_op(grad: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    if not runs_triton(gate, up):
        of_gate, of_up = reference.swiglu_backward(grad, gate, up)
        return of_gate if need_gate else new_like(gate, False), of_up if need_up else new_like(up, False)
    grad_gate, grad_up = new_like(gate, need_gate), new_like(up, need_up)
    tensors = (grad, gate, up, grad_gate, grad_up)
    launch_over(swiglu_backward_kernel, *tensors, NEED_GATE=need_gate, NEED_UP=need_up)
    return grad_gate, grad_up


class SwiGLUFunction(torch.autograd.Function):
    """`reference.swiglu` fused: apply(gate, up), both (... d_ff) -> (... d_ff), in gate's dtype. Keeps both inputs.
    Raises TypeError for integers, ValueError for an up of another shape or device."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        check_tensors(gate=gate, up=up)
        check_shape("up", up, tuple(gate.shape), "gate")
        ctx.save_for_backward(gate, up)
        return _forward_op(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _backward_op(grad, *ctx.saved_tensors, *ctx.needs_input_grad)
