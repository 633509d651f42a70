"""Times of operations that several ranks run together; the slowest rank's counts."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import measure
from cs336_systems.comm import Group, all_gather, all_reduce


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
