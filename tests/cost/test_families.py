"""Families of published runs: every run is in one, and its errors are those of its runs."""

from statistics import mean

import pytest

from cs336_systems.cost.domain import time_range
from cs336_systems.cost.runs import PUBLISHED, families, left_out_errors, read_runs, summed_up

RUNS = read_runs(PUBLISHED)


@pytest.mark.parametrize("by_source", [False, True])
def test_each_run_is_in_one_family_and_fitted_ones_come_first(by_source):
    found = families(RUNS, by_source)
    assert sorted(run.id for some in found.values() for run in some) == sorted(run.id for run in RUNS)
    assert [fitted for fitted, *_ in found] == sorted((fitted for fitted, *_ in found), reverse=True)
    assert all(len({run.given["family"] for run in some}) == 1 for some in found.values())
    assert by_source == all(len({run.given["source"] for run in some}) == 1 for some in found.values())


def test_errors_of_a_family():
    some = max(families(RUNS).values(), key=len)
    off = [run.step.total / run.seconds - 1 for run in some]
    assert summed_up([*off, None]) == (mean(map(abs, off)), mean(off), max(off, key=abs))
    assert left_out_errors(some) == [1 / run.given["left_out"] - 1 for run in some]
    inside = [low <= run.seconds <= high for run in some for low, high in [time_range(run.step)]]
    assert [run.in_range for run in some] == inside
    assert 0 < mean(inside) < 1
