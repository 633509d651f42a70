"""The flight recorder: the last calls of a rank, reported by others when it is stopped, dead, or on another machine."""

import mmap
import os
import re
import signal
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from cs336_systems import comm
from cs336_systems.comm import (
    Place,
    agree,
    all_gather,
    all_reduce,
    distributed,
    flight_recorder,
    stop_step,
)
from cs336_systems.comm.flight_recorder import FINISHED, RING, SLOTS, WAITING, Ring, recorder
from cs336_systems.ddp import BucketedDDP
from tests.comm.test_startup import free_port
from tests.support import ranks


def ring() -> Ring:
    return Ring(mmap.mmap(-1, RING.itemsize))


def test_a_ring_keeps_the_latest():
    written = ring()
    assert written.entries() == []
    turns = [written.launch("all-reduce", "0", f"bucket {i}", 4 * i, "float32", i) for i in range(3 * SLOTS + 1)]
    written.advance(turns[-1], FINISHED)
    written.advance(turns[-2], WAITING)
    written.advance(turns[-1 - SLOTS], WAITING)  # whose place the last one has taken
    found = written.entries()
    assert [entry.number for entry in found] == turns[-6:]
    assert [entry.state for entry in found] == [0, 0, 0, 0, WAITING, FINISHED]
    assert str(found[-1]) == "all-reduce no. 192 (bucket 192)"
    assert len(written.entries(1000)) == SLOTS - 1


def test_lines_of_entries():
    written = ring()
    written.at_step(12)
    turn = written.launch("all-gather", "0", "head.weight", 1258291, "float32", 46)
    assert re.fullmatch(
        r"step 12  all-gather 0#46 head.weight  1.2 MiB float32  launched  since 2.0 s",
        written.entries()[0].line(written.entries()[0].launched + 2),
    )
    written.advance(turn, FINISHED)
    entry = written.entries()[0]
    assert (
        entry.line(entry.changed + 3.1) == "step 12  all-gather 0#46 head.weight  1.2 MiB float32  finished  3.1 s ago"
    )


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("a\x1b[2Jb\n", r"a\x1b[2Jb\n"),
        ("\udc80", "?"),
        ("é" * 90, "é" * 40),
        ("x" + "é" * 90, "x" + "é" * 39 + "\ufffd"),
    ],
)
def test_labels_are_harmless_and_cut(label, shown):
    written = ring()
    written.launch("all-reduce", "0", label, 4, "float32", 1)
    assert written.entries()[0].label == shown


def test_status_of_a_process():
    child = subprocess.Popen(["sleep", "60"])
    try:
        started = flight_recorder.process(child.pid)[1]
        child_of = Ring(mmap.mmap(-1, RING.itemsize), child.pid, started)
        assert child_of.summary() == "runs but said nothing before its first collective"
        assert (
            Ring(mmap.mmap(-1, RING.itemsize), child.pid, "another").status() == "died"
        )  # the number has gone to another process
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        child_of.at_step(3)
        child_of.launch("all-reduce", "0", "bucket", 4, "float32", 1)
        child_of.at_step(4)
        assert (
            child_of.summary()
            == "is stopped (SIGSTOP) after the launch of all-reduce no. 1 (bucket) of step 3, in step 4"
        )
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert child_of.status() == "died"  # a zombie, for which nobody has waited
        child_of.advance(0, WAITING)
        assert child_of.summary() == "died in all-reduce no. 1 (bucket) of step 3, in step 4"
    finally:
        child.kill()
        child.wait()
    assert child_of.status() == "died"


def train(group, how: str) -> None:
    """Training of three ranks, of which rank 1 is lost in step 2, after one of its all-gathers."""
    comm.agreement.EXPLAIN_SECONDS = 0.5
    pids = [int(pid) for pid in agree("pid", str(os.getpid()), group)]
    model = BucketedDDP(nn.Linear(4, 3), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            comm.at_step(step)
            model(torch.ones(2, 4)).sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            all_gather(torch.zeros(3 * group.size()), group, "norm").wait()
            if step == 2 and group.rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    finally:
        if group.rank() == 0 and how == "stopped":
            comm.store.wait_for(group.get_group_store(), ["done/2"], timedelta(seconds=10))  # until rank 2 has seen it
            os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_the_lost_rank_its_operation_and_its_step_are_named(how):
    errors = ranks.run_failing(train, 3, how=how)
    fate = "is stopped (SIGSTOP)" if how == "stopped" else "died"
    assert errors[1] is None
    for rank in (0, 2):
        kind, text = errors[rank]
        assert kind == "CommError"
        first, *record = text.splitlines()
        here = rf"rank {rank} waited in all-reduce no. \d+ \(bucket 0, from bias, 60 bytes\) of step 3; "
        assert re.match(here, first), first
        assert re.search(rf"rank 1 {re.escape(fate)} after all-gather no. \d+ \(norm\) of step 2[; ]", first), first
        mine = [line for line in record if line.startswith(f"  rank {rank}: ")]
        theirs = [line for line in record if line.startswith("  rank 1: ")]
        assert len(record) == 12
        assert len(mine) == len(theirs) == 6
        waits = rf"  rank {rank}: step 3  all-reduce 0#\d+ bucket 0, from bias  60 B float32  waiting  since .*"
        assert any(re.fullmatch(waits, line) for line in mine[-2:]), mine  # the vote after it is launched at once
        assert re.fullmatch(r"  rank 1: step 2  all-gather 0#\d+ norm  36 B float32  finished  .* s ago", theirs[-1])


def machines_case(rank: int, world: int, folder: str, stops: bool, timeout: float) -> None:
    """Rank 0 on one machine, 1 and 2 on another; rank 2 is stopped, or both are."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    comm.agreement.EXPLAIN_SECONDS = 1.0
    place, lost = Place(rank, world, max(0, rank - 1), 2 if rank else 1, f"{folder}/store"), (1, 2) if stops else (2,)
    with distributed("cpu", timeout=timeout, place=place) as group:
        pids = [int(pid) for pid in agree("pid", str(os.getpid()), group)]
        all_reduce(torch.zeros(3), group, "first").wait()
        if rank in lost:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            all_reduce(torch.zeros(3), group, "second").wait()
        finally:
            for each in lost if rank == 0 else ():
                os.kill(pids[each], signal.SIGKILL)


@pytest.mark.parametrize("stops", [False, True])
def test_a_living_rank_tells_other_machines_of_its_neighbours(stops):
    late = ranks.patience(2.0)  # a busy machine starts ranks seconds apart
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.run_alone(machines_case, 3, stops=stops, timeout=late)
    assert error.value.codes[2] == -signal.SIGKILL
    first = error.value.errors[0][1].splitlines()[0]
    if stops:
        assert "; no news from rank 1, which is on another machine; no news from rank 2, which is on" in first
    else:
        assert "rank 2 is stopped (SIGSTOP) after all-reduce no. 2 (first)" in first


def rings() -> list[int]:
    """How many rings this process has mapped, and whether it has files of any."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    name = "flight of rank"
    return [Path("/proc/self/maps").read_text().count(name), int(any(name in file for file in files))]


def leave_case(rank: int, world: int, folder: str) -> list[int]:
    with distributed("cpu", timeout=10.0, place=Place(rank, world, rank, world, f"{folder}/store")) as group:
        assert sorted(recorder.others) == [each for each in range(world) if each != rank]
        assert recorder.lost() == set()
        inside = rings()
        agree("looked", "", group)
    return inside + rings()


def test_ranks_of_a_machine_see_each_other_and_leave_nothing():
    # The ring has no name outside of /proc, which ends with its last process.
    assert ranks.run_alone(leave_case, 3) == [[3, 1, 0, 0]] * 3


def vote_case(rank: int, world: int, folder: str, meeting: str) -> list[int]:
    """A thread votes while its rank's main thread trains and agrees."""
    place = Place(rank, world, rank, world, meeting or f"{folder}/store")
    with distributed("cpu", timeout=20.0, place=place) as group:
        answers: list[list[str]] = []

        def votes() -> None:
            for number in range(50):
                answers.append(agree("saved", f"{number} by {rank}", group, counted=False))

        thread = threading.Thread(target=votes)
        thread.start()
        sums = []
        for number in range(50):
            tensor = torch.full((3,), float(number + rank))
            all_reduce(tensor, group, f"bucket {number}", "sum").wait()
            sums.append(tensor[0].item())
            assert agree("step", f"{number} of {rank}", group) == [f"{number} of {each}" for each in range(world)]
        thread.join(20)
        assert answers == [[f"{number} by {each}" for each in range(world)] for number in range(50)]
        assert sums == [number * world + world * (world - 1) / 2 for number in range(50)]
        return comm.group.counters(group)[comm.group.ALL]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tcp", [False, True])
def test_a_thread_may_vote_beside_collectives(tcp, world):
    meeting = f"localhost:{free_port()}" if tcp else ""
    assert ranks.run_alone(vote_case, world, meeting=meeting) == [100] * world


def stop_case(group) -> list[int | None]:
    found = [stop_step(group)]
    agree("asked", "", group)
    if group.rank() != 1:
        stop_step(group, ask=7 + group.rank())
    agree("first", "", group)
    found.append(stop_step(group))
    if group.rank() == 1:
        assert stop_step(group, ask=3) == found[1]
    agree("second", "", group)
    return [*found, stop_step(group)]


def test_whoever_asks_first_says_after_which_step_all_stop():
    found = ranks.run(stop_case, 3)
    assert found == [found[0]] * 3
    assert found[0][0] is None
    assert found[0][1] in (7, 9)
    assert found[0][2] == found[0][1]


def test_an_entry_that_is_being_written_is_not_taken_for_another_one():
    """A rank looks at the entries of one that launches the same collectives at full speed."""
    memory = mmap.mmap(-1, RING.itemsize)
    writer, reader, histories = Ring(memory), Ring(memory, 1, "other"), [0, *range(2**31, 2**31 + 20_010)]
    if (pid := os.fork()) == 0:
        for number in range(1, 20_000):
            writer.launch("all-reduce", "0", "bucket", 8, "float32", number, histories[number])
        os._exit(0)
    number = 0
    while number < 19_900:
        number = int(reader.fields["written"])
        for near in range(number, number + 3):
            assert reader.other("0", near, histories[near]) is None
    os.waitpid(pid, 0)
    number = int(reader.fields["written"])
    assert reader.other("0", number, 1).history == histories[number]
