"""Constants of the model from measured times: what the data say, held by what was believed before them.

A few runs do not determine ten constants. So each has a prior: the logarithm of a constant lies around that of its
value before the fit, with a stated standard deviation, its width. The fit is the most probable set of constants,

    minimise over x:  sum over data (log(predicted / measured) / noise)^2  +  sum over constants (x / width)^2,

with x the logarithm of a constant over its prior value, found by the method of Levenberg and Marquardt (Marquardt,
SIAM J. 11(2), 1963). Relative errors count alike for a short step and a long one. What the data leave open stays where
it was: its uncertainty afterwards is the prior's.

The curvature at the minimum says how sure each constant is (Laplace's approximation), and how far each prediction would
be off had its own measurement been left out: r / (1 - h), for a residual r and its leverage h, exact where the model
is linear (Allen, Technometrics 16(1), 1974).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp

import numpy as np
from numpy.typing import NDArray

from cs336_systems.cost.fitting.constants_file import NAMES
from cs336_systems.cost.fitting.observations import Observation, log_ratio
from cs336_systems.cost.fitting.result import NOISE, TOLD, WIDTH, Calibration
from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.step_time import CONSTANTS
from cs336_systems.errors import UserError

Array = NDArray[np.float64]
Residuals = Callable[[Array], Array]

STEPS, REPEATS, LARGEST, CLOSE, DIFFERENCE = 50, 10, 1.0, 1e-8, 1e-5  # of the minimisation; the last in logarithms


def fit(
    observations: Sequence[Observation],
    prior: Constants = CONSTANTS,
    which: Sequence[str] = NAMES,
    width: float = WIDTH,
    noise: float = NOISE,
) -> Calibration:
    """The most probable constants; those that are not among `which` stay, and those that are zero, changed by factors.

    Where the data scatter about the fit by more than `noise`, what they say counts for less: the noise is then what is
    found, and the fit repeated. Raises UserError for no data, an unknown constant and nothing but zeros to fit.
    """
    _check(observations, prior, which, width, noise)
    names = tuple(name for name in NAMES if name in which and getattr(prior, name) > 0)

    def constants(x: Array) -> Constants:
        return replace(prior, **{name: getattr(prior, name) * exp(value) for name, value in zip(names, x, strict=True)})

    def residuals(x: Array) -> Array:
        at = constants(x)
        return np.array([log_ratio(each, at) for each in observations])

    x, found = _minimum(residuals, len(names), width, noise), noise
    for _ in range(REPEATS):
        r, slopes = residuals(x), _slopes(residuals, x)
        covariance = _covariance(slopes, width, found)
        leverage = np.einsum("ij,jk,ik->i", slopes, covariance, slopes) / found**2
        free = len(r) - float(leverage.sum())
        scatter = max(noise, float(np.sqrt(r @ r / free))) if free > 1 else noise
        if abs(scatter / found - 1) < 0.01:
            break
        found = scatter
        x = _descend(residuals, x, width, found)[0]
    return Calibration(
        prior,
        constants(x),
        names,
        width,
        found,
        dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True)),
        residuals(np.zeros(len(names))).tolist(),
        r.tolist(),
        (r / (1.0 - leverage)).tolist(),
        tuple(name for name in NAMES if name in which and name not in names),
    )


def _check(
    observations: Sequence[Observation], prior: Constants, which: Sequence[str], width: float, noise: float
) -> None:
    if not observations:
        raise UserError("there is nothing to fit to: no run has a measured time")
    if unknown := [name for name in which if name not in NAMES]:
        raise UserError(f"no constant is called {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    if not which:
        raise UserError(f"name at least one constant to fit: {', '.join(NAMES)}")
    if not any(getattr(prior, name) > 0 for name in which):
        raise UserError(
            f"{', '.join(which)}: zero before the fit, which changes constants by factors; nothing else is to be fitted"
        )
    if not (width > 0 and noise > 0):
        raise UserError(f"the prior's width and the noise must be above zero, not {width} and {noise}")


def _slopes(residuals: Residuals, x: Array) -> Array:
    """(observations constants) derivatives, from differences."""
    here = residuals(x)
    return np.stack([(residuals(x + way) - here) / DIFFERENCE for way in DIFFERENCE * np.eye(len(x))], axis=1)


def _covariance(slopes: Array, width: float, noise: float) -> Array:
    return np.asarray(np.linalg.inv(slopes.T @ slopes / noise**2 + np.eye(slopes.shape[1]) / width**2))


def _minimum(residuals: Residuals, count: int, width: float, noise: float) -> Array:
    """The best of what is found from the prior, and from beyond it: where the device is busy longer than the host, a
    somewhat slower host changes nothing, and a much slower one everything. So what the data seem not to tell is tried
    on both sides."""
    x, lowest = _descend(residuals, np.zeros(count), width, noise)
    here = residuals(np.zeros(count))
    silent = np.diag(_covariance(_slopes(residuals, x), width, noise)) > (1 - TOLD) * width**2
    for index in np.flatnonzero(silent):
        for far in (2 * width, -2 * width):
            start = far * np.eye(count)[index]
            if np.abs(residuals(start) - here).max() > noise:
                found, cost = _descend(residuals, start, width, noise)
                if cost < lowest:
                    x, lowest = found, cost
    return x


def _descend(residuals: Residuals, x: Array, width: float, noise: float) -> tuple[Array, float]:
    """(where it ends, what is minimised there) of Levenberg and Marquardt's steps: those of Gauss and Newton, the
    shorter the less the last one helped."""

    def cost(r: Array, x: Array) -> float:
        return float(r @ r / noise**2 + x @ x / width**2)

    r, slopes, damping = residuals(x), _slopes(residuals, x), 1e-3
    for _ in range(STEPS):
        curvature = slopes.T @ slopes / noise**2 + np.eye(len(x)) / width**2
        downhill = -(slopes.T @ r / noise**2 + x / width**2)
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
        step *= min(1.0, LARGEST / max(float(np.abs(step).max()), CLOSE))
        tried = residuals(x + step)
        gain = cost(r, x) - cost(tried, x + step)
        if gain >= 0:
            x, r, damping = x + step, tried, damping / 10
            if gain < CLOSE * (1 + cost(r, x)):
                break
            slopes = _slopes(residuals, x)
        else:
            damping *= 10
            if float(np.abs(step).max()) < CLOSE:
                break
    return x, cost(r, x)
