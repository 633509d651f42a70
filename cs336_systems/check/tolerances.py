"""Tolerances: how far two right answers may differ, derived and never tuned."""

import math

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def bound(dtype: torch.dtype, stages: int, longest_sum: int = 1) -> float:
    """Relative error, to first order, of `stages` operations one after another, each a sum of up to `longest_sum` terms
    in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)."""
    return stages * longest_sum * UNIT_ROUNDOFF[dtype]


def likely_bound(dtype: torch.dtype, stages: int) -> float:
    """Relative error, in the L2 norm of many elements, of `stages` roundings one after another that are independent and
    as often up as down: variances add, so it grows with the square root (Higham and Mary, A New
    Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019).
    For half precision, where `bound` is larger than any mistake."""
    return math.sqrt(stages) * UNIT_ROUNDOFF[dtype]


def largest(x: Tensor) -> float:
    """The largest absolute value, infinite if one is not a number, and 0 of an empty tensor."""
    return x.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item() if x.numel() else 0.0


def factor_of(got: Tensor, want: Tensor) -> float | None:
    """The number, not 1, by which a tensor is a multiple of another one, which has several elements, or None."""
    factor = (got * want).sum().item() / max((want * want).sum().item(), 1e-300)
    is_multiple = want.numel() > 1 and (got - factor * want).norm() <= 1e-6 * got.norm()
    return factor if is_multiple and abs(factor - 1) > 1e-6 else None
