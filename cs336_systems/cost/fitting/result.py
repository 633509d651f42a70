"""What a fit of the model's constants found, apart from how: a command line shows it without loading numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from cs336_systems.cost.large.efficiency import Constants

WIDTH = 0.5  # a prior's: two thirds of constants lie within a factor of 1.6 of it
NOISE = 0.03  # the least relative error that a model of this kind is believed to have
TOLD = 0.1  # a smaller share of the prior's variance that data take away means that they say nothing
SHARES = ("product", "fused", "memory", "inside", "between", "hidden")  # constants that are shares of a ceiling
ROUNDED = 0.005  # above 1 by less than this is 1 as it is shown


@dataclass(frozen=True)
class Calibration:
    """The constants after a fit, and how far to trust them."""

    prior: Constants
    constants: Constants
    which: tuple[str, ...]
    width: float
    noise: float  # standard deviation of log(predicted / measured): as assumed, or what was found if that is more
    deviation: dict[str, float]  # of the logarithm of each fitted constant, about its relative uncertainty
    before: list[float]  # log(predicted / measured) of each observation, with the prior
    after: list[float]
    left_out: list[float]  # predicted without its own measurement
    zeros: tuple[str, ...] = ()  # constants that were to be fitted, but are zero

    def determined(self, name: str) -> float:
        """The share of the prior's variance that the data took away: 0 if they say nothing of a constant, 1 if all."""
        return 1.0 - (self.deviation[name] / self.width) ** 2

    def impossible(self) -> dict[str, float]:
        """The fitted shares that are above 1: more than the machine can do."""
        values = {name: getattr(self.constants, name) for name in self.which if name in SHARES}
        return {name: value for name, value in values.items() if value > 1 + ROUNDED}


def mean_error(logs: Sequence[float]) -> float:
    """The mean of |predicted / measured - 1|, from the logarithms of these ratios."""
    return sum(abs(exp(each) - 1.0) for each in logs) / len(logs)


def worst_error(logs: Sequence[float]) -> float:
    """The largest of them."""
    return max(abs(exp(each) - 1.0) for each in logs)
