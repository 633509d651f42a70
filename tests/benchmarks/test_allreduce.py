"""The all-reduce benchmark: what it measures and refuses, the ways to start it, its table."""

import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import allreduce
from benchmarks.harness import WrongResultError
from benchmarks.lib import collective, launcher, options
from benchmarks.lib.collective import AllReduceJob, AllReduceSettings
from benchmarks.records import RESULTS, Record, read_records
from cs336_systems.comm import Place
from cs336_systems.cost.closed_forms import Link
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from tests.support import ranks

TINY = ("--steps", "2", "--warmup", "1", "--results", "out", "--sizes", "4KB", "40KB")

STAMP = {"device": "abacus", "cores": 2, "torch": "2.13", "commit": "abcdef01", "dirty": False, "date": "2026-01-02"}


def blank(nbytes: int = 1000, count: int = 2, **config) -> Record:
    job = AllReduceJob(AllReduceSettings(link=config.pop("link", None)), "gloo", "cpu", (nbytes,), Path("unused"))
    record = job.record(Place(world_size=count, local_world_size=count), nbytes, STAMP)
    return replace(record, config=record.config | config)


def measured(nbytes: int = 1000, count: int = 2, **config) -> Record:
    return collective.finished(blank(nbytes, count, **config), torch.ones(count, 3), Link(1e-3, 1e6), 0)


def test_every_backend_of_the_machine_is_measured(monkeypatch):
    gpus = 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    cpu = [("cpu", "shm"), ("cpu", "gloo"), ("cpu", "mpi")]
    assert allreduce.combinations(AllReduceSettings()) == cpu
    gpus = 1
    assert allreduce.combinations(AllReduceSettings()) == [*cpu, ("cuda", "gloo"), ("cuda", "nccl")]
    assert allreduce.combinations(AllReduceSettings(backend="nccl")) == [("cuda", "nccl")]
    assert allreduce.combinations(AllReduceSettings(device="cpu")) == cpu
    one, two = Place(world_size=2, local_world_size=2), Place(world_size=2, local_world_size=1)  # nodes
    assert "shm joins ranks on the CPU of one machine" in allreduce.cannot("cpu", "shm", two)
    assert allreduce.cannot("cpu", "mpi", replace(one, meeting="x")).endswith("leave out torchrun")
    monkeypatch.setattr(allreduce, "mpiexec", lambda: None)
    assert allreduce.cannot("cpu", "mpi", one) == allreduce.NO_MPI
    assert allreduce.cannot("cpu", "gloo", one) == ""


def test_ranks_without_a_gpu_each_are_left_out(in_tmp, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(allreduce, "run_ranks", lambda work, count, device, job: started.append((count, device)))
    assert run_command(allreduce.main, ["--backend", "nccl", "--sizes", "1KB", "--results", "out"]) == 0
    assert started == [(2, "cuda")]
    shown = capsys.readouterr().out
    for count in (4, 6):
        assert f"left out: nccl needs a GPU a rank: {count} ranks, 2 GPU(s); start fewer" in shown
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run_command(allreduce.main, ["--backend", "nccl", "--nproc", "2", "--results", "out"]) == 2
    assert "error: nccl needs a GPU a rank: 2 ranks, 1 GPU(s); start fewer" in capsys.readouterr().err


def test_a_smoke_run_is_small_and_writes_nothing(monkeypatch):
    started = []
    monkeypatch.setattr(allreduce, "run_ranks", lambda work, count, device, job: started.append((count, job)))
    monkeypatch.setattr(options, "open_records", lambda *_: pytest.fail("a smoke run wrote a record"))
    monkeypatch.setattr(allreduce, "mpiexec", lambda: None)
    assert run_command(allreduce.main, ["--smoke", "--device", "cpu"]) == 0
    assert [(count, job.backend) for count, job in started] == [(2, "shm"), (2, "gloo")]
    for _, job in started:
        assert max(job.sizes) < 10**6
        assert RESULTS not in job.path.parents


def test_what_was_measured_before_a_failure_is_shown_and_recorded(in_tmp, monkeypatch, capsys):
    def fail(work, count, device, job):
        job.keep(measured(4000, count))
        raise UserError("rank 1 is lost")

    monkeypatch.setattr(allreduce, "run_ranks", fail)
    assert run_command(allreduce.main, ["--device", "cpu", "--backend", "gloo", "--nproc", "2", *TINY]) == 2
    assert [(each.config["bytes"], each.status) for each in read_records(Path("out/allreduce.jsonl"))] == [(4000, "ok")]
    said = capsys.readouterr()
    assert "│ 4 kB │" in said.out
    assert said.err.endswith("error: rank 1 is lost\n")


def test_ranks_that_were_started_are_those_measured(monkeypatch):
    here = Place(rank=1, world_size=3, local_rank=1, local_world_size=3, meeting="host:1")
    worked = []
    for module in (allreduce, launcher):
        monkeypatch.setattr(module, "find_place", lambda: here)
    monkeypatch.setattr(allreduce, "work", lambda place, job: worked.append(place))
    monkeypatch.setattr(options, "open_records", lambda *_: pytest.fail("rank 1 opened a file of records"))
    monkeypatch.setattr(allreduce, "run_ranks", lambda *_: pytest.fail("started ranks beside those there are"))
    allreduce.run(AllReduceSettings(device="cpu"))
    assert worked == [here] * 2
    with pytest.raises(UserError, match="--nproc 4 would start ranks, but 3 were started already"):
        allreduce.run(AllReduceSettings(nproc=4))


def alone_case(rank: int, world: int, folder: str, out: str) -> None:
    """Run it in this process, which has not run tensor code, as it forks; ranks write into the file."""
    os.chdir(out)
    with Path("said").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        run_command(allreduce.main, ["--device", "cpu", "--nproc", "2", *TINY])  # 2, 4 and 6 without --nproc


def test_alone_it_starts_the_ranks_of_every_backend_itself(tmp_path):
    ranks.run_alone(alone_case, 1, out=str(tmp_path))
    records = read_records(tmp_path / "out/allreduce.jsonl")
    said = (tmp_path / "said").read_text()
    backends = ["shm", "gloo", *["mpi"] * bool(allreduce.mpiexec())]
    found = [(each.config["backend"], each.config["ranks"], each.config["bytes"]) for each in records]
    assert found == [(backend, 2, nbytes) for backend in backends for nbytes in (4000, 40_000)], said
    for record in records:
        assert record.status == "ok"
        here = record.environment
        assert (here["world_size"], here["backend"]) == (2, record.config["backend"])
        assert len(record.samples_ms) == len(record.metrics["rank_mean_ms"]) == 2
        assert record.predicted["mean_ms"] > 0
    assert said.count("All-reduce (mean) of float32") == 1
    assert "records appended to out/allreduce.jsonl" in said


ALONE = '{"times": [[1.0]], "error": 0.0}'  # what a rank prints that knows of no other
FAILING = [
    ("echo no such rank >&2; echo ------ >&2; exit 3", "2 ranks of MPI with 4 kB ended with code 3: no such rank"),
    ("echo aye", "2 ranks of MPI with 4 kB ended with code 0: no message"),
    ("exec sleep 60", "2 ranks of MPI with 4 kB did not end within 0.9 s; --timeout gives them longer"),
    (f"echo '{ALONE}'; echo '{ALONE}'", " starts processes that do not know of each other, since mpi4py uses another"),
]


def fake_mpiexec(folder: Path, command: str, monkeypatch) -> Path:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{command}\n")
    path.chmod(0o755)
    monkeypatch.setattr(allreduce, "mpiexec", lambda: str(path))
    return folder / "pid"


def test_ranks_of_mpi_that_fail_are_one_line_and_leave_nothing(in_tmp, monkeypatch, capsys):
    for command, line in FAILING:
        pid = fake_mpiexec(in_tmp, command, monkeypatch)
        limit = "0.3" if "sleep" in command else "20"
        assert run_command(allreduce.main, ["--smoke", "--backend", "mpi", "--timeout", limit]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ")
        assert line in last
        assert not Path("/proc", pid.read_text().strip()).exists()


def test_mpi_that_fails_without_being_asked_for_is_left_out_and_the_rest_goes_on(in_tmp, monkeypatch, capsys):
    fake_mpiexec(in_tmp, FAILING[0][0], monkeypatch)
    monkeypatch.setattr(allreduce, "BACKENDS", {"cpu": ("mpi", "gloo")})
    monkeypatch.setattr(allreduce, "run_ranks", lambda work, count, device, job: job.keep(measured(4000, count)))
    assert run_command(allreduce.main, ["--nproc", "2", *TINY]) == 0
    assert [(each.status, each.config["backend"]) for each in read_records(Path("out/allreduce.jsonl"))] == [
        ("ok", "gloo")
    ]
    assert f"left out: {FAILING[0][1]}\n" in capsys.readouterr().out


def test_a_benchmark_that_is_told_to_end_ends_the_ranks_of_mpi(in_tmp, monkeypatch):
    pid = fake_mpiexec(in_tmp, "sleep 0.3; kill -TERM $PPID; exec sleep 60", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        allreduce.run(AllReduceSettings(smoke=True, backend="mpi"))
    assert not Path("/proc", pid.read_text().strip()).exists()


@pytest.mark.skipif(not allreduce.mpiexec(), reason="needs the extra `mpi`")
def test_mpi_is_measured_beside_them(in_tmp, monkeypatch):
    options = ["--nproc", "2", *TINY[:-1]]
    assert run_command(allreduce.main, ["--backend", "mpi", *options]) == 0
    [record] = read_records(Path("out/allreduce.jsonl"))
    assert (record.status, record.config["bytes"], record.environment["backend"]) == ("ok", 4000, "mpi")
    assert record.metrics["copy_ms"] > 0 < record.predicted["mean_ms"]
    assert "MP" in record.environment["mpi"]
    monkeypatch.setattr(collective, "tolerance", lambda ranks: -1.0)
    monkeypatch.setattr(allreduce, "BACKENDS", {"cpu": ("mpi",)})
    with pytest.raises(WrongResultError, match=r"4 kB: the mean over the ranks is off by 0\.00e"):
        allreduce.main(options, standalone_mode=False)  # also where MPI was not asked for


def test_the_table_says_what_is_missing(capsys):
    noisy = replace(measured(10**6, nodes=2), flags=["noisy: much"])
    allreduce.show([noisy, collective.finished(blank(2**30, nodes=2), None, Link(1, 1), 2**30)])
    shown = capsys.readouterr().out
    assert shown.startswith("All-reduce (mean) of float32; 2 nodes; abacus, 2 cores, torch 2.13, commit abcdef0")
    [row] = [line for line in shown.splitlines() if " 1 MB " in line]
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == ["2", "gloo", "cpu", "1 MB", "1 ms", "0 ms", "1 ms*", "1.0 s", "1 GB/s", "1 GB/s", "-", "0 ms"]
    assert "does not fit" in shown
    assert "2 ranks gloo cpu 1.07 GB: needs 2.0 GiB on each rank, where 1.0 GiB are usable" in shown
