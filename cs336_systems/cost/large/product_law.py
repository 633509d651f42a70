"""What a machine's matrix products obey, from the times of some: the rate of the largest, and what small ones lose.

The law is that of `efficiency.py`. What is made small is the mean distance between the logarithms of predicted and of
measured, so that small and large products count alike, and one that something else held up does not count for more.
"""

from collections.abc import Sequence
from itertools import product
from math import exp, log
from statistics import fmean, median
from typing import NamedTuple

# Steps of the inner dimension, and shares of a wave, among which the best pair is looked for.
RAMPS = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0, 70.0, 100.0, 140.0, 180.0, 250.0, 350.0, 500.0, 700.0, 1000.0)
WAVES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


class Timed(NamedTuple):
    """A product (rows inner) x (inner columns), and how long it took."""

    rows: int
    inner: int
    columns: int
    seconds: float


class Law(NamedTuple):
    """FLOP/s of products without end, what small ones lose, and how far the law is from what was measured."""

    rate: float
    ramp: float
    wave: float
    error: float  # mean distance from what was measured, of logarithms: 0.1 is about 10%


def fit_law(timed: Sequence[Timed], tile: float, start: float) -> Law:
    """The law of some products. `tile` is how many numbers all processors make at once; `start` are the seconds that
    an operator takes to begin, which are not the product's."""

    def fitted(ramp: float, wave: float) -> Law:
        logs = []
        for rows, inner, columns, seconds in timed:
            waves = rows * columns / tile
            share = waves / (waves + wave) * inner / (inner + ramp)
            logs.append(log(2 * rows * inner * columns / share / max(seconds - start, 0.2 * seconds)))
        middle = median(logs)
        return Law(exp(middle), ramp, wave, fmean(abs(each - middle) for each in logs))

    return min((fitted(ramp, wave) for ramp, wave in product(RAMPS, WAVES)), key=lambda law: law.error)
