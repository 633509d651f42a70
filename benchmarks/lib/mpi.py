"""All-reduces of MPI, for comparison with gloo and shared memory: mpiexec starts ranks that time themselves."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.collective import (
    PROBE_BYTES,
    SMALL_BYTES,
    WORKSPACE,
    AllReduceJob,
    finished,
    link_of,
    require_mean,
    size_name,
)
from benchmarks.lib.running import ended_politely, stop
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
    ranks, cpu = place.world_size, torch.device("cpu")
    usable, stamp = usable_memory(cpu) // ranks, environment(cpu, job.settings.commit)
    for nbytes in job.sizes:
        record = job.record(place, nbytes, stamp)
        if WORKSPACE * nbytes > usable:
            job.keep(finished(record, None, Link(0, 1), usable))
            continue
        found = results(nbytes, ranks, job)
        require_mean(found["error"], nbytes, ranks, job.settings)
        record.environment["mpi"] = found["library"]
        small, shift, times, copies = (torch.tensor(found[key]) for key in ("small", "shift", "times", "copies"))
        job.keep(finished(record, times, link_of(small, shift), usable, copies))


def results(nbytes: int, ranks: int, job: AllReduceJob) -> dict[str, Any]:
    """Milliseconds of one size (rank sample) and more, as lib/mpi_rank.py prints it. Raises UserError."""
    settings, name = job.settings, f"{ranks} ranks of MPI with {size_name(nbytes)}"
    numbers = map(str, (nbytes, settings.warmup, settings.steps, SMALL_BYTES, PROBE_BYTES))
    # mpi4py's runner ends all ranks if one raises.
    rank = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.lib.mpi_rank", *numbers]
    allowed = settings.timeout * (settings.warmup + settings.steps)
    with ended_politely(), subprocess.Popen(
        [str(mpiexec()), "-n", str(ranks), *rank], cwd=Path(__file__).parents[2], start_new_session=True,
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
