"""Start ranks on this machine without torchrun: a process each, one error line for all, and nobody left behind.

CPU ranks are forked, which takes a tenth of a second; that needs a parent that has run no tensor code, since threads
and CUDA do not survive a fork. CUDA ranks are spawned.
"""

import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
import torch

from cs336_systems import console
from cs336_systems.comm.group import CommError
from cs336_systems.comm.meeting import Place
from cs336_systems.comm.startup import die_with_parent, find_place, speaks_for_its_machine
from cs336_systems.errors import UserError

GRACE = 5.0  # seconds that the others get to name the cause after one rank has failed
ECHO = 1.0  # seconds in which another SIGTERM is the same: `timeout` and schedulers may tell a whole group of processes
PATIENCE = 2.0  # seconds that ranks get to end after SIGTERM, unless told otherwise

Worker = Callable[..., None]  # worker(place, *arguments)


class _Terminated(KeyboardInterrupt):
    """SIGTERM has come to the process that started the ranks."""


def _run(worker: Worker, place: Place, arguments: tuple[Any, ...], threads: int, report: Path, parent: int) -> None:
    """A rank's life. It leaves an error of the user's or the network's as a line, and any other as a traceback."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    torch.set_num_threads(threads)
    try:
        worker(place, *arguments)
    except (UserError, CommError) as error:
        report.write_text(str(error))
        os._exit(2)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        report.write_text(traceback.format_exc())
        os._exit(1)


def run_ranks(worker: Worker, nproc: int, device: str, *arguments: Any, patience: float = PATIENCE) -> None:
    """Run `worker(place, *arguments)` in `nproc` processes and wait for all.

    The cores are shared out: each CPU rank computes with cores / nproc threads, at least one. SIGTERM is passed on to
    the ranks: if all handle it and end well within `patience` seconds, so does this; else they are killed. Raises
    UserError with the first failure among the ranks, after stopping the others, RuntimeError with the traceback of one
    that broke, and KeyboardInterrupt for ranks that a signal ended.
    """
    if nproc < 1:
        raise UserError(f"{nproc} ranks are none; use --nproc 1 or more")
    context: Any = get_context("spawn" if device == "cuda" else "fork")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _terminated_as_interrupted():
        processes, reports = [], [Path(folder, f"error of rank {rank}") for rank in range(nproc)]
        try:
            for rank, report in enumerate(reports):
                place = Place(rank, nproc, rank, nproc, str(Path(folder, "store")))
                threads = max(1, cores // nproc)
                given = (worker, place, arguments, threads, report, os.getpid())
                processes.append(context.Process(target=_run, args=given))
                processes[-1].start()
            try:
                failed = _first_failure(processes)
            except _Terminated:
                failed = _terminate(processes, patience)
        finally:
            _stop(processes)
        if failed is not None:
            message = reports[failed].read_text() if reports[failed].exists() else ""
            _raise_for(failed, processes[failed].exitcode, message)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the ranks as ^C does, rather than leaving that to the system. Another one, an echo aside, stops the
    wait for ranks that handle the first."""
    told: list[float] = []

    def interrupt(number: int, frame: object) -> None:
        if told and time.monotonic() - told[0] < ECHO:
            return
        told.append(time.monotonic())
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_failure(processes: list[BaseProcess], deadline: float = math.inf) -> int | None:
    """Wait until all ranks are done, or one has failed: its number. The others then get a moment to end, too.

    Raises KeyboardInterrupt at the deadline.
    """
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ended = wait(list(running), left)
        if not ended:
            raise KeyboardInterrupt
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            processes[rank].join()
            if processes[rank].exitcode:
                deadline = min(deadline, time.monotonic() + GRACE)
                for process in processes:
                    process.join(max(0.0, deadline - time.monotonic()))
                return rank
    return None


def _terminate(processes: list[BaseProcess], patience: float) -> int | None:
    """Pass SIGTERM on, and wait for ranks that handle it; returns which one failed in doing so, if any.

    Raises KeyboardInterrupt if the signal ended them, or they are not done in time.
    """
    for process in processes:
        process.terminate()
    failed = _first_failure(processes, time.monotonic() + patience)
    if failed is not None and processes[failed].exitcode == -signal.SIGTERM:
        raise KeyboardInterrupt
    return failed


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _raise_for(rank: int, code: int | None, message: str) -> None:
    if code == 2:
        raise UserError(message)
    if code == 130:
        raise KeyboardInterrupt
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
    if not message and code and code < 0:
        raise UserError(f"rank {rank} {how}: out of memory? the other ranks were stopped")
    raise RuntimeError(f"rank {rank} {how}\n{message}")


def start_ranks(
    worker: Worker, device: str | None, nproc: int | None, *arguments: Any, patience: float = PATIENCE
) -> None:
    """Run `worker(place, *arguments)` on the ranks that torchrun or Slurm started, or start `nproc` of them here.

    `device` is what was asked for, None for a GPU if there is one. `patience` is how many seconds ranks that were
    started here may take to end after SIGTERM. Raises UserError, for ranks that part as well.
    """
    here = find_place()
    if here.world_size > 1 and nproc:
        raise UserError(f"--nproc {nproc} would start ranks, but {here.world_size} were started already: drop it")
    try:
        if here.world_size > 1 or (nproc or 1) == 1:
            worker(here, *arguments)
        else:  # device_count asks the driver without starting CUDA here, which no forked rank would survive
            device = device or ("cuda" if torch.cuda.device_count() else "cpu")
            run_ranks(worker, nproc or 1, device, *arguments, patience=patience)
    except CommError as error:
        raise UserError(str(error)) from None


def run_in_one_voice(command: click.Command) -> int:
    """`console.run_command` on every rank that torchrun started, of which only the first of each machine is heard.

    The first of each, not of all: a machine that never reaches rank 0 still says so. A defect's traceback is printed
    by every rank, since it leaves this function before it is printed.
    """
    with ExitStack() as stack:
        with suppress(UserError):  # the command finds its place, too, and reports what is wrong with it
            if not speaks_for_its_machine():
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(silence))
                stack.enter_context(redirect_stderr(silence))
        return console.run_command(command)
