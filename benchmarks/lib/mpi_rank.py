"""One rank's part in timing MPI's all-reduce. mpiexec starts it, and rank 0 prints a line of JSON (see lib/mpi.py). It
imports no torch, so that ranks start at once."""

import json
import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
me, ranks = world.rank, world.size


def milliseconds(run: Callable[[], object], warmup: int, steps: int) -> list[list[float]]:
    """Times of `run` on all ranks (rank sample), which begin each of them together."""
    samples = []
    for _ in range(warmup + steps):
        world.Barrier()
        start = perf_counter()
        run()
        samples.append(1e3 * (perf_counter() - start))
    return world.allgather(samples[warmup:])


def mean_in_place(flat: np.ndarray) -> None:
    """Replace `flat` by its mean over all ranks."""
    world.Allreduce(MPI.IN_PLACE, flat)
    np.divide(flat, ranks, out=flat)


def main(nbytes: int, warmup: int, steps: int, small: int, probe: int) -> None:
    """Time the all-reduce, a copy, and the probe of the links: an all-reduce of `small` bytes, a shift of `probe`."""
    flat, token = np.full(nbytes // 4, me + 1, np.float32), np.zeros(small // 4, np.float32)
    outbox, twin = np.ones(probe // 4, np.float32), np.empty_like(flat)
    inbox, following, preceding = np.empty_like(outbox), (me + 1) % ranks, (me - 1) % ranks
    found: dict[str, object] = {
        "library": MPI.Get_library_version().split("\n")[0].replace("\t", " "),
        "shift": milliseconds(lambda: world.Sendrecv(outbox, following, 0, inbox, preceding), 2, 5),
        "small": milliseconds(lambda: mean_in_place(token), 5, 20),
        "times": milliseconds(lambda: mean_in_place(flat), warmup, steps),
        "copies": milliseconds(lambda: np.copyto(twin, flat), 1, steps),
        "error": world.allreduce(float(abs(flat / ((ranks + 1) / 2) - 1).max()), MPI.MAX),  # the mean of equal values
    }
    if me == 0:
        print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
