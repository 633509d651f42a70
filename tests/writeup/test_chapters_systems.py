"""Tables and sentences of the chapters on arithmetic, layouts, experts and predictions, from made-up records."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from benchmarks.records import Record
from cs336_systems.cost.course import question
from writeup.book import Book
from writeup.chapters import model_parallelism, predicting
from writeup.chapters.introduction import machine_rates, sizes_table
from writeup.chapters.model_parallelism import predicted_step, study_table, without_recipe
from writeup.chapters.moe import published_shares, same_calls
from writeup.chapters.predicting import published_runs

SHARE = "communication / compute"
CPU = {"device": "cpu", "device_type": "cpu", "cores": 2, "commit": "abc", "dirty": False, "date": "2026-01-02"}


def record(benchmark: str, config: dict[str, Any], ms: Sequence[float] = (), **more: Any) -> Record:
    """A record whose median is that of its samples, an odd number."""
    metrics = ({"median_ms": sorted(ms)[len(ms) // 2]} if ms else {}) | more.pop("metrics", {})
    return Record(benchmark, config, more.pop("environment", CPU), list(ms), metrics, **more)


def test_limits_of_parallelism_agree_with_their_ratios():
    rows = model_parallelism.limits(Book(machine=None), {name: question(name) for name in model_parallelism.NAMES}).rows
    for split, way, devices, share, limit in (row.values() for row in rows[1:]):
        asked = 1
        for each in devices.split(" x "):
            asked *= int(each)
        assert (float(share.rstrip("%")) <= 100) == (asked <= int(limit.split()[0])), (split, way)
    assert float(rows[-2][SHARE].rstrip("%")) < float(rows[-1][SHARE].rstrip("%"))  # what overlaps takes less


def test_the_published_profile_says_that_the_host_decides():
    shares = published_shares(Book(machine=None))
    assert (shares["busy"], shares["sent"], shares["working"]) == ("12%", "63%", "4.5%")
    assert same_calls(None) == ""


def test_the_model_is_furthest_off_where_the_study_starved_its_hosts():
    study = model_parallelism.read_runs([model_parallelism.STUDY])
    steps = [predicted_step(run) for run in study]
    table = study_table(Book(machine=None), study, steps)
    assert [row["see"] for row in table.rows] == ["5", "", "3", "1, 4", "", "2, 4"]


def test_families_that_are_far_off_are_named_with_a_reason_or_without(monkeypatch):
    runs = published_runs()
    said = predicting.far_off(runs)
    assert any(line.startswith("Pythia 2023 on A100-40GB, -20%: narrower models") for line in said)
    assert not any("Korthikanti" in line for line in said)
    assert not any(line.endswith("not explained") for line in said)
    assert all(any(name in each.row["family"] for each in runs) for name in predicting.REASONS)
    monkeypatch.setattr(predicting, "FAR", 10.0)
    assert predicting.far_off(runs) == []


@pytest.mark.parametrize("kind", ["wrong", "missing"])
def test_every_difference_of_the_notebook_fills_its_columns(kind):
    table = predicting.differences(Book(machine=None), kind)
    assert table.rows
    assert all(all(row.values()) for row in table.rows)


def test_recipes_for_clusters_are_left_out():
    whole = "A launcher can do this: Open MPI binds each process. Cure: none"
    assert without_recipe(whole) == "A launcher can do this."
    assert without_recipe("Nothing: here.") == "Nothing: here."


def test_rates_of_a_machine_are_counted_once_a_run():
    one = record("e2e", {"precision": "bf16"}, metrics={"peak_flops_per_s": 4e9, "bandwidth_bytes_per_s": 1e9})
    later = record("e2e", {"precision": "bf16"}, metrics={"peak_flops_per_s": 6e9}, environment=CPU | {"date": "2"})
    link = record("ddp", {"ranks": 2, "link": "1gbit tbf"}, metrics={"link_bytes_per_s": 1e8, "latency_ms": 0.5})
    assert machine_rates([one, replace(one, config={"precision": "bf16", "mode": "step"}), later, link]) == {
        "products in bf16": {"FLOP/s": [4e9, 6e9]},
        "copies, read and written": {"B/s": [1e9]},
        "between 2 ranks, 1 Gbit/s link": {"B/s": [1e8], "latency": [0.5]},
    }


def test_sizes_of_two_editions_share_a_row_only_if_they_are_one_model():
    rows = {(row["<size"], row["<editions"]): [*row.values()] for row in sizes_table(Book(machine=None)).rows}
    assert rows["small", "2025, 2026"][-1] == "4 x 128, 4 x 512"
    assert rows["xl", "2025"][2] != rows["xl", "2026"][2]
    assert rows["tiny", "this project's"][3:5] == ["4", "128"]
