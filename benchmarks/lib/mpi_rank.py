"""One rank's part in timing MPI's all-reduce. mpiexec starts it (see allreduce.py), and rank 0 prints a line of JSON.
It imports no torch, so that ranks start at once."""

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
    """Check an all-reduce, then time it, a copy, and the probe of the links: an all-reduce of `small` bytes, a shift of
    `probe`."""
    known = np.arange(1009, dtype=np.float32) % 17
    mean_in_place(gate := known + me)
    np.testing.assert_allclose(gate, known + (ranks - 1) / 2, rtol=2 * ranks * float(np.finfo(np.float32).eps))
    flat, token = np.full(nbytes // 4, me + 1, np.float32), np.zeros(small // 4, np.float32)
    outbox, inbox = np.ones(probe // 4, np.float32), np.empty(probe // 4, np.float32)
    following, preceding, mean = (me + 1) % ranks, (me - 1) % ranks, (ranks + 1) / 2  # of equal values: it stays
    found: dict[str, object] = {
        "library": MPI.Get_library_version().split("\n")[0].replace("\t", " "),
        "shift": milliseconds(lambda: world.Sendrecv(outbox, following, 0, inbox, preceding), 2, 5),
        "small": milliseconds(lambda: mean_in_place(token), 5, 20),
        "times": milliseconds(lambda: mean_in_place(flat), warmup, steps),
        "error": world.allreduce(max(abs(float(each) / mean - 1) for each in (flat.min(), flat.max())), MPI.MAX),
    }
    twin = np.empty_like(flat)
    found["copies"] = milliseconds(lambda: np.copyto(twin, flat), 1, steps)
    if me == 0:
        print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
