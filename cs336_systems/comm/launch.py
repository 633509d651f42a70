"""Launch ranks on this machine without torchrun: one process per rank, one error line for all, no process left running.

CPU ranks are forked, which takes a tenth of a second. Neither CUDA nor autograd's threads survive a fork, so CUDA ranks
are spawned, and so are all ranks of a process that has such threads: a backward starts them where torch sees a GPU.
"""

import errno
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from itertools import takewhile
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
import torch

from cs336_systems.comm.agreement import CommError
from cs336_systems.comm.startup import die_with_parent, find_place, is_first_of_machine
from cs336_systems.comm.store import Place
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import allowed_cores

GRACE = 5.0  # seconds that the other ranks get to report the cause after one has failed
SAME_SIGNAL = 1.0  # seconds in which a second SIGTERM counts as the first: schedulers may signal the whole group
PATIENCE = 2.0  # seconds that ranks get to end after SIGTERM by default
UNREAD = 141  # exit status of a rank whose output nobody reads any more, like that of a process killed by SIGPIPE
TURN = 0.1  # seconds between two checks for SIGTERM

Worker = Callable[..., None]  # worker(place, *arguments)


def _run(worker: Worker, place: Place, arguments: tuple[Any, ...], threads: int, report: Path, parent: int) -> None:
    """Main function of a rank. Reports an error of the user or the network as one line, any other as a traceback."""
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
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and console.is_unread():
            os._exit(UNREAD)
        report.write_text(traceback.format_exc())
        os._exit(1)


def has_autograd_threads() -> bool:
    """True if autograd has started threads in this process, as its first backward does where torch sees a GPU."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            if name.read_text().startswith("pt_autograd"):
                return True
    return False


def importable(worker: Worker) -> Worker:
    """The worker of a program run by `python -m` under its module's own name: spawned ranks import it by that, since
    multiprocessing does not import a package's __main__ under another."""
    spec, is_main = getattr(sys.modules["__main__"], "__spec__", None), worker.__module__ == "__main__"
    return getattr(import_module(spec.name), worker.__name__) if is_main and spec is not None else worker


def run_ranks(worker: Worker, nproc: int, device: str, *arguments: Any, patience: float = PATIENCE) -> None:
    """Run `worker(place, *arguments)` in `nproc` processes and wait for all. A CPU rank has cores / nproc threads.

    SIGTERM is passed on to the ranks, which are killed unless they end within `patience` seconds. The first rank that
    fails stops the others. Raises UserError with its error line, RuntimeError with its traceback, KeyboardInterrupt, or
    BrokenPipeError if nobody reads the output any more.
    """
    if nproc < 1:
        raise UserError(f"{nproc} ranks are none; use --nproc 1 or more")
    context: Any = get_context("spawn" if device == "cuda" or has_autograd_threads() else "fork")
    if context.get_start_method() == "spawn":
        worker = importable(worker)
    else:
        import_module("torch._dynamo")  # models and optimizers import it: once here, not in every forked rank
    sys.stdout.flush()
    told: list[float] = []  # times of the SIGTERMs, one of which may come while a rank is started
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ExitStack() as leaving:
        processes, reports = list[BaseProcess](), [Path(folder, f"error of rank {rank}") for rank in range(nproc)]
        before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(time.monotonic()))
        leaving.callback(signal.signal, signal.SIGTERM, before)
        try:
            # Hundreds take a while to start, so one that is told to stop starts no more.
            for rank, report in takewhile(lambda _: not (told and processes), enumerate(reports)):
                place = Place(rank, nproc, rank, nproc, str(Path(folder, "store")))
                given = (worker, place, arguments, max(1, allowed_cores() // nproc), report, os.getpid())
                process = context.Process(target=_run, args=given)
                process.start()
                processes.append(process)
            failed = _first_failure(processes, told, patience)
        finally:
            for stop in (BaseProcess.terminate, BaseProcess.kill):
                for process in processes:
                    stop(process)
                _join(processes, time.monotonic() + 2)
        if failed is not None:
            message = reports[failed].read_text() if reports[failed].exists() else ""
            code = processes[failed].exitcode or 0
            if code == UNREAD:
                raise BrokenPipeError(errno.EPIPE, "nobody reads the output of the ranks any more")
            if code in (2, 130):
                raise UserError(message) if code == 2 else KeyboardInterrupt
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if code < 0 and not message:
                raise UserError(f"rank {failed} {how}: out of memory? the other ranks were stopped")
            raise RuntimeError(f"rank {failed} {how}\n{message}")


def _first_failure(processes: list[BaseProcess], told: list[float], patience: float) -> int | None:
    """Wait until all ranks have ended, or one has failed; returns its number after GRACE seconds for the others.

    SIGTERM (`told` has the time of each) is passed on to the ranks, which then have `patience` seconds. Raises
    KeyboardInterrupt if that time ends, if a rank dies of SIGTERM, or at another signal after SAME_SIGNAL seconds.
    """
    running, deadline = {process.sentinel: rank for rank, process in enumerate(processes)}, math.inf
    while running:
        if told and deadline == math.inf:
            deadline = time.monotonic() + patience
            for process in processes:
                process.terminate()
        if time.monotonic() >= deadline or (told and told[-1] - told[0] >= SAME_SIGNAL):
            raise KeyboardInterrupt
        for sentinel in wait(list(running), TURN):
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            processes[rank].join()
            if processes[rank].exitcode:
                _join(processes, min(deadline, time.monotonic() + GRACE))
                if told and processes[rank].exitcode == -signal.SIGTERM:
                    raise KeyboardInterrupt
                return rank
    return None


def _join(processes: list[BaseProcess], deadline: float) -> None:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def start_ranks(
    worker: Worker, device: str | None, nproc: int | None, *arguments: Any, patience: float = PATIENCE
) -> None:
    """Run `worker(place, *arguments)` on the ranks that torchrun or Slurm started, or start `nproc` ranks here, by
    default on a GPU if there is one. Raises UserError, also instead of CommError."""
    here = find_place()
    if here.world_size > 1 and nproc:
        raise UserError(f"--nproc {nproc} would start ranks, but {here.world_size} were started already: drop it")
    try:
        if here.world_size > 1 or (nproc or 1) == 1:
            worker(here, *arguments)
        else:  # device_count does not start CUDA in this process; if it did, forked ranks could not use it
            device = device or ("cuda" if torch.cuda.device_count() else "cpu")
            run_ranks(worker, nproc or 1, device, *arguments, patience=patience)
    except CommError as error:
        raise UserError(str(error)) from None


def run_command_on_ranks(command: click.Command) -> int:
    """Run a command line on every rank that torchrun started. Only the first rank of each machine prints, so that a
    machine that cannot reach rank 0 can say so. Every rank prints the traceback of a defect."""
    with suppress(UserError):  # the command finds its place, too, and reports the error
        if not is_first_of_machine():
            with open(os.devnull, "w") as silence, redirect_stdout(silence), redirect_stderr(silence):
                return console.run_command(command)
    return console.run_command(command)
