"""The flight recorder: the last calls of a rank, reported by others when it is stopped, dead, or on another machine."""

import mmap
import os
import re
import signal
import subprocess
from datetime import timedelta

import pytest
import torch
from torch import nn

from cs336_systems import comm
from cs336_systems.comm import Place, agree, all_gather, all_reduce, distributed, flight_recorder, stop_step
from cs336_systems.comm.flight_recorder import FINISHED, RING, SLOTS, WAITING, Ring
from cs336_systems.ddp import BucketedDDP
from tests.support import ranks


def ring() -> Ring:
    return Ring(mmap.mmap(-1, RING.itemsize))


def test_a_ring_keeps_the_latest_and_labels_are_harmless_and_cut():
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
    labels = {"a\x1b[2Jb\n": r"a\x1b[2Jb\n", "\udc80": "?", "é" * 90: "é" * 40, "x" + "é" * 90: f"x{'é' * 39}\ufffd"}
    for label, shown in labels.items():
        written.launch("all-reduce", "0", label, 4, "float32", 1)
        assert written.entries()[-1].label == shown


def test_status_of_a_process():
    child = subprocess.Popen(["sleep", "60"])
    try:
        started = flight_recorder.process(child.pid)[1]
        child_of = Ring(mmap.mmap(-1, RING.itemsize), child.pid, started)
        assert child_of.summary() == "runs but said nothing before its first collective"
        # The number has gone to another process.
        assert Ring(mmap.mmap(-1, RING.itemsize), child.pid, "another").status() == "died"
        child_of.fields["step"] = 3
        child_of.launch("all-reduce", "0", "bucket", 4, "float32", 1)
        child_of.fields["step"] = 4
        assert child_of.summary().endswith("after the launch of all-reduce no. 1 (bucket) of step 3, in step 4")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child_of.advance(0, WAITING)
        # A zombie, for which nobody has waited.
        assert child_of.summary() == "died in all-reduce no. 1 (bucket) of step 3, in step 4"
    finally:
        child.kill()
        child.wait()


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


def stop_case(group) -> int | None:
    assert stop_step(group) is None
    agree("asked", "", group)
    if group.rank() != 1:
        stop_step(group, ask=7 + group.rank())
    agree("first", "", group)
    found = stop_step(group)
    if group.rank() == 1:
        assert stop_step(group, ask=3) == found
    agree("second", "", group)
    assert stop_step(group) == found
    return found


def test_whoever_asks_first_says_after_which_step_all_stop():
    assert ranks.run(stop_case, 3) in ([7] * 3, [9] * 3)


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
