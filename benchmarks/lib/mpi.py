"""All-reduces of MPI, a third opinion beside gloo and shared memory: mpiexec starts ranks that time themselves."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.collective import (
    PROBE_BYTES,
    SMALL_BYTES,
    WORKSPACE,
    AllReduceJob,
    finished,
    link_of,
    require_mean,
    size_name,
)
from benchmarks.lib.running import stop
from cs336_systems.comm import Place
from cs336_systems.cost.closed_forms import Link
from cs336_systems.errors import UserError
from cs336_systems.host.machine import environment, usable_memory
from cs336_systems.host.text import printable

MISSING = "mpi needs mpi4py and mpiexec; python -m pip install -e '.[mpi]' brings both"


def mpiexec() -> str | None:
    """Path of the command that starts ranks, of this environment or the machine's, if it and mpi4py are there."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    return found if find_spec("mpi4py") and find_spec("numpy") else None


def work(place: Place, job: AllReduceJob) -> None:
    """Record every size of a job. Raises UserError for ranks that fail or do not end in time, and WrongResultError."""
    settings, ranks, cpu = job.settings, place.world_size, torch.device("cpu")
    usable, stamp = usable_memory(cpu) // ranks, environment(cpu, settings.commit)
    for nbytes in job.sizes:
        blank = job.record(place, nbytes, stamp)
        if WORKSPACE * nbytes > usable:
            job.keep(finished(blank, None, Link(0, 1), usable))
            continue
        found = json.loads(output_of_ranks(nbytes, ranks, job))
        require_mean(found["error"], nbytes, ranks, settings)
        blank.environment["mpi"] = found["library"]
        small, shift, times, copies = (torch.tensor(found[key]) for key in ("small", "shift", "times", "copies"))
        job.keep(finished(blank, times, link_of(small, shift), usable, copies))


def output_of_ranks(nbytes: int, ranks: int, job: AllReduceJob) -> str:
    """Line that rank 0 of lib/mpi_rank.py prints about one size, behind what MPI may say. Raises UserError."""
    settings = job.settings
    numbers = map(str, (nbytes, settings.warmup, settings.steps, SMALL_BYTES, PROBE_BYTES))
    # mpi4py's runner ends all ranks if one raises.
    rank = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.lib.mpi_rank", *numbers]
    name = f"{ranks} ranks of MPI with {size_name(nbytes)}"
    with subprocess.Popen(
        [str(mpiexec()), "-n", str(ranks), *rank], cwd=Path(__file__).parents[2], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=settings.timeout)
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} did not end within {settings.timeout:g} s; --timeout gives them longer") from None
        finally:
            stop(process)
    if process.returncode:
        last = [line for line in errors.decode(errors="replace").splitlines() if line.strip()][-1:]
        raise UserError(printable(f"{name} ended with code {process.returncode}: {' '.join(last) or 'no message'}"))
    return output.decode().splitlines()[-1]
