"""Tolerances between two right answers: the bounds of `cs336_systems.check`, and the distance itself."""

import torch

from cs336_systems.check.cases import UNIT_ROUNDOFF, bound, likely_bound

__all__ = ["UNIT_ROUNDOFF", "bound", "likely_bound", "relative_error"]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The L2 norm of the difference over that of what was wanted."""
    assert got.shape == want.shape
    wide = want.double()
    return ((got.double() - wide).norm() / wide.norm()).item()
