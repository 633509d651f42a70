"""Corrections of Triton's interpreter (3.6 to 3.8), so that a kernel computes the same on a CPU as on a GPU.

The interpreter keeps bfloat16 as 16-bit integers and then computes with these integers, without an error, and it cuts
digits off where the hardware rounds to the nearest. Here every operation on bfloat16 goes through float32 and back,
rounded to nearest even, as torch does it. Up to 3.6 its loops over a runtime range also fail with NumPy 2.4.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


def to_float32(bits: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 given as 16-bit integers, the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    """float32 rounded to the nearest bfloat16, ties to even, as 16-bit integers; NaN stays NaN."""
    return torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16().view(torch.uint16).numpy()


def widen(value: Any) -> Any:
    """A handle of bfloat16 as one of float32; anything else as it is."""
    if isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16:
        return TensorHandle(to_float32(value.data), tl.float32)
    return value


def narrow(handle: Any) -> Any:
    """A handle of float32 rounded to bfloat16; one of another type, such as a comparison's, as it is."""
    if handle.dtype.scalar == tl.float32 and handle.data.dtype == np.float32:
        return TensorHandle(to_bfloat16(handle.data), tl.bfloat16)
    return TensorHandle(handle.data, tl.int1) if handle.data.dtype == np.bool_ else handle


def through_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the interpreter that computes in float32 if an argument is bfloat16."""

    def mended(self: Any, *args: Any) -> Any:
        if all(widen(arg) is arg for arg in args):
            return method(self, *args)
        return narrow(method(self, *map(widen, args)))

    return mended


def mend_casts() -> None:
    """Constants, and conversions: those from bfloat16 widen first, those to it are rounded once, from float32."""
    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16:
            wide = widen(source)
            return TensorHandle(to_bfloat16(wide.data.astype(np.float32)), tl.bfloat16)
        return cast(self, widen(source), target) if source.dtype.scalar != target.scalar else source

    convert = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def get_bf16(self: Any, value: float) -> TensorHandle:
        return TensorHandle(to_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)

    InterpreterBuilder.get_bf16 = get_bf16
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def mend_interpreter() -> None:
    """Mend the interpreter of this process; call once, after Triton was imported with TRITON_INTERPRET=1."""
    mend_casts()
    for name in ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf"):
        setattr(InterpreterBuilder, name, through_float32(getattr(InterpreterBuilder, name)))
    reduce_sum = ReduceOps.sum

    def create_dot(self: Any, a: Any, b: Any, sum_so_far: Any, *_: Any) -> Any:
        # The hardware adds in one order, BLAS in another for each shape: sums of float64 are the same in all.
        product = widen(a).data.astype(np.float64) @ widen(b).data.astype(np.float64)
        return TensorHandle((product + sum_so_far.data).astype(sum_so_far.data.dtype), sum_so_far.dtype.scalar)

    def mended_sum(self: Any, value: Any) -> Any:
        if value.dtype != tl.bfloat16:
            return reduce_sum(self, value)
        total = np.sum(to_float32(value.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(to_bfloat16(np.asarray(total)), tl.bfloat16)

    InterpreterBuilder.create_dot = create_dot
    ReduceOps.sum = mended_sum
    patch, run = interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        """`for i in range(n)` over a value that is known only when the kernel runs (triton PR 9172, in 3.7)."""
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def quietly(self: Any, *args: Any, **options: Any) -> None:
        """A kernel that divides by zero or overflows gets an infinity, as on a GPU, and no warning of NumPy's."""
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)  # the maximum of a row of NaN
            run(self, *args, **options)

    interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__ = patch_tensor, quietly
