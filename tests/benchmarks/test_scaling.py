"""The benchmark of layouts, run as a user runs it: what it records, holds back and refuses; and its predicted step."""

import gc
import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.lib import scaling_study
from benchmarks.lib.rank_step import predict_step, work_seconds
from benchmarks.records import Record, read_records
from benchmarks.scaling import ScalingSettings, parse_grid
from cs336_systems.comm import Place
from cs336_systems.comm.launch import run_ranks
from cs336_systems.cost import Hardware
from cs336_systems.cost.closed_forms import Link
from cs336_systems.host.console import run_command
from cs336_systems.layout import Layout, Observation, Work
from cs336_systems.presets import Mixture, ModelConfig
from cs336_systems.schedule.lists import bubble_fraction
from cs336_systems.train.observation import observe
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.trainer import Trainer
from tests.benchmarks.test_scaling_record import FakeLauncher
from tests.support import ranks
from tests.test_layout import layout_of

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
    assert out.count("tiny bert in fp32, weak scaling") == out.count("Timers of the last rank, ms an iteration") == 1
    assert "3 records appended to" in out


def test_a_layout_that_trains_something_else_gets_no_speed(measured):
    done = measured["own"]
    assert done["code"] == 2
    line = done["err"].splitlines()[-1]
    assert line.startswith("error: 1 of 3 layouts train something else: 2x1x1: the first loss is ")
    assert line.endswith("(fp32); no speed reported")
    wrong = records_of(measured["folder"] / "own")["2x1x1"]
    assert (wrong.samples_ms, wrong.metrics) == ([], {})
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
    monkeypatch.setattr(scaling_study, "on_ranks", launcher.run)
    command = ["--smoke", "--device", "cpu", "--results", str(results), *arguments]
    assert run_command(scaling.main, command) == 0
    assert not results.exists()
    return launcher.runs


def test_a_smoke_run_is_short_records_nothing_and_keeps_what_is_given(monkeypatch, capsys, tmp_path):
    found = smoke(monkeypatch, tmp_path / "none")
    gates, turns = [(2, 0, "fp32")] * 2, [(1, 1, "fp32")] * 2
    assert found == [(name, 4, *rest) for name, rest in zip(("1x1x1", "1x2x1") * 2, gates + turns, strict=True)]
    assert "micro-batch 1 x 32" in capsys.readouterr().out
    found = smoke(monkeypatch, tmp_path / "none", "--grid", "1x1x2", "--steps", "2", "--context", "16")
    assert found == [("1x1x1", 8, 2, 0, "fp32"), ("1x1x2", 8, 2, 0, "fp32"), ("1x1x2", 8, 1, 2, "fp32")]
    assert "micro-batch 1 x 16" in capsys.readouterr().out
    strong = smoke(monkeypatch, tmp_path / "none", "--grid", "1x1x1", "--global-batch-size", "8")
    assert [run[1] for run in strong] == [8] * 2
    assert ScalingSettings().shortened(False).grid == ScalingSettings().grid  # of ranks that were started


def test_torchrun_with_no_layout_of_its_number_is_refused(monkeypatch, capsys):
    assert parse_grid("1x1x1, 2x2x2,1x1x1 3x1x4") == [(1, 1, 1), (2, 2, 2), (3, 1, 4)]
    monkeypatch.setattr(scaling, "find_place", lambda: Place(0, 3, 0, 3))
    assert run_command(scaling.main, ["--device", "cpu", "--grid", "1x1x1,2x2x1"]) == 2
    assert capsys.readouterr().err == "error: 3 ranks were started, and --grid 1x1x1,2x2x1 has no layout of 3\n"


SEQ = 8
DEEP = ModelConfig(vocab_size=44, context_length=SEQ, d_model=48, d_ff=112, num_layers=4, num_heads=4)
FAST, SLOW = Link(0.0, 1e30), Link(1.0, 1e30)
MACHINE = Hardware("some", 1e12, 1e30, "made up")


def stages_of(layout: Layout, config: ModelConfig = DEEP) -> list[Observation]:
    recipe = Recipe.of(context=SEQ)
    return [observe(recipe, config, layout, stage * layout.tp * layout.data) for stage in range(layout.pp)]


def spent(config: ModelConfig = DEEP, link: Link = SLOW, **changes) -> dict[str, float]:
    layout = layout_of(**changes)
    return predict_step(layout, stages_of(layout, config), MACHINE, link)


def test_work_takes_its_flops_bytes_starts_and_new_memory():
    hardware = Hardware("some", 10.0, 100.0, "made up", launch=1e-3, first_touch=0.5)
    assert work_seconds(Work(20, 3, 50, 4), hardware) == pytest.approx(2.0 + 0.5 + 3e-3 + 2.0)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_predicted_bubble_is_the_schedules(name, chunks):
    layout = layout_of(pp=2, chunks=chunks, schedule=name, m=8)
    stages = stages_of(layout, replace(DEEP, vocab_size=1))  # all stages have almost as much to do
    parts = predict_step(layout, stages, MACHINE, FAST)
    busy = parts["forward"] + parts["backward"]
    assert parts["total"] == pytest.approx(busy + parts["bubble"])
    assert parts["bubble"] / parts["total"] == pytest.approx(bubble_fraction(name, 2, 8, chunks), rel=0.01)
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    assert busy == pytest.approx(sum(stages[1].work[way].flops for way in ("forward", "backward")) / 1e12)


def test_every_link_adds_what_it_carries():
    # A block has four transfers; embedding, head and its two for the loss; then the norm.
    assert spent(tp=2, m=3)["tensor-parallel"] == pytest.approx(3 * (4 * 4 + 4))
    assert spent(dp=2)["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket, the vote, the norm
    assert spent(dp=2, zero=1)["data-parallel"] == pytest.approx(3 + 2)
    assert spent(pp=2, m=1)["pipeline"] == pytest.approx(2 + 1)  # there and back, and the tied embedding
    alone = spent()
    assert alone["total"] == pytest.approx(alone["forward"] + alone["backward"])
    for changes in ({}, {"tp": 2, "pp": 2, "dp": 2}):
        parts = spent(**changes)
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    # Two gathers and a reduction of each of 26 matrices, and a third of the tied one; then the vectors, vote and norm.
    assert spent(dp=2, zero=3, m=2)["data-parallel"] == pytest.approx(2 * (3 * 26 + 1) + 3)


def test_the_all_to_alls_take_their_time():
    config = replace(DEEP, num_experts=4, expert_every=2, mixture=Mixture(aux_scope="global"))
    parts = spent(config, ep=2, m=3)
    # Two layers: counts, there, back and the balance forward, there and back backward; three microbatches.
    assert parts["expert-parallel"] == pytest.approx(3 * 2 * (4 + 2))
    assert parts["data-parallel"] == pytest.approx(1 + 1 + 1)  # a bucket of dense parameters, the vote, the norm
    wide = spent(config, Link(0.0, 1e6), ep=2)
    rows = 2 * SEQ * 48 * 4
    counts = 4 * 8 + 2 * 4 * 4  # and the balance's sum over both ranks, which sends twice as much
    assert wide["expert-parallel"] == pytest.approx(2 * (4 * rows + counts) / 2 / 1e6)
    assert spent(config, FAST)["expert-parallel"] == 0
