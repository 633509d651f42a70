"""Fit the cost model's constants to measured times: a maximum a posteriori estimate.

A few runs do not determine ten constants. So each has a prior: the logarithm of a constant lies around that of its
value before the fit, with a stated standard deviation, its width. The fit is the most probable set of constants,

    minimise over x:  sum over data weight (log(predicted / measured) / noise)^2  +  sum over constants (x / width)^2,

with x the logarithm of a constant over its prior value, found by the method of Levenberg and Marquardt (Marquardt,
SIAM J. 11(2), 1963). A run whose error is more than FAR times that of the others weighs less, by the square of the
ratio, as something slowed it down (iteratively reweighted least squares; Holland and Welsch, Comm. Stat. A6(9), 1977).

The curvature at the minimum gives the uncertainty of each constant (Laplace's approximation), and the error that each
prediction would have without its own measurement: r / (1 - h), for a residual r and its leverage h, exact where the
model is linear (Allen, Technometrics 16(1), 1974).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from cs336_systems.cost.fitting.observations import Observation
from cs336_systems.cost.machines import CONSTANTS, NAMES, Constants
from cs336_systems.errors import UserError

Array = NDArray[np.float64]
Residuals = Callable[[Array], Array]

WIDTH = 0.5  # of a prior: two thirds of constants lie within a factor of 1.6 of its value
NOISE = 0.03  # assumed least relative error of a model of this kind
FAR, ENOUGH = 3.0, 5  # times the usual error, from which a run weighs less; runs that define the usual error
TOLD = 0.1  # data that reduce the prior's variance by less than this share do not determine a constant
SHARES = ("product", "fused", "memory", "inside", "between", "hidden")  # constants that are shares of a ceiling
ROUNDED = 0.005  # a share above 1 by less than this is shown as 1
STEPS, REPEATS, LARGEST, CLOSE, DIFFERENCE = 50, 10, 1.0, 1e-8, 1e-5  # of the minimisation; the last in logarithms


@dataclass(frozen=True)
class Calibration:
    """Constants after a fit, and how far to trust them. A list has one entry per observation."""

    prior: Constants
    constants: Constants
    which: tuple[str, ...]
    width: float
    noise: float  # standard deviation of log(predicted / measured): assumed, or found if that is more
    deviation: dict[str, float]  # of the logarithm of each fitted constant, about its relative uncertainty
    before: list[float]  # log(predicted / measured) with the prior
    after: list[float]
    left_out: list[float]  # after a fit without this observation
    zeros: tuple[str, ...] = ()  # constants that should be fitted, but are zero

    def determined(self, name: str) -> float:
        """Share by which the data reduce the prior's variance: 0 if they say nothing of a constant, 1 if all."""
        return 1.0 - (self.deviation[name] / self.width) ** 2

    def impossible(self) -> dict[str, float]:
        """Fitted shares above 1, which are more than the machine can do."""
        values = {name: getattr(self.constants, name) for name in self.which if name in SHARES}
        return {name: value for name, value in values.items() if value > 1 + ROUNDED}


def fit(
    observations: Sequence[Observation],
    prior: Constants = CONSTANTS,
    which: Sequence[str] = NAMES,
    width: float = WIDTH,
    noise: float = NOISE,
) -> Calibration:
    """Fit the constants in `which`; the others stay, and so do those that are zero, since constants change by factors.
    If the data scatter about the fit by more than `noise`, the scatter becomes the noise, so that they count less, and
    the fit is repeated. Raises UserError for an unknown constant, and where all of them are zero."""
    names, least, count = _fitted(prior, which), noise, len(observations)
    weights = np.ones(count)

    def constants(x: Iterable[float]) -> Constants:
        return replace(prior, **{name: getattr(prior, name) * exp(value) for name, value in zip(names, x, strict=True)})

    @cache  # with other weights and noise the minimisation comes to the same places again
    def ratios(*x: float) -> Array:
        at = constants(x)
        return np.array([log(each.predict(at) / each.seconds) for each in observations])

    def weighted(x: Array) -> Array:
        """Square roots of the summands, by observation and then by constant."""
        return np.concatenate([np.sqrt(weights) * ratios(*x.tolist()) / noise, x / width])

    before, x = ratios(*[0.0] * len(names)), _minimum(weighted, len(names), width)
    for _ in range(REPEATS):
        r, slopes = ratios(*x.tolist()), _slopes(weighted, x)
        covariance = np.linalg.inv(slopes.T @ slopes)
        leverage = np.einsum("ij,jk,ik->i", slopes[:count], covariance, slopes[:count])
        # Runs far above the usual error weigh less.
        usual = max(least, 1.4826 * float(np.median(np.abs(r)))) if count >= ENOUGH else np.inf
        new = np.minimum(1.0, (FAR * usual / np.maximum(np.abs(r), CLOSE)) ** 2)
        free = float(new.sum() - leverage.sum())
        scatter = max(least, float(np.sqrt(new @ r**2 / free))) if free > 1 else least
        if abs(scatter / noise - 1) < 0.01 and np.abs(new - weights).max() < 0.01:
            break
        noise, weights = scatter, new
        x = _descend(weighted, x)
    zeros = tuple(name for name in NAMES if name in which and name not in names)
    spreads = dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    residuals = before.tolist(), r.tolist(), (r / (1.0 - leverage)).tolist()
    return Calibration(prior, constants(x), names, width, noise, spreads, *residuals, zeros)


def _fitted(prior: Constants, which: Sequence[str]) -> tuple[str, ...]:
    """The constants of `which` that are not zero."""
    if unknown := [name for name in which if name not in NAMES]:
        raise UserError(f"no constant is called {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    if names := tuple(name for name in NAMES if name in which and getattr(prior, name) > 0):
        return names
    changes = "zero before the fit, which changes constants by factors; nothing else is to be fitted"
    raise UserError(f"{', '.join(which)}: {changes}")


def _slopes(weighted: Residuals, x: Array) -> Array:
    """Derivatives (residuals constants), by finite differences."""
    here = weighted(x)
    return np.stack([(weighted(x + way) - here) / DIFFERENCE for way in DIFFERENCE * np.eye(len(x))], axis=1)


def _minimum(weighted: Residuals, count: int, width: float) -> Array:
    """Minimise from the prior; if the data do not determine a constant there, also from a larger and a smaller value: a
    somewhat slower host, for example, changes nothing while the device is busy longer, but a much slower one does."""
    start = np.zeros(count)
    best, here = _descend(weighted, start), weighted(start)
    slopes = _slopes(weighted, best)
    undetermined = np.diag(np.linalg.inv(slopes.T @ slopes)) > (1 - TOLD) * width**2
    for index in np.flatnonzero(undetermined):
        for far in (2 * width, -2 * width):
            start = far * np.eye(count)[index]
            if np.abs(weighted(start) - here)[:-count].max() > 1:  # it changes some prediction by more than the noise
                best = min(best, _descend(weighted, start), key=lambda x: float(np.sum(weighted(x) ** 2)))
    return best


def _descend(weighted: Residuals, x: Array) -> Array:
    """Minimise the sum of squares (Levenberg-Marquardt): Gauss-Newton steps, damped more the less the last helped."""
    r, slopes, damping = weighted(x), _slopes(weighted, x), 1e-3
    for _ in range(STEPS):
        damped = np.diag(np.sqrt(damping * np.sum(slopes**2, axis=0)))
        step = np.linalg.lstsq(np.vstack([slopes, damped]), -np.concatenate([r, np.zeros(len(x))]), rcond=None)[0]
        step *= min(1.0, LARGEST / max(float(np.abs(step).max()), CLOSE))
        tried = weighted(x + step)
        gain = float(r @ r - tried @ tried)
        if gain >= 0:
            x, r, damping = x + step, tried, damping / 10
            if gain < CLOSE * (1 + float(r @ r)):
                break
            slopes = _slopes(weighted, x)
        else:
            damping *= 10
            if float(np.abs(step).max()) < CLOSE:
                break
    return x
