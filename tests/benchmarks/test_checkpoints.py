"""The benchmark of checkpoints on a small model, and its gate, which sees what was not saved."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoints
from benchmarks import checkpoints as rivals
from benchmarks.lib import parallel_run
from benchmarks.lib.sheets import pages
from benchmarks.records import read_records
from cs336_systems.comm import Place
from cs336_systems.cost import count_parameters
from cs336_systems.host.console import run_command
from cs336_systems.train.recipe import Recipe
from tests.support import ranks

SMALL = {"size": "tiny", "d_model": 64, "layers": 1, "context": 8, "rounds": 2, "device": "cpu"}


def benchmark_case(rank: int, world: int, folder: str, results: str) -> None:
    os.chdir(results)  # of this rank alone
    settings = checkpoints.CheckpointSettings(**SMALL, results=Path(results))
    checkpoints.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


def test_every_candidate_is_recorded_and_nothing_else_stays(tmp_path):
    (tmp_path / "machine").mkdir()
    ranks.run_alone(benchmark_case, 2, results=str(tmp_path / "machine"))
    assert [path.name for path in (tmp_path / "machine").iterdir()] == ["checkpoints.jsonl"]
    records = {each.config["candidate"]: each for each in read_records(tmp_path / "machine/checkpoints.jsonl")}
    assert list(records) == [
        *(rivals.OURS, rivals.BACKGROUND, rivals.LOAD),
        *(rivals.DCP_SAVE, rivals.DCP_LOAD, rivals.TORCH_SAVE, rivals.TORCH_LOAD),
    ]
    parameters = sum(count_parameters(checkpoints.CheckpointSettings(**SMALL).config()).values())
    for name, record in records.items():
        assert len(record.samples_ms) == 2
        assert record.metrics["bytes"] == 12 * parameters, "a weight and two moments"
        assert bool(record.predicted) == (name in (rivals.OURS, rivals.BACKGROUND, rivals.LOAD))
    assert records[rivals.DCP_SAVE].metrics["ratio_median"] == records[rivals.DCP_LOAD].metrics["ratio_median"] == 1.0
    (table,) = pages(tmp_path, "checkpoints", checkpoints.sheets)
    assert table.count("\n| ") == 2 + 7  # the head and its line


def test_a_state_that_does_not_fit_is_refused_before_ranks_start(monkeypatch, capsys):
    monkeypatch.setattr(parallel_run, "start_ranks", lambda *_: pytest.fail("started in vain"))
    assert run_command(checkpoints.main, ["--device", "cpu", "--nproc", "100000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("are usable; choose a smaller --size, or fewer --layers or ranks")


def gate_case(group, folder: str) -> list[str]:
    """The gate's findings on a way to load that changes nothing, and on one that forgets a tensor."""
    recipe = Recipe.of(size="tiny", data=("random",), num_layers=1, batch_size=2, context=8, device="cpu")
    bench = rivals.Bench(recipe, group, torch.device("cpu"), Path(folder))
    kept = {}

    def keep() -> None:
        kept.update({key: tensor.clone() for key, tensor in bench.tensors().items()})

    def give_back(but: str = "") -> None:
        for key, tensor in bench.tensors().items():
            if key != but:
                tensor.copy_(kept[key])

    bench.check("right", rivals.Candidate(keep, "", load=give_back))
    said = []
    for wrong in (lambda: None, lambda: give_back(but="embedding.tokens.weight/exp_avg_sq")):
        try:
            bench.check("wrong", rivals.Candidate(keep, "", load=wrong))
        except rivals.WrongResultError as error:
            said.append(str(error))
        give_back()
    return said


def test_the_gate_sees_what_does_not_come_back(tmp_path):
    for said in ranks.run(gate_case, 2, folder=str(tmp_path)):
        assert said == ["wrong: what was loaded is not what was saved"] * 2
