"""Tests of leftovers: a hundred groups and many launches leave no descriptor, thread, process, socket or file."""

import gc
import mmap
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from cs336_systems.comm import Place, all_reduce, distributed, launch, subgroup
from cs336_systems.comm.launch import run_ranks
from cs336_systems.errors import UserError
from tests import conftest
from tests.comm.test_startup import free_port
from tests.support import leftovers, ranks

ROUNDS, WARM = 100, 4  # starts and stops, and those before the first count: what is made once stays
SETTLING = 10.0  # seconds that threads of the communication library get to end; they take milliseconds


def held() -> dict[str, list[str]]:
    """Resources of this process: open files by kind, threads, children; and the temporary files."""
    files = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            files.append(re.sub(r"\d+", "N", os.readlink(link)))
        except FileNotFoundError:  # that of the listing itself
            continue
    tasks, names = Path("/proc/self/task"), []
    for task in tasks.iterdir():
        with suppress(OSError):  # a thread that has just ended
            names.append((task / "comm").read_text().strip())
    children = (tasks / str(threading.get_native_id()) / "children").read_text().split()
    return {"files": sorted(files), "threads": sorted(names), "children": children}


def more(now: dict[str, list[str]], before: dict[str, list[str]]) -> dict[str, dict[str, int]]:
    """Number of resources added, by kind."""
    found = {kind: dict(Counter(now[kind]) - Counter(before[kind])) for kind in now}
    return {kind: what for kind, what in found.items() if what}


def what_stays(before: dict[str, list[str]]) -> dict[str, dict[str, int]]:
    """Resources beyond those before: as soon as there are none, or at the end of the wait."""
    deadline = time.monotonic() + SETTLING
    gc.collect()
    while (left := more(held(), before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def join_and_leave(rank: int, world: int, folder: str, port: int) -> dict[str, dict[str, int]]:
    """Resources that a hundred groups add to those of the first few, and their files."""
    os.mkdir(mine := f"{folder}/{rank}")
    tempfile.tempdir = mine
    before: dict[str, list[str]] = {}
    for number in range(WARM + ROUNDS):
        if number == WARM:
            gc.collect()
            before = held()
        # Half of them meet in a file, as ranks that this project starts, and half at a port, as those of torchrun.
        meeting = f"127.0.0.1:{port}" if number % 2 else f"{folder}/store-{number}"
        with distributed("cpu", timeout=20, place=Place(rank, world, rank, world, meeting)) as group:
            x = torch.full((8,), float(rank))
            all_reduce(x, group).wait()
            assert x[0] == 0.5
            if number % 10 == 0:
                all_reduce(x, subgroup([0, 1])).wait()
    return what_stays(before) | ({"temporary": dict.fromkeys(os.listdir(mine), 1)} if os.listdir(mine) else {})


def test_a_hundred_groups_leave_nothing():
    assert ranks.run_alone(join_and_leave, 2, port=free_port()) == [{}, {}]


def reduce_or_fail(place: Place, how: str) -> None:
    """A rank's part in a launch that ends well, or in which rank 1 refuses, breaks or is killed."""
    with distributed("cpu", timeout=20, place=place) as group:
        all_reduce(torch.ones(3), group).wait()
        if place.rank == 1 and how == "refuses":
            raise UserError("no")
        if place.rank == 1 and how == "breaks":
            raise ZeroDivisionError
        if place.rank == 1 and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)


def launch_often(rank: int, world: int, folder: str) -> dict[str, dict[str, int]]:
    """Resources of the process that starts ranks after launches of each kind, and their files."""
    os.mkdir(made := f"{folder}/made")
    tempfile.tempdir = made
    launch.GRACE = 0.3  # seconds that the others get: of this process only
    before: dict[str, list[str]] = {}
    for how in ("ends well", "refuses", "ends well", "breaks", "is killed", "ends well"):
        with suppress(UserError, RuntimeError):
            run_ranks(reduce_or_fail, 2, "cpu", how)
        before = before or held()  # what the first launch imported stays
    return what_stays(before) | ({"temporary": dict.fromkeys(os.listdir(made), 1)} if os.listdir(made) else {})


def test_launches_leave_nothing_however_they_end():
    assert ranks.run_alone(launch_often, 1) == [{}]


@contextmanager
def sleeping(**options: Any) -> Iterator[subprocess.Popen]:
    """A child that is ended with the block, however that ends. The block begins when /proc is complete: Popen returns
    while exec is under way, when the command and the environment are empty or still those of this process."""
    with subprocess.Popen(["sleep", "60"], **options) as child:
        try:
            deadline = time.monotonic() + SETTLING
            while not known(child):
                assert time.monotonic() < deadline
            yield child
        finally:
            child.kill()


def known(child: subprocess.Popen) -> bool:
    """True once a child's command and environment can be read."""
    command, environment = (Path(f"/proc/{child.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    return command == b"sleep\x0060\x00" and environment != b""


def test_a_leak_is_seen():
    before = held()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    reading, writing = os.pipe()
    with sleeping():
        found = more(held(), before)
    os.close(reading)
    os.close(writing)
    stop.set()
    thread.join()
    assert found["files"] == {"pipe:[N]": 2}
    assert len(found["children"]) == 1
    assert sum(found["threads"].values()) == 1
    assert not what_stays(before)  # a thread that was joined may still be on its way out of the kernel


def test_lists_of_tests_have_no_entry_without_a_test(request):
    """Where all tests are collected."""
    if request.config.args == request.config.getini("testpaths"):
        names, files = tuple(conftest.collected), set(conftest.collected.values())
        assert not [entry for entry in conftest.SLOW if not any(name.startswith(entry) for name in names)]
        assert {*conftest.PROOF, *conftest.FIRST} <= files


def test_a_run_of_the_suite_sees_what_it_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "PATIENCE", 0.0)
    monkeypatch.setattr(leftovers, "ROOT", tmp_path)
    monkeypatch.setattr(leftovers, "SHARED", shared := tmp_path / ".shm")
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TMPDIR", leftovers.MARK, "PYTEST_DEBUG_TEMPROOT", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "to be put back")
    run = leftovers.Run()
    before = run.leftovers()  # what the server of tests/support/ranks.py is, for one
    assert all(line.startswith("process") for line in before)
    (shared / "left").touch()
    (shared / "of-a-browser").write_bytes(b"mapped")
    with (
        sleeping(start_new_session=True) as child,
        (shared / "of-a-browser").open() as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
    ):
        (tmp_path / "new.txt").touch()
        folder = tempfile.mkdtemp()
        found = set(run.leftovers()) - set(before)
    assert found == {
        f"process {child.pid}: sleep 60 ",
        f"temporary file: {folder}",
        f"shared memory: {shared / 'left'}",
        "in the project: new.txt",
    }
    run.end()
    assert not run.folder.exists()
