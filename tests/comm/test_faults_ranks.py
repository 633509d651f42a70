"""Failures of a rank and of its starter: the others end in time and name the cause, and no process is left."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from cs336_systems import comm
from cs336_systems.comm import Place, agree, all_reduce, distributed, launch, startup, stop_step
from cs336_systems.errors import UserError
from tests.comm.test_startup import alive, free_port, leave_pid, workers
from tests.support import ranks

PR_GET_PDEATHSIG = 2
ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc and prctl")


def until(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def memory_case(group) -> None:
    all_reduce(torch.zeros(4), group, "first").wait()
    if group.rank() == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.zeros(2**28)
    all_reduce(torch.zeros(4), group, "second").wait()


def test_out_of_memory_on_one_rank_is_named_on_all():
    errors = ranks.run_failing(memory_case, 3, collective_timeout=20.0)
    assert errors[1][0] == "RuntimeError"
    assert "can't allocate memory" in errors[1][1]
    for rank in (0, 2):
        kind, text = errors[rank]
        assert kind == "CommError"
        assert "rank 1 failed: RuntimeError:" in text.splitlines()[0]
        assert "can't allocate memory" in text.splitlines()[0]


def asking_case(rank: int, world: int, folder: str, port: int, how: str, asks: str, timeout: float) -> None:
    """Rank 0, which holds the store of the ranks, is lost while rank 1 is in a collective, or in none."""
    comm.agreement.EXPLAIN_SECONDS = 0.3
    pids: list[int] = []
    try:
        with distributed("cpu", timeout=timeout, place=Place(rank, world, rank, world, f"localhost:{port}")) as group:
            pids += [int(pid) for pid in agree("pid", str(os.getpid()), group)]
            all_reduce(torch.zeros(4), group, "first").wait()
            if rank == 0:
                os.kill(os.getpid(), how)
            if asks == "stop":
                until(lambda: stop_step(group), 20)
            if asks == "collective":
                all_reduce(torch.zeros(4), group, "second").wait()
            if asks == "agree":
                agree("saved", "", group)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)


@pytest.mark.parametrize(("how", "fate"), [(signal.SIGSTOP, "is stopped (SIGSTOP)"), (signal.SIGKILL, "died")])
@pytest.mark.parametrize(
    ("asks", "doing"),
    [
        ("collective", "waited in all-reduce no. 3 (second, 16 bytes)"),
        ("agree", "waited for an answer: saved"),
        ("stop", "looked whether to stop"),
        ("leave", "ended after 2 collectives"),
    ],
)
def test_a_store_that_is_lost_with_rank_0_holds_nobody_up(how, fate, asks, doing):
    limit = ranks.patience(1.0)
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.run_alone(asking_case, 2, port=free_port(), how=how, asks=asks, timeout=limit)
    assert error.value.errors[0] is None
    kind, text = error.value.errors[1]
    assert kind == "CommError", text
    line = text.splitlines()[0]
    assert f"rank 0 {fate} after all-reduce no. 2 (first)" in line
    if asks != "agree" or how == signal.SIGSTOP:  # else rank 1 may see first that its neighbour is gone
        assert f"rank 1 {doing}; " in line
    if asks in ("leave", "stop") or (asks == "agree" and how == signal.SIGSTOP):
        late = f"did not answer within {limit:g} s"
        assert f"(the store of the ranks {late if how == signal.SIGSTOP else 'is gone'}" in line


def stoppable(place: Place, folder: str, how: str) -> None:
    """A rank that handles SIGTERM, or not; rank 0 sends it to the process that started the ranks."""
    asked: list[int] = []
    if how != "default":
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN if how == "ignored" else lambda number, frame: asked.append(number)
        )
    leave_pid(folder, place.rank)
    until(lambda: len(list(Path(folder).glob("pid-*"))) == place.world_size)
    for _ in range(2 if how == "echoed" else 1) if place.rank == 0 else ():
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.1)
    until(lambda: asked)
    if how == "one fails" and place.rank == 1:
        raise UserError("the disk is full")
    time.sleep(30 if how == "one fails" else 0.3)  # saving
    Path(folder, f"saved-{place.rank}").touch()


def terminated_case(rank: int, world: int, folder: str, where: str, how: str) -> list:
    launch.GRACE, launch.SAME_SIGNAL = 0.2, 20.0  # a busy rank sends its second signal late
    if how == "at once":  # the signal comes before the last start() has returned

        def start(process: ForkProcess) -> None:
            BaseProcess.start(process)
            time.sleep(0.5)

        ForkProcess.start = start  # type: ignore[method-assign]
    before, outcome = signal.getsignal(signal.SIGTERM), "returned"
    try:
        launch.run_ranks(stoppable, 2, "cpu", where, how, patience=0.2 if how == "ignored" else 20.0)
    except (KeyboardInterrupt, UserError) as error:
        outcome = f"{type(error).__name__}: {error}"
    assert signal.getsignal(signal.SIGTERM) == before
    assert not any(map(alive, workers(where)))
    return [outcome, len(list(Path(where).glob("saved-*")))]


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("echoed", ["returned", 2]),  # as of `timeout`, which tells every process of a group
        ("ignored", ["KeyboardInterrupt: ", 0]),
        ("default", ["KeyboardInterrupt: ", 0]),
        ("at once", ["returned", 2]),
        ("one fails", ["UserError: the disk is full", 0]),
    ],
)
def test_sigterm_reaches_the_ranks_which_may_end_well(tmp_path, how, outcome):
    assert ranks.run_alone(terminated_case, 1, where=str(tmp_path), how=how) == [outcome]


def early(place: Place, folder: str) -> None:
    """A rank that asks the process that starts the ranks to stop."""
    os.kill(os.getppid(), signal.SIGTERM)
    Path(folder, f"asked-{place.rank}").touch()
    time.sleep(30)


def early_case(rank: int, world: int, folder: str, where: str) -> int:
    def start(process: ForkProcess) -> None:
        BaseProcess.start(process)
        until(lambda: any(Path(where).iterdir()))

    ForkProcess.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        launch.run_ranks(early, 30, "cpu", where)
    return len(list(Path(where).iterdir()))


def test_sigterm_ends_the_start_of_many_ranks(tmp_path):
    assert ranks.run_alone(early_case, 1, where=str(tmp_path)) == [1]


ORPHAN = """
import sys, time
from cs336_systems.comm import agree, distributed
from tests.comm.test_startup import leave_pid
with distributed("cpu", timeout=60) as group:
    leave_pid(sys.argv[1], group.rank())
    agree("here", "", group)
    time.sleep(120)
"""


@linux
def test_torchrun_that_is_killed_leaves_no_orphans(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen(
        [*words, str(tmp_path / "orphan.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, ranks.patience(90))
        pids = workers(tmp_path)
        assert all(map(alive, pids))
        agent.kill()
        agent.wait(10)
        assert until(lambda: not any(map(alive, pids)), 10)
    finally:
        agent.kill()
        agent.wait(10)
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def parent_case(rank: int, world: int, folder: str, how: str) -> int:
    """Which signal this process will get when its parent dies, after it has joined a group."""
    prctl, answer = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(startup.PR_SET_PDEATHSIG, 0)
    startup.STARTED = (os.getpid() + (how == "fork of a rank"), 0 if how == "orphan" else os.getppid())
    if how != "by hand":
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
    with distributed("cpu", timeout=10.0, place=Place()):
        prctl(PR_GET_PDEATHSIG, ctypes.byref(answer))
    return answer.value


@linux
def test_only_ranks_of_torchrun_die_with_who_started_them():
    for how, number in (("torchrun", signal.SIGKILL), ("by hand", 0), ("fork of a rank", 0)):
        assert ranks.run_alone(parent_case, 1, how=how) == [number]
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.run_alone(parent_case, 1, how="orphan")
    assert error.value.codes == [-signal.SIGKILL]


def listening() -> list[str]:
    """The addresses on which this process listens, from proc_net(5) and the inodes of its files."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                found.append(fields[1].rpartition(":")[0])
    return found


def listens_case(rank: int, world: int, folder: str, port: int) -> list[str]:
    meeting = f"localhost:{port}" if port else f"{folder}/store"
    with distributed("cpu", timeout=10.0, place=Place(rank, world, rank, world, meeting)) as group:
        all_reduce(torch.zeros(4), group, "all").wait()
        comm.subgroup([0, 1])
        found = listening()
        agree("looked", "", group)
    return found


@linux
@pytest.mark.parametrize("tcp", [False, True])
def test_ranks_of_one_machine_listen_on_the_loopback_address_alone(tcp):
    found = ranks.run_alone(listens_case, 2, port=free_port() if tcp else 0)
    assert all(found), "gloo listens, so that ranks can connect"
    loopback = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, in the order of the machine
    assert {address for each in found for address in each} <= loopback, found
