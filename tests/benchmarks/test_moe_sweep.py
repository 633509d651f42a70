"""The sweep over expert layers: its grid, what it refuses, its table and its plot."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks import moe_sweep
from benchmarks.harness import WrongResultError
from benchmarks.lib import expert_layer, launcher
from benchmarks.moe_sweep import MoESweepSettings, chosen_capacity, draw, factor, lines
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.cost import Hardware
from cs336_systems.cost.plots.style import HOW_TO_PLOT, can_plot, save
from cs336_systems.host.console import run_command
from cs336_systems.model.moe import MoELayer
from tests.support import ranks

needs_matplotlib = pytest.mark.skipif(not can_plot(), reason="matplotlib is in the extra `writeup`")
TINY = {"experts": (4, 8), "tokens": 32, "d_model": 8, "d_ff": 16, "rounds": 1, "skew": 1.0}
CAPACITIES = ("1x", "2x", "0.25", "dropless")
LIMIT = 4 * 32 * 8 * 16  # of a one-hot tensor: 8 experts without a capacity have more


def measured(candidate: str = "sort", experts: int = 8, slots: int | None = 4, ranks: int = 2, **config) -> Record:
    what = {"candidate": candidate, "experts": experts, "slots": slots, "ranks": ranks, "capacity": "0.05"}
    what |= {"tokens": 32, "d_model": 8, "d_ff": 16, "top_k": 2, "skew": 1.0, "backend": "gloo"} | config
    rows = experts * (32 if slots is None else slots) if candidate == "einsum" else 64
    metrics = {"median_ms": 1.5, "ratio_median": 3.0, "bytes_ratio": 2.0, "dropped_share": 0.25}
    stamp = {"device": "abacus", "cores": 2, "threads": 1, "torch": "2", "commit": "c", "dirty": False}
    stamp |= {"date": "today", "backend": "gloo"}
    return Record("moe_sweep", what, stamp, [1.5], metrics | {"all_to_all_bytes": 32 * rows}, {"mean_ms": 2.0})


def grid() -> list[Record]:
    return [
        measured(candidate, experts, slots, ranks, capacity=capacity)
        for ranks in (1, 2)
        for experts in (8, 32)
        for capacity, slots in (("1x", 32 // experts), ("2x", 64 // experts), ("0.05", 2), ("dropless", None))
        for candidate in ("einsum", "sort")
    ]


def sweep_case(rank: int, world: int, folder: str) -> list[dict]:
    expert_layer.probe = lambda *_: Hardware("ideal", 1e9, 1e9, "made by hand")
    expert_layer.ONE_HOT_LIMIT = LIMIT
    settings = MoESweepSettings(**TINY, capacity=CAPACITIES)
    place, enter = Place(rank, world, rank, world, f"{folder}/store"), partial(moe_sweep.enter, settings)
    return expert_layer.work(place, settings, "moe_sweep", enter)["records"]


def broken_and_right_case(rank: int, world: int, folder: str) -> dict:
    """What is said of layers that ignore their capacity, and the records of those that do not."""
    right = MoELayer.by_sort
    MoELayer.by_sort = lambda self, x, logits, mixture, _, *rest: right(self, x, logits, mixture, None, *rest)
    Path(folder, "broken").mkdir(exist_ok=True)
    with pytest.raises(WrongResultError) as refused:
        sweep_case(rank, world, f"{folder}/broken")
    MoELayer.by_sort = right
    return {"refused": str(refused.value), "records": sweep_case(rank, world, folder)}


def test_a_sweep_records_every_cell_and_what_it_drops_and_of_wrong_layers_nothing():
    first, second = ranks.run_alone(broken_and_right_case, 2)
    for said in (first, second):
        assert said["refused"].startswith("sort's output is off its reference by")
    records = [Record(**each) for each in first["records"]]
    found = {(r.config["experts"], r.config["capacity"], r.config["candidate"]): r for r in records}
    every = {(e, c, name) for e in (4, 8) for c in CAPACITIES for name in ("einsum", "sort")}
    assert set(found) == every - {(8, "dropless", "einsum")}
    assert [found[8, c, "sort"].config["slots"] for c in CAPACITIES] == [4, 8, 8, None]
    for (experts, _, name), record in found.items():
        config, metrics, whole = record.config, record.metrics, 2 * 32 * 8 * 4
        if name == "sort":
            assert metrics["all_to_all_bytes"] == pytest.approx((1 - metrics["dropped_share"]) * whole)
            assert metrics["all_to_all_bytes"] <= record.predicted["all_to_all_bytes"]
        else:
            slots = 32 if config["slots"] is None else config["slots"]
            assert metrics["all_to_all_bytes"] == record.predicted["all_to_all_bytes"] == experts * slots * 8 * 4
            assert metrics["dropped_share"] == found[experts, config["capacity"], "sort"].metrics["dropped_share"]
    for experts in (4, 8):
        dropped = [found[experts, c, "sort"].metrics["dropped_share"] for c in ("1x", "2x", "dropless")]
        assert dropped[0] > dropped[1] > dropped[2] == 0
        assert dropped[0] >= 0.5  # of all choices: at 1x there are half as many slots


def test_ranks_that_were_started_are_those_measured(in_tmp, monkeypatch, capsys):
    here, run = Place(rank=1, world_size=4, local_rank=1, local_world_size=4, meeting="host:1"), Mock()
    run.return_value = {"records": []}
    monkeypatch.setattr(launcher.Launcher, "run", run)
    for arguments in ([], ["--nproc", "2", "--smoke"]):
        assert run_command(moe_sweep.main, ["--results", "out", *arguments]) == 0
    assert [call.args[0] for call in run.call_args_list] == [1, 2, 4, 2]
    monkeypatch.setattr(launcher, "find_place", lambda: here)
    assert run_command(moe_sweep.main, ["--results", "other"]) == 0
    assert len(run.call_args_list) == 5
    assert [path.name for path in in_tmp.iterdir()] == ["out"]  # rank 1 opens no file of records
    assert run_command(moe_sweep.main, ["--nproc", "2"]) == 2
    assert "--nproc 2 would start ranks, but 4 were started already" in capsys.readouterr().err


@pytest.mark.parametrize("there", [pytest.param(True, marks=needs_matplotlib), False])
def test_what_was_measured_is_drawn_beside_the_records(there, in_tmp, monkeypatch, capsys):
    """Without matplotlib the table and the records are all there is."""

    def run(self, count, *_):
        return {"records": [asdict(each) for each in grid() if each.config["ranks"] == count]}

    monkeypatch.setattr(launcher.Launcher, "run", run)
    monkeypatch.setattr(moe_sweep, "can_plot", lambda: there)
    assert run_command(moe_sweep.main, ["--results", "out", "--nproc", "1", "--nproc", "2"]) == 0
    shown = capsys.readouterr().out
    assert "32 records appended to out/moe_sweep.jsonl" in shown
    assert "Sweep: layers of 8 x 16, 32 tokens a rank, router skewed by 1" in shown
    assert "gloo ranks of 1 thread(s) on abacus, 2 cores, torch 2, commit c, today." in shown
    assert ("plot in out/moe_sweep.svg" if there else HOW_TO_PLOT) in shown
    assert (picture := in_tmp / "out/moe_sweep.svg").exists() == there
    if there:
        assert picture.read_bytes() == save(draw(grid()), in_tmp / "again.svg").read_bytes()
        assert picture.stat().st_size < 60_000


def test_lines_of_the_plot():
    records = grid()
    assert chosen_capacity(records) == "0.05"
    assert chosen_capacity([measured(capacity="2x"), measured(capacity="dropless")]) == "2x"
    limited = [record for record in records if record.config["slots"] is not None]
    found = lines(limited, factor, "experts", "candidate", "ranks")
    assert len(found) == 8
    assert [factor(r) for r in found[8, "sort", 1]] == [0.5, 1.0, 2.0]
    assert [factor(r) for r in found[32, "sort", 1]] == [1.0, 2.0, 2.0]
