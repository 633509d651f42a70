"""Work of a rank in the all-reduce benchmark: its arithmetic, its gate, and messages between ranks."""

import json
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
import torch

from benchmarks import harness
from benchmarks.harness import WrongResultError
from benchmarks.lib import collective
from benchmarks.lib.collective import AllReduceJob, AllReduceSettings
from benchmarks.lib.profiling_record import collect_files
from benchmarks.records import Record, read_records
from cs336_systems.comm import Place, all_reduce, launch
from cs336_systems.cost.closed_forms import Link
from cs336_systems.errors import UserError
from cs336_systems.profiling.trace import trace_name
from tests.support import ranks

CPU = torch.device("cpu")


def blank(nbytes: int) -> Record:
    job = AllReduceJob(AllReduceSettings(), "gloo", "cpu", (nbytes,), Path("unused"))
    return job.record(Place(world_size=2, local_world_size=2), nbytes, {})


def test_sizes_are_read_in_thousands_or_1024s():
    assert collective.parse_sizes("512KB 1MB, 1.5GB 64 4KiB 2mib") == (512_000, 10**6, 15 * 10**8, 64, 4096, 2**21)
    assert [collective.size_name(nbytes) for nbytes in (64, 512_000, 10**9)] == ["64 B", "512 kB", "1 GB"]


def test_an_all_reduce_takes_as_long_as_its_slowest_rank():
    times = torch.tensor([[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]], dtype=torch.float64)  # (rank sample)
    record = collective.finished(blank(3000), times, Link(0.5e-3, 2e6), 0)
    metrics = record.metrics
    assert record.samples_ms == [2.0, 5.0, 3.0]
    assert (metrics["mean_ms"], metrics["median_ms"]) == (pytest.approx(10 / 3), 3.0)
    assert metrics["rank_spread_ms"] == pytest.approx(2 / 3)
    assert metrics["rank_mean_ms"] == [3.0, 3.0]
    assert metrics["algorithm_bytes_per_s"] == pytest.approx(3000 / (10 / 3) * 1e3)
    # 4 ranks reduce 100 MB in 50 ms: 2 GB/s of tensor, of which each rank sends 2 x 3/4.
    speeds = collective.bandwidths(100_000_000, 4, 50.0)
    assert speeds == {"algorithm_bytes_per_s": 2e9, "bus_bytes_per_s": 3e9}
    assert record.predicted == {"mean_ms": pytest.approx(0.5 + 2 * 1 / 2 * 3000 / 2e6 * 1e3)}
    assert (metrics["latency_ms"], metrics["link_bytes_per_s"]) == (0.5, 2e6)
    assert record.flags == ["noisy: standard deviation 46% of the mean"]
    assert record.environment["world_size"] == 2
    assert record.environment["backend"] == "gloo"


@pytest.mark.parametrize("local_rank", [0, 1])
def test_of_the_ranks_of_a_machine_one_speaks(local_rank, monkeypatch, capsys):
    @click.command()
    def failing() -> None:
        print("a table")
        raise UserError("what all ranks find")

    monkeypatch.setattr(sys, "argv", ["allreduce"])
    place = {"RANK": 2 + local_rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert launch.run_command_on_ranks(failing) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (("", "") if local_rank else ("a table\n", "error: what all ranks find\n"))


def messages_case(group) -> list:
    times = harness.gather_times([10.0 * group.rank() + sample for sample in range(3)], group, CPU)
    inbox = torch.full((5,), -1.0)
    collective.make_shift(torch.full((5,), float(group.rank())), inbox, group)()
    return [times.tolist(), inbox.unique().tolist()]


@pytest.mark.parametrize("count", [1, 3])
def test_times_of_all_ranks_are_on_every_rank_and_the_probe_sends_to_the_next(count):
    times = [[10 * rank + sample for sample in range(3)] for rank in range(count)]
    previous = [-1] if count == 1 else [2, 0, 1]
    assert ranks.run(messages_case, count) == [[times, [received]] for received in previous]


def broken_case(group) -> list[str]:
    """What is said of an all-reduce that is wrong in the gate, and of one that is wrong only when it is timed."""
    said = []
    for honest in ("", "gate"):

        def broken(flat, group, label="", honest=honest):
            work = all_reduce(flat, group, label)
            work.wait()
            flat[-1] += 1e-3 * (label not in (honest, "line up"))
            return work

        collective.all_reduce = broken
        try:
            if not honest:
                collective.gate(group, CPU)
            collective.time_size(4000, group, CPU, AllReduceSettings(warmup=1, steps=1), lambda note: None)
        except WrongResultError as error:
            said.append(str(error).partition(" by ")[0])
    return said


def test_a_wrong_mean_leaves_no_figure():
    said = ["this all-reduce is off its reference", "4 kB: the mean over the ranks is off"]
    assert ranks.run(broken_case, 2) == [said] * 2


def memory_case(group) -> list:
    free = (1200, 3000, 1200)[group.rank()]
    collective.usable_memory = lambda device: free
    alone = collective.room(group, CPU)
    socket.gethostname = lambda: "big" if group.rank() == 1 else "small"
    apart = collective.room(group, CPU)
    if group.rank() == 1:
        collective.shared_empty = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    return [alone, apart, collective.allocate(4000, group, CPU) is None]


def test_ranks_of_one_machine_share_its_memory_and_one_without_it_stops_all():
    # Three on one machine have a third each; of two machines, the small one has room for half of 1200 on each.
    assert ranks.run(memory_case, 3) == [[400, 600, True]] * 3


def work_case(rank: int, world_size: int, folder: str) -> None:
    collective.usable_memory = lambda device: world_size * 10_000
    place = Place(rank, world_size, rank, world_size, f"{folder}/store")
    job = AllReduceJob(AllReduceSettings(steps=2, warmup=0), "gloo", "cpu", (4000, 8000), Path(folder, "records"))
    collective.work(place, job)
    if rank == 0:
        kept = [(r.config["bytes"], r.status, len(r.samples_ms)) for r in read_records(job.path)]
        assert kept == [(4000, "ok", 2), (8000, "out-of-memory", 0)]


def test_rank_0_records_every_size_and_those_that_do_not_fit():
    ranks.run_alone(work_case, 2)


def collect_case(group, folder: str) -> None:
    mine = Path(folder, f"machine of {group.rank()}")
    mine.mkdir()
    (mine / trace_name(group.rank())).write_text(json.dumps({"rank": group.rank(), "pad": "x" * group.rank()}))
    if group.rank() == 2:
        (mine / trace_name(2)).unlink()  # a rank without a trace is left out
    collect_files(mine, group, torch.device("cpu"))


def test_traces_of_other_machines_come_to_rank_0(tmp_path):
    ranks.run(collect_case, 4, folder=str(tmp_path))
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "machine of 0").iterdir()}
    assert found == {trace_name(rank): {"rank": rank, "pad": "x" * rank} for rank in (0, 1, 3)}
