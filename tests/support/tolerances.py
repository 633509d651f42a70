"""How far two right answers may lie apart, derived and never tuned."""

import torch

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def bound(dtype: torch.dtype, stages: int, longest_sum: int = 1) -> float:
    """Relative error, to first order, of `stages` operations one after another, each a sum of up to `longest_sum` terms
    in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)."""
    return stages * longest_sum * UNIT_ROUNDOFF[dtype]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The L2 norm of the difference over that of what was wanted."""
    assert got.shape == want.shape
    wide = want.double()
    return ((got.double() - wide).norm() / wide.norm()).item()
