"""Time of an all-reduce: `python -m benchmarks.allreduce`, or under torchrun, with the ranks that it starts."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks.harness import WrongResultError
from benchmarks.lib import parallel_tables, sheets
from benchmarks.lib.collective import (
    COURSE_SIZES,
    PROBE_BYTES,
    SMALL_BYTES,
    SMOKE_SIZES,
    WORKSPACE,
    AllReduceBackend,
    AllReduceJob,
    AllReduceSettings,
    finished,
    link_of,
    parse_sizes,
    require_mean,
    size_name,
    work,
)
from benchmarks.lib.launcher import rank_counts
from benchmarks.lib.options import command
from benchmarks.lib.running import ended_politely, stop
from benchmarks.records import Record, every_record
from cs336_systems.comm import CommError, Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks, run_ranks
from cs336_systems.comm.startup import choose_backend
from cs336_systems.cost.closed_forms import Link
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.host.text import printable

NO_MPI = "mpi needs mpi4py and mpiexec; python -m pip install -e '.[mpi]' brings both"
BACKENDS: dict[str, tuple[AllReduceBackend, ...]] = {"cpu": ("shm", "gloo", "mpi"), "cuda": ("gloo", "nccl")}
RANKS = (2, 4, 6)


def combinations(settings: AllReduceSettings) -> list[tuple[str, AllReduceBackend]]:
    """The devices and backends to measure: those asked for, or all that belong together. Raises UserError for a GPU
    that is not there."""
    if settings.device == "cuda":
        choose_device("cuda")
    found = ("cpu", "cuda") if torch.cuda.device_count() else ("cpu",)  # asks the driver, starts nothing
    devices = (settings.device,) if settings.device else found
    every = [(device, each) for device in devices for each in BACKENDS[device]]
    if settings.backend:
        return [pair for pair in every if pair[1] == settings.backend] or [(devices[0], settings.backend)]
    return every


def cannot(device: str, backend: AllReduceBackend, place: Place) -> str:
    """Return the reason why a backend cannot serve these ranks, empty if it can."""
    if backend != "mpi":
        try:
            choose_backend(backend, torch.device(device), place)
        except UserError as error:
            return str(error)
        return ""
    if device == "cuda":
        return "--backend mpi moves tensors between CPUs; use --device cpu"
    if place.meeting:
        return "mpi starts its ranks by itself: leave out torchrun"
    return "" if mpiexec() else NO_MPI


def mpiexec() -> str | None:
    """Path of the command that starts ranks, of this environment or the machine's, if it and mpi4py are there."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    return found if find_spec("mpi4py") and find_spec("numpy") else None


def time_mpi(place: Place, job: AllReduceJob) -> None:
    """Record every size of a job. Raises UserError for ranks that fail or do not end in time, and WrongResultError."""
    ranks, cpu = place.world_size, torch.device("cpu")
    usable, stamp = usable_memory(cpu) // ranks, environment(cpu, job.settings.commit)
    for nbytes in job.sizes:
        record = job.record(place, nbytes, stamp)
        if WORKSPACE * nbytes > usable:
            job.keep(finished(record, None, Link(0, 1), usable))
            continue
        found = run_mpi(nbytes, ranks, job)
        require_mean(found["error"], nbytes, ranks, job.settings)
        record.environment["mpi"] = found["library"]
        small, shift, times, copies = (torch.tensor(found[key]) for key in ("small", "shift", "times", "copies"))
        job.keep(finished(record, times, link_of(small, shift), usable, copies))


def run_mpi(nbytes: int, ranks: int, job: AllReduceJob) -> dict[str, Any]:
    """Milliseconds of one size (rank sample) and more, as lib/mpi_rank.py prints it. Raises UserError."""
    settings, name = job.settings, f"{ranks} ranks of MPI with {size_name(nbytes)}"
    numbers = map(str, (nbytes, settings.warmup, settings.steps, SMALL_BYTES, PROBE_BYTES))
    # mpi4py's runner ends all ranks if one raises.
    rank = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.lib.mpi_rank", *numbers]
    allowed = settings.timeout * (settings.warmup + settings.steps)
    with ended_politely(), subprocess.Popen(
        [str(mpiexec()), "-n", str(ranks), *rank], cwd=Path(__file__).parents[1], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=allowed)
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} did not end within {allowed:g} s; --timeout gives them longer") from None
        finally:
            stop(process)
    printed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not printed:
        said = [line.strip() for line in errors.splitlines() if re.search("[A-Za-z]", line)]
        last = said[-1] if said else "no message"
        raise UserError(printable(f"{name} ended with code {process.returncode}: {last}"))
    if len(printed[0]["times"]) != ranks:
        raise UserError(
            f"{mpiexec()} starts processes that do not know of each other, since mpi4py uses another MPI; "
            "python -m pip install -e '.[mpi]' brings both"
        )
    return dict(printed[0])


def measure(job: AllReduceJob, place: Place, started: bool) -> str:
    """Run a job on some ranks, which have been `started` or are now; its file then has the records of rank 0. Returns
    the reason why MPI, which nobody asked for, could not be measured."""
    try:
        if job.backend == "mpi":
            time_mpi(place, job)
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
    started = here.world_size > 1
    if settings.smoke:
        settings = replace(settings, sizes=SMOKE_SIZES, steps=2, warmup=1, nproc=None if started else 2)
    sizes = parse_sizes(settings.sizes or COURSE_SIZES)
    counts = rank_counts([settings.nproc] if settings.nproc else [], RANKS)
    places = [here] if started else [Place(0, count, 0, count) for count in counts]
    reasons = {(*pair, place): cannot(*pair, place) for pair, place in product(combinations(settings), places)}
    todo = [each for each, reason in reasons.items() if not reason]
    missing = list(filter(None, reasons.values()))
    if not todo:
        raise UserError("; ".join(dict.fromkeys(missing)))
    devices = dict.fromkeys(device for device, *_ in todo) if here.rank == 0 else {}
    recorders = {device: settings.recorder("allreduce", torch.device(device)) for device in devices}
    try:
        for device, backend, place in todo:
            with TemporaryDirectory(prefix="allreduce-") as folder:
                job = AllReduceJob(settings, backend, device, sizes, Path(folder, "records"))
                try:
                    missing += filter(None, [measure(job, place, started)])
                finally:
                    if job.path.exists():
                        recorders[device].keep(*every_record(job.path))
    except CommError as error:
        raise UserError(str(error)) from None
    finally:
        if found := [record for recorder in recorders.values() for record in recorder.records]:
            show(found)
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
