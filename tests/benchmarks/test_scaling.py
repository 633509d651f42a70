"""The benchmark of layouts, run as a user runs it: what it records, holds back and refuses."""

import gc
import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.lib import scaling_study
from benchmarks.lib.scaling_tables import scaling_tables
from benchmarks.records import Record, read_records
from benchmarks.scaling import ScalingSettings, parse_grid
from cs336_systems.comm import Place
from cs336_systems.comm.launch import run_ranks
from cs336_systems.host.console import run_command
from cs336_systems.train.trainer import Trainer
from tests.benchmarks.test_scaling_record import FakeLauncher
from tests.support import ranks

SMALL = ("--device", "cpu", "--context", "32", "--micro-batch-size", "1", "--global-batch-per-dp", "2")
QUICK = (*SMALL, "--rounds", "1", "--steps", "1", "--warmup", "1")


def command(arguments: list[str]) -> dict:
    """Run it in this process, which must not have run tensor code, as it forks."""
    scaling_study.PROBE_SECONDS = 0.01
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(scaling.main, arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def measured_case(rank: int, world: int, folder: str, results: str) -> dict:
    """A grid of which tp 2 trains something else, and then what torchrun's two ranks make of another."""
    share = Trainer._share

    def off(trainer, losses, counted):
        return share(trainer, losses, counted) * (1.01 if trainer.mesh.tp.size() > 1 else 1.0)

    Trainer._share = off
    gc.freeze()  # what the ranks need not copy
    arguments = ["--grid", "1x1x1,1x2x1,2x1x1", *QUICK, "--results", f"{results}/own"]
    answer = {"own": command(arguments)}
    run_ranks(torchrun_rank, 2, "cpu", Path(folder), results)
    return answer | {"torchrun": [json.loads(Path(folder, f"said-{rank}").read_text()) for rank in (0, 1)]}


def torchrun_rank(place: Place, folder: Path, results: str) -> None:
    scaling.find_place = lambda: place
    said = command(["--grid", "1x1x1,1x1x2", *QUICK, "--results", f"{results}/torchrun"])
    (folder / f"said-{place.rank}").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    """Output of the commands, and the folder of their records."""
    folder = tmp_path_factory.mktemp("scaling")
    (answer,) = ranks.run_alone(measured_case, 1, results=str(folder))
    return answer | {"folder": folder}


def records_of(folder: Path) -> dict[str, Record]:
    return {record.config["layout"]: record for record in read_records(folder / "scaling.jsonl")}


def test_every_layout_is_recorded_beside_one_rank(measured):
    done, folder = measured["own"], measured["folder"] / "own"
    records = records_of(folder)
    assert list(records) == ["1x1x1", "1x2x1", "2x1x1"]
    del records["2x1x1"]
    one, two = records.values()
    assert one.metrics["efficiency_median"] == one.metrics["efficiency_low"] == 1.0
    assert two.config | {"tp": 1, "pp": 2, "dp": 1, "ranks": 2, "global_batch_size": 2, "base": "1x1x1"} == two.config
    assert two.environment | {"world_size": 2, "backend": "shm", "threads": 1} == two.environment
    for record in records.values():
        assert len(record.samples_ms) == 1
        world = record.config["ranks"]
        assert {len(values) for values in record.metrics["timers_ms"].values()} == {world}
        assert len(record.metrics["memory_bytes"]) == world
        assert record.metrics["gpu_utilisation"] == [None] * world
        assert 0 < record.metrics["mfu"] == record.metrics["hfu"] < 1.1
        assert record.predicted["mean_ms"] > 0
    assert one.predicted["bubble"] == one.metrics["bubble"] == 0
    assert two.predicted["bubble"] == 1 / 3
    assert 0 < two.metrics["bubble"] < 1
    sends = two.metrics["timers_ms"]["forward-send-backward-recv"]
    assert [each is None for each in sends] == [False, True]  # of the last stage, no forward is sent
    step = two.metrics["ms_per_sample"] * 2
    assert two.metrics["tokens_per_s"] == pytest.approx(1e3 * 2 * 32 / step)
    assert any(math.isclose(step, sample) for sample in two.samples_ms)
    out = " ".join(done["out"].split())
    assert "│ forward-send-backward-recv" not in out  # of the last rank, and no table of another
    assert out.count("tiny bert in fp32, weak scaling") == 1
    assert "Scaling: " not in out  # one bubble and one MFU a layout, those of all ranks
    assert out.count("Timers of the last rank, ms an iteration") == 1
    assert "3 records appended to" in out
    assert "Timers of the last rank, ms an iteration" in scaling_tables(folder.parent)[1]


def test_a_layout_that_trains_something_else_gets_no_speed(measured):
    done = measured["own"]
    assert done["code"] == 2
    line = done["err"].splitlines()[-1]
    assert line.startswith("error: 1 of 3 layouts train something else: 2x1x1: the first loss is ")
    assert line.endswith("(fp32); no speed reported")
    one, _, wrong = records_of(measured["folder"] / "own").values()
    assert one.samples_ms
    assert not wrong.samples_ms
    assert not wrong.metrics
    assert "no speed reported" in wrong.flags[0]
    assert "2x1x1: the first loss is" in " ".join(done["out"].split())


def test_ranks_of_torchrun_measure_the_layouts_of_their_number(measured):
    first, second = measured["torchrun"]
    assert first["code"] == second["code"] == 0, first["err"] + second["err"]
    assert "1x1x2" in first["out"]
    assert second["out"] == second["err"] == ""
    assert list(records_of(measured["folder"] / "torchrun")) == ["1x1x2"]


def smoke(monkeypatch, results: Path, *arguments: str) -> list[tuple]:
    """Work that a smoke run gives to the ranks."""
    launcher = FakeLauncher()
    monkeypatch.setattr(scaling_study, "Launcher", lambda here, device: launcher)
    command = ["--smoke", "--device", "cpu", "--results", str(results), *arguments]
    assert run_command(scaling.main, command) == 0
    assert not results.exists()
    return launcher.runs


def test_a_smoke_run_is_short_and_records_nothing(monkeypatch, capsys, tmp_path):
    found = smoke(monkeypatch, tmp_path / "none")
    gates, turns = [(2, 0, "fp32"), (2, 0, "fp32")], [(1, 1, "fp32"), (1, 1, "fp32")]
    assert found == [(name, 4, *rest) for name, rest in zip(("1x1x1", "1x2x1") * 2, gates + turns, strict=True)]
    out = capsys.readouterr().out
    assert "micro-batch 1 x 32" in out


def test_a_smoke_run_keeps_what_is_given(monkeypatch, capsys, tmp_path):
    found = smoke(monkeypatch, tmp_path / "none", "--grid", "1x1x2", "--steps", "2", "--context", "16")
    assert found == [("1x1x1", 8, 2, 0, "fp32"), ("1x1x2", 8, 2, 0, "fp32"), ("1x1x2", 8, 1, 2, "fp32")]
    assert "micro-batch 1 x 16" in capsys.readouterr().out
    strong = smoke(monkeypatch, tmp_path / "none", "--grid", "1x1x1", "--global-batch-size", "8")
    assert [run[1] for run in strong] == [8] * 2
    alone, started = (ScalingSettings().shortened(alone) for alone in (True, False))
    assert (alone.grid, started.grid) == ("1x1x1,1x2x1", ScalingSettings().grid)


def test_a_grid_is_read():
    assert parse_grid("1x1x1, 2x2x2,1x1x1 3x1x4") == [(1, 1, 1), (2, 2, 2), (3, 1, 4)]


def test_torchrun_with_no_layout_of_its_number_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "find_place", lambda: Place(0, 3, 0, 3))
    assert run_command(scaling.main, ["--device", "cpu", "--grid", "1x1x1,2x2x1"]) == 2
    assert capsys.readouterr().err == "error: 3 ranks were started, and --grid 1x1x1,2x2x1 has no layout of 3\n"
