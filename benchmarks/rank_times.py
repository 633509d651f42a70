"""Times of operations that several ranks run together; the slowest rank's counts."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import measure
from cs336_systems.comm import Group, agree, all_gather, all_reduce, broadcast
from cs336_systems.errors import UserError
from cs336_systems.profiling.trace import trace_name


def gather_times(samples_ms: Sequence[float], group: Group, device: torch.device) -> Tensor:
    """Every rank's samples in milliseconds (rank sample), on every rank. All ranks give equally many."""
    times = torch.zeros(group.size(), len(samples_ms), dtype=torch.float64, device=device)
    times[group.rank()] = torch.tensor(samples_ms, dtype=torch.float64)
    all_gather(times.view(-1), group, "times").wait()
    return times.cpu()


def now(device: torch.device) -> float:
    """Seconds on the clock, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def line_up(group: Group, device: torch.device) -> None:
    """Let the ranks start as one."""
    all_reduce(torch.zeros(1, device=device), group, "line up").wait()


def time_ranks(
    run: Callable[[], object], group: Group, device: torch.device, warmup: int, steps: int,
    advance: Callable[[str], None] = lambda note: None,
) -> Tensor:  # fmt: skip
    """Let all ranks do `run` together, warmup + steps times: milliseconds of those that count (rank sample).

    A small all-reduce before each, untimed, lets the ranks start together; the time until the last is done is then
    `times.amax(dim=0)`.
    """
    done = measure({"run": run}, device, warmup, steps, before=partial(line_up, group, device), advance=advance)
    return gather_times(done.samples_ms["run"], group, device)


def collect_files(folder: Path, group: Group, device: torch.device) -> None:
    """Rank 0 writes every other rank's trace into its own `folder`; every rank must call this. Files travel as tensors
    of `device`, on which the group communicates. Raises UserError, on rank 0, if it cannot."""
    me = group.rank()
    mine = (folder / trace_name(me)).read_bytes() if (folder / trace_name(me)).exists() else b""
    sizes = [int(size) for size in agree("sizes of the traces", str(len(mine)), group)]
    for rank in range(1, group.size()):
        content = torch.zeros(sizes[rank], dtype=torch.uint8, device=device)
        if rank == me and mine:
            content = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        broadcast(content, rank, group, f"trace of rank {rank}").wait()
        if me == 0 and sizes[rank]:
            try:
                (folder / trace_name(rank)).write_bytes(bytes(content.cpu().numpy()))
            except OSError as error:
                raise UserError(f"cannot write rank {rank}'s trace to {folder}: {error.strerror}") from None
