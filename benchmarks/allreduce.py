"""Time of an all-reduce: `python -m benchmarks.allreduce`, or under torchrun, with the ranks that it starts."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

from benchmarks.harness import WrongResultError
from benchmarks.lib import mpi, parallel_tables, sheets
from benchmarks.lib.collective import (
    COURSE_SIZES,
    SMOKE_SIZES,
    AllReduceBackend,
    AllReduceJob,
    AllReduceSettings,
    parse_sizes,
    size_name,
    work,
)
from benchmarks.lib.options import Recorder, command
from benchmarks.records import Record, every_record
from cs336_systems.comm import CommError, Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks, run_ranks
from cs336_systems.comm.startup import can_share
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import choose_device
from cs336_systems.host.text import printable

COMBINATIONS: tuple[tuple[str, AllReduceBackend], ...] = (
    *(("cpu", "shm"), ("cpu", "gloo"), ("cpu", "mpi")),
    *(("cuda", "gloo"), ("cuda", "nccl")),
)
RANKS = (2, 4, 6)


def combinations(settings: AllReduceSettings) -> list[tuple[str, AllReduceBackend]]:
    """The devices and backends to measure: those asked for, of those that are here. Raises UserError for none."""
    if settings.device == "cuda":
        choose_device("cuda")  # refuses a GPU that is not there
    devices = ("cpu", "cuda") if torch.cuda.device_count() else ("cpu",)  # asks the driver, starts nothing
    found = [
        (device, backend)
        for device, backend in COMBINATIONS
        if device in devices and settings.device in (None, device) and settings.backend in (None, backend)
    ]
    if not found:
        if settings.backend in ("shm", "mpi"):
            raise UserError(f"--backend {settings.backend} moves tensors between CPUs; use --device cpu")
        place = "--device cpu was asked for" if settings.device else "there is none here"
        raise UserError(f"--backend nccl moves tensors between GPUs, and {place}; use --backend gloo")
    return found


def cannot(backend: AllReduceBackend, place: Place) -> str:
    """Return the reason why a backend cannot serve these ranks, empty if it can."""
    gpus = torch.cuda.device_count()
    if backend == "shm" and not (place.one_machine and can_share()):
        return "shm joins ranks of one machine, Linux on x86-64"
    if backend == "mpi" and place.meeting:
        return "mpi starts its ranks by itself: leave out torchrun"
    if backend == "mpi" and not mpi.mpiexec():
        return mpi.MISSING
    if backend == "nccl" and place.local_world_size > gpus:
        return f"nccl needs a GPU a rank: {place.local_world_size} ranks, {gpus} GPU{'s' * (gpus != 1)}"
    return ""


def places(settings: AllReduceSettings, here: Place) -> list[Place]:
    """Rank 0's place in each number of ranks to measure. Raises UserError for --nproc under torchrun."""
    if here.world_size == 1:
        counts = (settings.nproc,) if settings.nproc else RANKS
        return [Place(world_size=count, local_world_size=count) for count in counts]
    if settings.nproc:
        raise UserError(
            f"--nproc {settings.nproc} would start ranks, but {here.world_size} were started already: drop it"
        )
    return [here]


def measure(job: AllReduceJob, place: Place, started: bool) -> str:
    """Run a job on some ranks, which have been `started` or are now; its file then has the records of rank 0. Returns
    the reason why it was left out, empty if it was not."""
    if reason := cannot(job.backend, place):
        return reason
    try:
        if job.backend == "mpi":
            mpi.work(place, job)
        elif started:
            work(place, job)
        else:
            run_ranks(work, place.world_size, job.device, job)
    except UserError as error:
        if job.backend != "mpi" or job.settings.backend or isinstance(error, WrongResultError):
            raise
        return str(error)
    return ""


def show(records: Sequence[Record]) -> None:
    """The table of what was measured, predictions beside it, and what is suspect or missing."""
    sheets.show(parallel_tables.sheets(records))
    names = "{ranks} ranks {backend} {device} ".format
    for line in sheets.remarks(records, lambda each: names(**each.config) + size_name(each.config["bytes"])):
        console.console().print(line)


def run(settings: AllReduceSettings) -> None:
    """Measure, print and, unless it is a smoke run, record. Raises UserError for what cannot be run.

    What runs on a CPU comes first, in forked ranks: nothing may have touched the GPU before a fork.
    """
    here = find_place()
    if settings.smoke:
        nproc = 2 if here.world_size == 1 else None
        settings = replace(settings, sizes=SMOKE_SIZES, steps=2, warmup=1, nproc=nproc)
    sizes = parse_sizes(settings.sizes or COURSE_SIZES)
    todo = list(product(combinations(settings), places(settings, here)))
    recorders, missing = dict[str, Recorder](), list[str]()
    try:
        for (device, backend), place in todo:
            if here.rank == 0 and device not in recorders:
                recorders[device] = settings.recorder("allreduce", torch.device(device))
            with TemporaryDirectory(prefix="allreduce-") as folder:
                job = AllReduceJob(settings, backend, device, sizes, Path(folder, "records"))
                try:
                    missing += filter(None, [measure(job, place, started=here.world_size > 1)])
                finally:
                    if job.path.exists():
                        recorders[device].keep(*every_record(job.path))
    except CommError as error:
        raise UserError(str(error)) from None
    finally:
        if found := [record for recorder in recorders.values() for record in recorder.records]:
            show(found)
    if len(missing) == len(todo):
        raise UserError("; ".join(dict.fromkeys(missing)))
    for line in dict.fromkeys(missing) if here.rank == 0 else ():
        print(printable(f"left out: {line}"))
    for recorder in recorders.values():
        recorder.tell()


@command(AllReduceSettings)
@click.argument("more_sizes", nargs=-1, metavar="")
def main(settings: AllReduceSettings, more_sizes: tuple[str, ...]) -> None:
    """Time all-reduces of several sizes, each beside a prediction from the measured speed of the link.

    Started by torchrun or Slurm with several ranks, measure these ranks; otherwise start ranks.
    """
    run(replace(settings, sizes=" ".join([settings.sizes or "", *more_sizes]).strip() or None))


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
