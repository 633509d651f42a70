"""Launch of Triton kernels from torch: check that Triton is installed, define operators for torch.compile, launch.

Without Triton, the files in kernels/ can still be imported, and `kernels.reference` computes in their place.
"""

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OLDEST, NEWEST = (3, 6), (3, 8)  # the versions of Triton that the kernels were compiled and run with
BETWEEN = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))  # a user's line and a warning here
ELEMENTWISE_BLOCK, ELEMENTWISE_WARPS = 2048, 8  # 8 elements per thread: 16 bytes of bfloat16


class _Missing:
    """Placeholder for `triton` and `tl` where Triton is not installed: every attribute is the placeholder itself."""

    def __getattr__(self, name: str) -> "_Missing":
        return self


triton: Any
tl: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:
    triton = tl = _Missing()

HAVE_TRITON = not isinstance(triton, _Missing)
# Triton itself reads this from TRITON_INTERPRET, once, when it is imported.
INTERPRETED = HAVE_TRITON and hasattr(triton, "knobs") and bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    from kernels.interpreter import mend_interpreter

    mend_interpreter()


def jit(kernel: Any) -> Any:
    """`triton.jit` for kernels whose pointers are named `*_ptr` and whose constants are annotated. All other parameters
    are numbers, for which Triton must not compile separate versions for 1, for multiples of 16 and for the rest."""
    names, annotated = inspect.signature(kernel).parameters, inspect.get_annotations(kernel)
    numbers = [name for name in names if name not in annotated and not name.endswith("_ptr")]
    return triton.jit(kernel, do_not_specialize=numbers) if HAVE_TRITON else kernel


@cache
def require_version(version: str) -> None:
    """Raises RuntimeError for a Triton that these kernels were never run with; it might compute something else."""
    if not OLDEST <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) <= NEWEST:
        spans = " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise RuntimeError(f"Triton {version} was never tried with these kernels ({spans} were); install one of those")


@cache
def _say_once(reason: str) -> None:
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{reason}: kernels.reference computes instead, in plain torch", stacklevel=level + 1)


def runs_triton(*tensors: Tensor) -> bool:
    """True if Triton can compute where the tensors, which share a device, live; if not, a warning says why, once.
    float64 takes the reference, since the kernels' arithmetic is float32, and so do devices other than CPU and CUDA."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or any(each.dtype == torch.float64 for each in tensors):
        return False
    if not HAVE_TRITON:
        _say_once("Triton is not installed")
        return False
    require_version(triton.__version__)
    if device == "cpu" and not INTERPRETED:
        _say_once("tensors are on the CPU and TRITON_INTERPRET=1 was not set before Triton was imported")
        return False
    return True


def new_like(x: Tensor, needed: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of x's shape, or an empty one where its values are not needed."""
    return x.new_empty(x.shape if needed else 0, dtype=dtype)


_library = torch.library.Library("cs336_kernels", "DEF")


def define(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: make a launcher the operator `cs336_kernels::name`, which torch.compile does not look into; `fake`
    makes tensors of the results' shapes, strides and dtypes. Gradients are for the autograd.Function that calls it.
    (`torch.library.custom_op` costs the host three times as much per call.)"""

    def register(launcher: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(launcher, mutates_args=(), op_name=name)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cs336_kernels::{name}", fake, lib=_library)
        return getattr(torch.ops.cs336_kernels, name).default

    return register


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], *args: Tensor | int | float | None,
    num_warps: int, num_stages: int = 1, **constants: Any,
) -> None:  # fmt: skip
    """Run `grid` programs of a kernel on the device of its first argument; `constants` are its `tl.constexpr`
    parameters, all of them and in its order, after the others. `kernel[grid](...)` takes the host about ten
    microseconds, in which a GPU normalises a small batch. So a compiled kernel is looked up by its constants, the dtype
    and 16-byte alignment of each tensor and the width of each integer, and the driver's function called directly."""
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return
    device = args[0].device  # type: ignore[union-attr]
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, num_warps=num_warps, num_stages=num_stages, **constants)
        return
    values = tuple(constants.values())
    key = (kernel.fn, device.index, num_warps, num_stages, values, *map(_sort_of, args))
    if (compiled := _compiled.get(key)) is None:
        if list(constants) != (expected := kernel.arg_names[len(args) :]):
            names = f"{expected}, in this order, not {list(constants)}"
            raise TypeError(f"{kernel.fn.__name__} takes the constants {names}")
        compiled = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        _compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)  # unloads if freed
        return
    run, function, metadata, _ = compiled
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    run(*grid, stream, function, metadata, None, None, None, *args, *values)


def _sort_of(argument: Tensor | int | float | None) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.__class__, isinstance(argument, int) and not -(2**31) <= argument < 2**31


def launch_over(kernel: Any, *tensors: Tensor, **flags: bool) -> None:
    """Run an element-wise kernel over contiguous tensors, of which the first has all elements: units * UNIT of them.
    The compiler knows that this product is a multiple of UNIT, so that UNIT neighbours are all inside or all outside,
    and reads them with one instruction in spite of the mask."""
    elements, block = tensors[0].numel(), ELEMENTWISE_BLOCK
    if elements:
        unit = 16 if elements % 16 == 0 else 1
        constants, grid = {**flags, "UNIT": unit, "BLOCK": block}, (-(-elements // block), 1, 1)
        launch(kernel, grid, *tensors, elements // unit, num_warps=ELEMENTWISE_WARPS, **constants)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; few on a CPU, so that kernels that loop over blocks do loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def ceil_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; `triton.next_power_of_2` is meant for kernels and takes 3 us."""
    return 1 << max(0, n - 1).bit_length()
