"""Triton where there is one, and a stand-in that lets the files of kernels be imported where there is none."""

import importlib
import inspect
import re
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
INTERPRETED = HAVE_TRITON and bool(triton.knobs.runtime.interpret)
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
    warnings.warn(f"{reason}: kernels.reference computes instead, in plain torch", stacklevel=4)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton can compute where x lives; if not, the reader is told why, once.

    float64 is left to the reference, since the kernels' arithmetic is float32. Raises RuntimeError for a version of
    Triton that was never tried.
    """
    if x.dtype == torch.float64:
        return False
    if not HAVE_TRITON:
        _say_once("Triton is not installed")
        return False
    require_version(triton.__version__)
    if x.device.type == "cpu" and not INTERPRETED:
        _say_once("tensors are on the CPU and TRITON_INTERPRET=1 was not set before Triton was imported")
        return False
    return True
