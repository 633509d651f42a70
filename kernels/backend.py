"""Triton where there is one, and a stand-in that lets the files of kernels be imported where there is none."""

import importlib
import inspect
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Files between a user's line and here, which are not to blame for what it is warned of.
BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
OLDEST, NEWEST = (3, 6), (3, 8)  # the versions of Triton that the kernels were compiled and run with


class _Missing:
    """Takes the place of `triton` and `tl`: whatever is asked of it is there, and of no use."""

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
# Read by Triton itself from TRITON_INTERPRET, once, when it is imported.
INTERPRETED = HAVE_TRITON and hasattr(triton, "knobs") and bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    from kernels.interpreter import mend_interpreter

    mend_interpreter()


def jit(kernel: Any) -> Any:
    """`triton.jit` for our conventions: pointers are named `*_ptr`, constants annotated, and the rest are numbers of
    which Triton shall not compile a version for 1, one for multiples of 16 and one for the others."""
    numbers = [
        name
        for name, parameter in inspect.signature(kernel).parameters.items()
        if parameter.annotation is parameter.empty and not name.endswith("_ptr")
    ]
    return triton.jit(kernel, do_not_specialize=numbers) if HAVE_TRITON else kernel


@cache
def require_version(version: str) -> None:
    """Raises RuntimeError for a Triton that these kernels were never run with; it might compute something else."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        spans = " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise RuntimeError(f"Triton {version} was never tried with these kernels ({spans} were); install one of those")


@cache
def _say_once(reason: str) -> None:
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{reason}: kernels.reference computes instead, in plain torch", stacklevel=level + 1)


def runs_triton(*tensors: Tensor) -> bool:
    """Whether Triton can compute where the tensors, which share a device, live; if not, the reader is told why, once.

    float64 is left to the reference, since the kernels' arithmetic is float32, and so are devices that are neither CPU
    nor CUDA. Raises RuntimeError for a version of Triton that was never tried.
    """
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
