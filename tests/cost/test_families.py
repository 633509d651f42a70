"""Families of published runs: every run is in one, and its errors are those of its runs."""

import json
from statistics import mean

import pytest

from cs336_systems.cost.domain import time_range
from cs336_systems.cost.families import families
from cs336_systems.cost.runs import LEFT_OUT, PUBLISHED, read_runs

RUNS = read_runs(PUBLISHED)


@pytest.mark.parametrize("by_source", [False, True])
def test_each_run_is_in_one_family_and_fitted_ones_come_first(by_source):
    found = families(RUNS, by_source)
    assert sorted(run.id for each in found for run in each.runs) == sorted(run.id for run in RUNS)
    assert [each.fitted for each in found] == sorted((each.fitted for each in found), reverse=True)
    keys = [(each.fitted, each.name, each.source, each.stack, each.machine) for each in found]
    assert len({*keys}) == len(keys)
    assert all(len({run.given["source"] for run in each.runs}) == 1 for each in found if by_source)


def test_errors_of_a_family():
    ratios = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    each = next(each for each in families(RUNS) if not each.fitted and len(each.runs) > 2)
    off = [run.step().total / run.seconds - 1 for run in each.runs]
    out = [1 / ratios[run.id] - 1 for run in each.runs]
    inside = [low <= run.seconds <= high for run in each.runs for low, high in [time_range(run.step())]]
    assert each.errors == (mean(map(abs, off)), mean(off), max(off, key=abs))
    assert each.left_out == (mean(map(abs, out)), mean(out), max(out, key=abs))
    assert each.inside == mean(inside)
