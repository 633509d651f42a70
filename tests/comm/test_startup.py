"""Start-up and its failures: places, ports, backends, ranks that never come, come twice, disagree, or are killed. Every
error names the cause and ends within the timeout, and nothing is left running."""

import atexit
import importlib.machinery
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cs336_systems import comm
from cs336_systems.comm import Place, all_reduce, distributed, find_place, launch, startup
from cs336_systems.errors import UserError
from tests.support import ranks

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2", "SLURM_JOB_ID": "10042"}


@pytest.fixture
def environment(monkeypatch):
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC")))]:
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, Place()),
        (TORCHRUN, Place(3, 8, 1, 2, "localhost:1234")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, Place(3, 8, 1, 2, "localhost:1234", served=True)),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, Place(3, 8, 1, 2, "localhost:1234", attempt="2")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 1, 2, "localhost:29500")),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu[07-09,12],big1"}, Place(5, 8, 1, 4, "gpu07:20042")),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b", "SLURM_JOB_NODELIST": "c"}, Place(5, 8, 1, 4, "a:20042")),
        (SLURM | {"SLURM_JOB_NODELIST": "a-b[1,2]"}, Place(5, 8, 1, 4, "a-b1:20042")),
        (SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "1"}, Place(5, 8, 1, 4, "x:1")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Place()),
        ({"WORLD_SIZE": "1"}, Place()),
        (TORCHRUN | {"SLURM_PROCID": "5", "SLURM_NTASKS": "8(x2)"}, Place(3, 8, 1, 2, "localhost:1234")),
        (SLURM | {"MASTER_ADDR": "x", "WORLD_SIZE": "8"}, Place(5, 8, 1, 4, "x:20042")),  # as many job scripts set it
    ],
)
def test_a_place_is_found_where_torchrun_or_slurm_left_it(environment, values, place):
    environment(values)
    assert find_place() == place


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "0"}, "of RANK and WORLD_SIZE only one is set, not WORLD_SIZE: use torchrun, or set both"),
        ({"WORLD_SIZE": "2"}, "of RANK and WORLD_SIZE only one is set, not RANK: use torchrun, or set both"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero', not a number"),
        (TORCHRUN | {"LOCAL_RANK": "a"}, "LOCAL_RANK is 'a', not a number"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is '', not a number"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports lie between 1 and 65535"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8: ranks count from 0"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 of 8: ranks count from 0"),
        (SLURM | {"SLURM_PROCID": "9", "SLURM_JOB_NODELIST": "a"}, "rank 9 of 8: ranks count from 0"),
        (SLURM | {"SLURM_NTASKS": "8(x2)"}, "SLURM_NTASKS is '8(x2)', not a number"),
        (SLURM, "SLURM_JOB_NODELIST '' names no node"),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_name(environment, values, words):
    environment(values)
    with pytest.raises(UserError) as error:
        find_place()
    assert words in str(error.value)


def test_a_process_alone_with_too_short_a_timeout_is_told_of_its_own_store(environment):
    with pytest.raises(UserError, match=r"^rank 0 has left its own store, or hangs"), distributed(timeout=1e-9):
        pass


@pytest.mark.parametrize(
    ("backend", "device", "gpus", "words"),
    [
        ("nccl", "cpu", 0, "--backend nccl moves tensors between GPUs, and there is none here; use --backend gloo"),
        ("nccl", "cpu", 2, "--backend nccl moves tensors between GPUs, and these ranks are on the CPU; use --backend"),
        ("mpi", "cpu", 0, "--backend mpi does not exist here; it is shm, gloo or nccl"),
        ("nccl", "cuda", 1, "nccl needs a GPU a rank: 2 ranks, 1 GPU(s)"),
    ],
)
def test_backends_that_cannot_serve_are_refused(monkeypatch, backend, device, gpus, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(startup.dist, "is_nccl_available", lambda: True)
    with pytest.raises(UserError) as error:
        startup.choose_backend(backend, torch.device(device), Place(0, 2, 0, 2))
    assert words in str(error.value)


def free_port() -> int:
    """A port that others will hardly take before it is used: Linux gives those who choose none one from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def join_case(rank: int, world: int, folder: str, ranks_that_join: dict, port: int, timeout: float) -> str:
    """Process `rank` says that it is ranks_that_join[rank] = (rank, of how many), or stays away."""
    if str(rank) not in ranks_that_join:
        return "stayed away"
    me, of = ranks_that_join[str(rank)]
    place = Place(me, of, rank, of, f"localhost:{port}" if port else f"{folder}/store")
    try:
        with distributed("cpu", timeout=timeout, place=place):
            while not Path(folder, "refused").exists():  # until a rank that comes twice has come
                time.sleep(0.01)
            return "joined"
    except UserError:
        Path(folder, "refused").touch()
        raise


def failures(number: int, ranks_that_join: dict, port: int = 0, timeout: float = 20.0) -> list:
    """Message of each process of a start-up that must fail."""
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.run_alone(join_case, number, ranks_that_join=ranks_that_join, port=port, timeout=timeout)
    return error.value.errors


@pytest.mark.parametrize("tcp", [False, True])
def test_ranks_that_cannot_all_join_are_named(tcp):
    for kind, words in failures(2, {0: (0, 2), 1: (1, 3)}, free_port() if tcp else 0):
        assert kind == "UserError"
        assert "the ranks disagree on how many they are: rank 0 says 2, rank 1 says 3" in words
    said = [error for error in failures(3, {0: (0, 2), 1: (1, 2), 2: (1, 2)}, free_port() if tcp else 0)[1:] if error]
    assert any("rank 1 of 2 has joined already" in words for _, words in said)
    assert {kind for kind, _ in said} <= {"UserError", "CommError"}
    first, never, last = failures(3, {0: (0, 3), 2: (2, 3)}, free_port() if tcp else 0, limit := ranks.patience(1.0))
    assert never is None
    for kind, words in (first, last):
        assert kind == "UserError"
        assert f"rank 1 of 3 did not join within {limit:g} s" in words


def test_a_missing_rank_0_is_named():
    (kind, words), absent = failures(2, {0: (1, 2)}, free_port(), 1.0)
    assert absent is None
    assert kind == "UserError"
    assert re.match(r"rank 1 of 2 finds no rank 0 at localhost:\d+ within 1 s: nobody listens there: is rank 0", words)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [(kind, words)] = failures(1, {0: (0, 2)}, port)
    assert kind == "UserError"
    assert f"cannot listen on port {port}: Address already in use; choose another with MASTER_PORT" in words


def again_case(rank: int, world: int, folder: str, port: int) -> None:
    """A process may join, leave and join again, alone or with others."""
    for place, mean in 2 * [(Place(rank, world, rank, world, f"localhost:{port}"), (world - 1) / 2), (Place(), rank)]:
        with distributed("cpu", timeout=10.0, place=place) as group:
            tensor = torch.full((1,), float(rank))
            all_reduce(tensor, group).wait()
            assert tensor.item() == mean


def test_ranks_join_leave_and_join_again():
    ranks.run_alone(again_case, 2, port=free_port())


def slow_case(group) -> None:
    comm.agreement.EXPLAIN_SECONDS = 0.3
    for step in range(3):
        if step == 1 and group.rank() == 1:
            comm.store.wait_for(group.get_group_store(), ["done/0", "done/2"], timedelta(seconds=40))
        all_reduce(torch.zeros(4), group, f"step {step}").wait()


def fails_case(group) -> None:
    if group.rank() == 1:
        raise KeyError("no such column")


def test_a_rank_that_has_finished_is_told_at_once_of_one_that_failed():
    """With a timeout of a minute, and killed after ten seconds."""
    with pytest.raises(ranks.RanksFailedError) as error:
        ranks.ask(fails_case, 2, True, 10.0, 60.0, {})
    (kind, words), (failure, _) = error.value.errors
    assert (kind, failure) == ("CommError", "KeyError")
    assert "rank 0 ended after 0 collectives; rank 1 failed: KeyError: 'no such column'" in words


def gone_case(group) -> None:
    comm.agreement.EXPLAIN_SECONDS, flat = 0.2, torch.zeros(2**20)
    # A rank that dies earlier may be missed by a busy computer's other rank while that still starts.
    all_reduce(flat, group, "first").wait()
    if group.rank() == 1:
        all_reduce(flat, group, "under way")
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(comm.CommError, match="rank 1 died "):
        [all_reduce(flat, group, name).wait() for name in ("under way", "late")]  # rank 1 may have done its part
    assert time.monotonic() - begin < 15  # ranks wait for each other for 20 seconds or more
    comm.reduce_scatter(flat, group, "later").wait()


def test_a_rank_that_dies_is_named_at_once_and_by_the_next_collective_too():
    (kind, words), _ = ranks.run_failing(gone_case, 2, 20.0)
    assert kind == "CommError"
    assert "rank 1 died " in words


def test_a_rank_that_hangs_is_named_by_the_others():
    errors = ranks.run_failing(slow_case, 3)
    for rank in (0, 2):
        kind, words = errors[rank]
        assert kind == "CommError"
        assert f"rank {rank} waited in all-reduce no. 2 (step 1, 16 bytes)" in words
        assert "rank 1 runs but said nothing after all-reduce no. 1 (step 0)" in words


def worker(place: Place, folder: str, how: str) -> None:
    leave_pid(folder, place.rank)
    while len(list(Path(folder).glob("pid-*"))) < place.world_size:
        time.sleep(0.01)
    if how == "parent killed":
        os.kill(os.getppid(), signal.SIGKILL)
    elif place.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif place.rank == 1:
        raise ZeroDivisionError("a defect")
    time.sleep(60)


def leave_pid(folder: str | Path, rank: int) -> None:
    """Leave a rank's process number in a file, which is there whole or not at all."""
    unfinished = Path(folder, f"{rank}.unfinished")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(Path(folder, f"pid-{rank}"))


def workers(folder: str | Path) -> list[int]:
    return [int(Path(folder, f"pid-{rank}").read_text()) for rank in range(2)]


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def launch_case(rank: int, world: int, folder: str, where: str, how: str) -> str:
    launch.GRACE, tempfile.tempdir = 0.2, where  # which nobody clears when this process is killed
    with pytest.raises((UserError, RuntimeError)) as error:
        launch.run_ranks(worker, 2, "cpu", where, how)
    assert not any(map(alive, workers(where)))
    return f"{type(error.value).__name__}: {error.value}"


def leave_start(place: Place, folder: str) -> None:
    """Leave a file that says how this rank was started."""
    Path(folder, "forked" if hasattr(launch, "of_this_process") else "spawned").touch()


def threads_case(rank: int, world: int, folder: str, where: str) -> None:
    both = threading.Barrier(2)

    def run() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_text("pt_autograd_0")
        both.wait(60)
        both.wait(60)
        name.write_text("ended")  # Linux may list it for a moment after `join`

    launch.of_this_process = True
    # Spawned ranks import the main module again, which here would be the whole server of ranks.
    sys.modules["__main__"] = types.ModuleType("__main__")
    thread = threading.Thread(target=run)
    thread.start()
    both.wait(60)
    launch.run_ranks(leave_start, 1, "cpu", where)
    both.wait(60)
    thread.join()
    launch.run_ranks(leave_start, 1, "cpu", where)


def test_ranks_are_spawned_where_autograd_has_threads(tmp_path):
    """Where torch sees a GPU, a backward starts such threads, without which a forked rank computes no gradients."""
    ranks.run_alone(threads_case, 1, where=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forked", "spawned"]


def test_the_worker_of_a_packages_main_is_found_by_spawned_ranks(monkeypatch):
    main = types.ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec("cs336_systems.train.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def work() -> None:
        """Stand for train's worker, as `python -m cs336_systems.train` defines it."""

    work.__module__ = "__main__"
    assert launch.importable(work) is importlib.import_module("cs336_systems.train.__main__").work
    assert launch.importable(worker) is worker


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("killed", r"UserError: rank 1 was killed by SIGKILL: out of memory\? the other ranks were stopped"),
        ("defect", r"RuntimeError: rank 1 ended with exit code 1\n.*ZeroDivisionError: a defect"),
        ("parent killed", r"\[-9\]"),
    ],
)
def test_ranks_started_here_end_together(tmp_path, how, outcome):
    try:
        [said] = ranks.run_alone(launch_case, 1, where=str(tmp_path), how=how)
    except ranks.RanksFailedError as error:
        said = str(error.codes)
    assert re.match(outcome, said, re.DOTALL), said
    for _ in range(100):
        if not any(map(alive, workers(tmp_path))):
            break
        time.sleep(0.02)
    assert not any(map(alive, workers(tmp_path)))


def leaving_case(rank: int, world: int, folder: str) -> list[float]:
    """Rank 0 ends as a process without a goodbye does, while rank 1 has not yet begun the reduction."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/own", rank=rank, world_size=world)
    store, tensor = dist.distributed_c10d._get_default_store(), torch.full((3,), 1.0 + rank)
    if rank == 0:
        all_reduce(tensor, dist.group.WORLD, "unwaited", "sum")
        store.set("rank 0 leaves", "")
        atexit._run_exitfuncs()  # as the interpreter does when it ends
        assert not dist.is_initialized()
    else:
        store.wait(["rank 0 leaves"])
        time.sleep(0.2)  # rank 0 is sure to be there if it does not wait
        all_reduce(tensor, dist.group.WORLD, "unwaited", "sum").wait()
    return tensor.tolist()


def test_what_is_under_way_comes_to_its_end_before_the_interpreter_does():
    """Otherwise gloo's threads may abort it: 24 of 120 processes did that ended with reductions under way."""
    assert ranks.run_alone(leaving_case, 2) == [[3.0] * 3] * 2
