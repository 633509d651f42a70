"""The benchmarks of data parallelism, ZeRO and checkpoints, on small models; and their gates, which see a wrong one."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoints, ddp, zero
from benchmarks.harness import WrongResultError
from benchmarks.lib import parallel_run
from benchmarks.lib.parallel_run import StepSettings
from benchmarks.lib.sheets import pages
from benchmarks.lib.turns import check, wrapped
from benchmarks.records import read_records
from cs336_systems.comm import Place
from cs336_systems.cost import count_parameters
from cs336_systems.ddp import BucketedDDP, FlatDDP
from cs336_systems.train.recipe import Recipe
from tests.support import ranks
from tests.support.machine import made_up

SMALL = {"d_model": 64, "layers": 1, "batch_size": 1, "context": 8, "rounds": 2, "steps": 1, "device": "cpu"}


def ddp_case(rank: int, world: int, folder: str, results: str) -> None:
    settings = ddp.DDPSettings(**SMALL, bucket_sizes="0.01, 25", results=Path(results))
    parallel_run.probe = made_up  # in the process of this case only
    ddp.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


def test_ddp_records_every_candidate_beside_torchs(tmp_path):
    ranks.run_alone(ddp_case, 2, results=str(tmp_path))
    records = {record.config["candidate"]: record for record in read_records(tmp_path / "ddp.jsonl")}
    ours = ["naive", "flat", "overlapped", "bucketed 0.01 MB", "bucketed 25 MB"]
    assert list(records) == ["no communication", "torch DDP", *ours]
    parameters = sum(count_parameters(StepSettings(**SMALL).config()).values())
    for name in ours:
        record = records[name]
        assert len(record.samples_ms) == 2
        assert record.metrics["bytes_sent"] == 4 * parameters  # 2 (ranks - 1) / ranks of them
        assert record.environment["world_size"] == 2
        assert record.predicted["mean_ms"] > 0
    assert records["flat"].metrics["collectives"] == 1
    assert records["naive"].metrics["collectives"] == records["overlapped"].metrics["collectives"] == 11
    assert records["torch DDP"].metrics["ratio_median"] == 1.0
    assert "exposed_ms" not in records["no communication"].metrics


def zero_case(rank: int, world: int, folder: str, results: str) -> None:
    settings = StepSettings(**SMALL, results=Path(results))
    parallel_run.probe = made_up
    zero.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


def test_memory_of_every_stage_is_the_formulas(tmp_path):
    """Within 5% of 4+4+8, 4+4+8/N, 4+(4+8)/N and (4+4+8)/N bytes a parameter, counted from live storages."""
    ranks.run_alone(zero_case, 3, results=str(tmp_path))  # by which nothing divides
    records = {record.config["candidate"]: record for record in read_records(tmp_path / "zero.jsonl")}
    for name in ("stage 0", "stage 1", "stage 2", "stage 3"):
        metrics, predicted = records[name].metrics, records[name].predicted
        for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
            assert metrics[kind] == pytest.approx(predicted[kind], rel=0.05), (name, kind)
    sent = {name: record.metrics for name, record in records.items() if name.startswith("stage")}
    half = pytest.approx(sent["stage 0"]["reductions_bytes_sent"] / 2, rel=0.01)
    assert sent["stage 1"]["gathers_bytes_sent"] == half
    assert sent["stage 1, whole"]["gathers_bytes_sent"] == half
    assert sent["stage 2"]["reductions_bytes_sent"] == half


class Undivided(BucketedDDP):
    """Adds the ranks' gradients and forgets to divide."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad.mul_(self.group.size())


class Unsynchronised(FlatDDP):
    """Keeps every rank's own gradients."""

    def finish_gradient_synchronization(self) -> None:
        self.guard.finished()


def gate_case(group) -> list[str]:
    """The gate's findings on a wrapper that is right and two that are not."""
    said = []
    for wrapper in (BucketedDDP, Undivided, Unsynchronised):
        try:
            check(StepSettings(**SMALL).config(), {"it": wrapped(partial(wrapper))}, group, torch.device("cpu"))
            said.append("")
        except WrongResultError as error:
            said.append(str(error).partition(" by ")[0])
    return said


def test_the_gate_sees_a_wrong_wrapper():
    assert ranks.run(gate_case, 2) == [["", *["it's update is off its reference"] * 2]] * 2


SAVED = {"size": "tiny", "d_model": 64, "layers": 1, "context": 8, "rounds": 2, "device": "cpu"}


def saving_case(rank: int, world: int, folder: str, results: str) -> None:
    os.chdir(results)  # of this rank alone
    settings = checkpoints.CheckpointSettings(**SAVED, results=Path(results))
    checkpoints.work(Place(rank, world, rank, world, f"{folder}/store"), settings)


def test_every_way_to_save_is_recorded_and_nothing_else_stays(tmp_path):
    (tmp_path / "machine").mkdir()
    ranks.run_alone(saving_case, 2, results=str(tmp_path / "machine"))
    assert [path.name for path in (tmp_path / "machine").iterdir()] == ["checkpoints.jsonl"]
    records = {each.config["candidate"]: each for each in read_records(tmp_path / "machine/checkpoints.jsonl")}
    ours = (checkpoints.OURS, checkpoints.BACKGROUND, checkpoints.LOAD)
    peers = (checkpoints.DCP_SAVE, checkpoints.DCP_LOAD, checkpoints.TORCH_SAVE, checkpoints.TORCH_LOAD)
    assert list(records) == [*ours, *peers]
    parameters = sum(count_parameters(checkpoints.CheckpointSettings(**SAVED).config()).values())
    for name, record in records.items():
        assert len(record.samples_ms) == 2
        assert record.metrics["bytes"] == 12 * parameters, "a weight and two moments"
        assert bool(record.predicted) == (name in ours)
    assert (
        records[checkpoints.DCP_SAVE].metrics["ratio_median"]
        == records[checkpoints.DCP_LOAD].metrics["ratio_median"]
        == 1.0
    )
    (table,) = pages(tmp_path, "checkpoints", checkpoints.sheets)
    assert table.count("\n| ") == 2 + 7  # the head and its line


def restore_case(group, folder: str) -> list[str]:
    """The gate's findings on a way to load that changes nothing, and on one that forgets a tensor."""
    recipe = Recipe.of(size="tiny", data=("random",), num_layers=1, batch_size=2, context=8, device="cpu")
    bench = checkpoints.Bench(recipe, group, torch.device("cpu"), Path(folder))
    kept = {}

    def keep() -> None:
        kept.update({key: tensor.clone() for key, tensor in bench.tensors().items()})

    def give_back(but: str = "") -> None:
        for key, tensor in bench.tensors().items():
            if key != but:
                tensor.copy_(kept[key])

    bench.check("right", checkpoints.Candidate(keep, load=give_back))
    said = []
    for wrong in (lambda: None, lambda: give_back(but="embedding.tokens.weight/exp_avg_sq")):
        try:
            bench.check("wrong", checkpoints.Candidate(keep, load=wrong))
        except checkpoints.WrongResultError as error:
            said.append(str(error))
        give_back()
    return said


def test_the_gate_sees_what_does_not_come_back(tmp_path):
    for said in ranks.run(restore_case, 2, folder=str(tmp_path)):
        assert said == ["wrong: what was loaded is not what was saved"] * 2
