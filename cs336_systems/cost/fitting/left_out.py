"""Errors on runs that were left out: each stack's constants are fitted to all of its published runs but one group's,
which is then predicted. A group is a family of runs from one source or, where a stack has few, all runs of one model.

`python -m cs336_systems.cost.fitting.left_out` writes them into `data/published_runs.json`, after a change of runs or
constants.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import exp

import numpy as np

from cs336_systems.cost.domain import FEATURES, features
from cs336_systems.cost.fitting.calibration import fit
from cs336_systems.cost.fitting.observations import observe_step
from cs336_systems.cost.runs import PUBLISHED, TrainingRun, read_runs
from cs336_systems.cost.stacks import STACKS, Stack

FAMILIES = 3  # a stack with fewer has models as groups
SHARE = 0.8  # of left-out runs that a range contains


def published() -> dict[str, list[TrainingRun]]:
    """The published runs by stack."""
    runs = read_runs(PUBLISHED)
    return {name: [run for run in runs if run.plan.stack == name] for name in dict.fromkeys(r.plan.stack for r in runs)}


def left_out(stack: Stack, runs: Sequence[TrainingRun]) -> Iterator[tuple[str, float]]:
    """(id, measured over predicted) of each run, from a fit without its group, which takes seconds per group; of stacks
    to which nothing is fitted, as they are."""
    by_family = len({run.given["family"] for run in runs}) >= FAMILIES
    groups: dict[object, list[TrainingRun]] = {}
    for run in runs:
        name = run.given["family"] if by_family else (run.config.d_model, run.config.num_layers)
        groups.setdefault(name, []).append(run)
    for group in groups.values():
        others = [each for run in runs if run.given["fitted"] and run not in group for each in observe_step(run)]
        constants = stack.own()
        if stack.fitted and others:
            constants = fit(others, constants, stack.fitted).constants
        for run in group:
            if run.seconds:
                yield run.id, run.seconds / run.under(constants).step.total


def inside(ratios: Mapping[str, float], runs: Sequence[TrainingRun]) -> list[float]:
    """The ratios of runs without a feature outside the domain, such as FP8."""
    return [ratios[run.id] for run in runs if run.seconds and set(features(run.config, run.plan)) <= set(FEATURES)]


def central(ratios: Sequence[float]) -> tuple[float, float]:
    """The range that four of five ratios fall into, a tenth below and a tenth above."""
    low, high = np.quantile(np.log(ratios), [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return exp(low), exp(high)


def main() -> None:
    """Write the file, and print each stack's range, over its runs without a feature outside the domain."""
    found: dict[str, float] = {}
    for name, of_stack in published().items():
        ratios = dict(left_out(STACKS[name], of_stack))
        low, high = central(inside(ratios, of_stack))
        print(f"{name}: four of five took {low:.3f} to {high:.3f} of the prediction")
        found |= {run: round(ratio, 4) for run, ratio in ratios.items()}
    rows = [row | {"left_out": found[row["id"]]} for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))]
    lines = ",\n".join(f" {json.dumps(row, allow_nan=False)}" for row in rows)
    PUBLISHED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
