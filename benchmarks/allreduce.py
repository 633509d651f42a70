"""Time of an all-reduce: `python -m benchmarks.allreduce`, or under torchrun, with the ranks that it starts."""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks import parallel_tables
from benchmarks.allreduce_plot import plot
from benchmarks.collective import (
    COURSE_SIZES,
    SMOKE_SIZES,
    AllReduceBackend,
    AllReduceJob,
    AllReduceSettings,
    parse_sizes,
    size_name,
    work,
)
from benchmarks.lib import mpi, sheets
from benchmarks.records import Record, open_records, read_records
from cs336_systems.comm import CommError, Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks, run_ranks
from cs336_systems.comm.startup import can_share
from cs336_systems.cost.plots.style import HOW_TO_PLOT, can_plot
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import choose_device, environment
from cs336_systems.host.text import printable

COMBINATIONS: tuple[tuple[str, AllReduceBackend], ...] = (
    *(("cpu", "shm"), ("cpu", "gloo"), ("cpu", "mpi")),
    *(("cuda", "gloo"), ("cuda", "nccl")),
)
OPTIONAL = ("shm", "mpi")  # left out where they cannot run, unless they were asked for
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
        if settings.backend in OPTIONAL:
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


def measure(settings: AllReduceSettings, here: Place, scratch: Path) -> list[Path]:
    """Run every combination; records go to `scratch` and, unless it is a smoke run, to the files that are returned.

    What runs on a CPU comes first, in forked ranks: nothing may have touched the GPU before a fork.
    """
    sizes = parse_sizes(settings.sizes or COURSE_SIZES)
    todo, started = places(settings, here), here.world_size > 1
    written: dict[Path, None] = {}
    for device, backend in combinations(settings):
        paths = [scratch]
        if here.rank == 0 and not settings.smoke:
            paths.append(open_records(settings.records_folder(torch.device(device)), "allreduce"))
        job = AllReduceJob(settings, backend, device, sizes, tuple(paths))
        for place in todo:
            if reason := cannot(backend, place):
                if here.rank == 0 and (backend not in OPTIONAL or settings.backend):
                    refuse(job, place, reason)
            elif backend == "mpi":
                mpi.work(place, job)
            elif started:
                work(here, job)
            else:
                run_ranks(work, place.world_size, device, job)
        written |= dict.fromkeys(paths[1:])
    return list(written)


def refuse(job: AllReduceJob, place: Place, reason: str) -> None:
    """Record every size as unsupported, with the reason."""
    stamp = environment(torch.device(job.device), job.settings.commit)
    for nbytes in job.sizes:
        job.keep(replace(job.record(place, nbytes, stamp), status="unsupported", flags=[reason]))


def show(records: list[Record]) -> None:
    """The table of what was measured, predictions beside it, and what is suspect or missing."""
    sheets.show(parallel_tables.sheets(records))
    for line in sheets.remarks(records, name_of):
        console.console().print(line)


def name_of(record: Record) -> str:
    """`2 ranks gloo cpu 1 MB`."""
    config = record.config
    return f"{config['ranks']} ranks {config['backend']} {config['device']} {size_name(config['bytes'])}"


def run(settings: AllReduceSettings) -> None:
    """Measure, print, plot and, unless it is a smoke run, record. Raises UserError for what cannot be run."""
    here = find_place()
    if settings.smoke:
        nproc = 2 if here.world_size == 1 else None
        settings = replace(settings, sizes=SMOKE_SIZES, steps=2, warmup=1, nproc=nproc)
    with TemporaryDirectory(prefix="allreduce-") as folder:
        scratch = Path(folder, "allreduce.jsonl")
        scratch.touch()
        try:
            written = measure(settings, here, scratch)
        except CommError as error:
            raise UserError(str(error)) from None
        finally:
            if here.rank == 0 and (records := read_records(scratch)):
                show(records)
    for path in written:
        print(printable(f"records appended to {path}"))
        print(printable(f"plot of its records in {plot(path)}") if can_plot() else HOW_TO_PLOT)


@click.command()
@console.options(AllReduceSettings)
@click.argument("more_sizes", nargs=-1, metavar="")
def main(more_sizes: tuple[str, ...], **options: Any) -> None:
    """Time all-reduces of several sizes, each beside a prediction from the measured speed of the link.

    Started by torchrun or Slurm with several ranks, measure these ranks; otherwise start ranks.
    """
    settings = AllReduceSettings(**options)
    run(replace(settings, sizes=" ".join([settings.sizes or "", *more_sizes]).strip() or None))


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
