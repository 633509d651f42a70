"""Published runs by family, and their errors: with the constants as they are, and with those of a fit without them."""

import json
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from cs336_systems.cost.domain import time_range
from cs336_systems.cost.runs import LEFT_OUT, TrainingRun


class Errors(NamedTuple):
    """Predicted over measured time of some runs, less one: the mean size, the mean and the largest."""

    size: float
    mean: float
    worst: float


def errors_of(found: Sequence[float]) -> Errors:
    """Sum up the errors of some runs."""
    return Errors(mean(map(abs, found)), mean(found), max(found, key=abs))


def measured_errors(runs: Sequence[TrainingRun]) -> list[float]:
    """Predicted over measured time, less one, of the runs that were measured."""
    return [run.error for run in runs if run.error is not None]


def in_range(run: TrainingRun) -> bool:
    """True if the measured time lies in the predicted range."""
    low, high = time_range(run.step())
    return run.seconds is not None and low <= run.seconds <= high


class Family(NamedTuple):
    """Runs that were published together, on one stack and machine; `fitted`: constants were fitted to them."""

    fitted: bool
    name: str
    source: str
    stack: str
    machine: str
    runs: list[TrainingRun]

    @property
    def errors(self) -> Errors:
        """With the constants as they are."""
        return errors_of(measured_errors(self.runs))

    @property
    def left_out(self) -> Errors:
        """With constants that were fitted without the family or, where a stack has few, without the model."""
        ratios = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
        return errors_of([1 / ratios[run.id] - 1 for run in self.runs])

    @property
    def inside(self) -> float:
        """Share of runs in the predicted range."""
        return mean(map(in_range, self.runs))


def families(runs: Sequence[TrainingRun], by_source: bool = False) -> list[Family]:
    """The families of published runs, those that constants were fitted to first; one may have several sources."""
    found: dict[tuple[bool, str, str, str, str], Family] = {}
    for run in runs:
        row = run.given
        source = row["source"] if by_source else ""
        key = row["fitted"], row["family"], source, run.plan.stack, run.system.name
        found.setdefault(key, Family(*key, [])).runs.append(run)
    return sorted(found.values(), key=lambda each: not each.fitted)
