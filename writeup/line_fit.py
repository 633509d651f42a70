"""The time of a transfer as a line over its bytes: seconds = overhead x calls + bytes / bandwidth, fitted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np


@dataclass(frozen=True)
class Line:
    """Seconds per call, bytes/s, and the error of the line: the root mean square of (fitted - measured)/measured."""

    overhead: float
    bandwidth: float
    residual: float


def fit(points: Sequence[tuple[float, float, float]]) -> Line | None:
    """The line through (calls, bytes, seconds), by least squares of relative errors, since sizes span decades.

    None if the points do not determine it: fewer than three, all of one shape, or a call or byte that takes no time in
    the fit. A bandwidth is of the bytes as given: those of the tensor give the algorithm's, bytes sent the bus's.
    """
    if len(points) < 3:
        return None
    rows = np.array([[calls / seconds, nbytes / seconds] for calls, nbytes, seconds in points])
    scale = rows.max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
    overhead, inverse = (float(value) for value in solution / scale)
    if rank < 2 or overhead <= 0 or inverse <= 0:
        return None
    errors = rows @ np.array([overhead, inverse]) - 1
    return Line(overhead, 1 / inverse, sqrt(float(np.mean(errors**2))))
