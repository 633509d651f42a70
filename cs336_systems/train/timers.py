"""Named timers in the style of Megatron-LM: the time of each part of a step on every rank, with waiting kept apart."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from cs336_systems.comm import Group, agree, all_reduce


class Timers:
    """Timers by name: sums since the last `reset`, compared over the ranks of `group` (None: this process alone). They
    may be nested and repeated. On a GPU a timer records events on the stream, and only a report reads them: the host
    never waits, and times include gaps in which the GPU waited for the host. A report lists `names` first."""

    def __init__(self, device: torch.device, group: Group | None = None, names: Iterable[str] = ()) -> None:
        self.device, self.group = device, group
        self.clock = time.perf_counter_ns
        self.laps: dict[str, list[Any]] = {name: [] for name in names}  # milliseconds, or pairs of CUDA events

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block, even if it raises."""
        self.laps.setdefault(name, [])
        begin = self._mark()
        try:
            yield
        finally:
            end = self._mark()
            self.laps[name].append((end - begin) / 1e6 if isinstance(end, int) else (begin, end))

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Time a block with a complete collective. A tiny all-reduce before it lines the ranks up; its time is recorded
        as `name`-wait: how long this rank waited for the others, and the latency of the all-reduce."""
        with self(f"{name}-wait"):
            if self.group is not None:
                all_reduce(torch.zeros(1, device=self.device), self.group, "line up").wait()
        with self(name):
            yield

    def milliseconds(self) -> dict[str, float]:
        """Sums of this rank's laps that have ended. Waits for the device if events must be read."""
        if any(isinstance(lap, tuple) for laps in self.laps.values() for lap in laps):
            torch.cuda.synchronize(self.device)
        for name, laps in self.laps.items():
            self.laps[name] = [lap[0].elapsed_time(lap[1]) if isinstance(lap, tuple) else lap for lap in laps]
        return {name: sum(laps) for name, laps in self.laps.items() if laps}

    def reset(self) -> None:
        """Forget the laps that have ended. A lap under way will count in full when it ends."""
        self.laps = {name: [] for name in self.laps}

    def by_rank(self) -> dict[str, list[float | None]]:
        """Milliseconds of every timer on each rank, None if a rank has not used it. Every rank must call this."""
        mine = dict.fromkeys(self.laps) | self.milliseconds()
        ranks = [mine] if self.group is None else agree("timers", mine, self.group)
        # In rank 0's order of names, used or not; then names that only later ranks have.
        found = {name: [times.get(name) for times in ranks] for name in dict.fromkeys(chain(*ranks))}
        return {name: values for name, values in found.items() if set(values) != {None}}


def timer_line(by_rank: dict[str, list[float | None]], steps: int = 1, minmax: bool = False) -> str:
    """Format `time (ms) | forward-compute: 43.42 | ...`: each timer's mean over the steps on the slowest rank that uses
    it; with `minmax` on the fastest and the slowest, `forward-compute: (41.07, 43.42)`."""
    parts = ["time (ms)"]
    for name, values in by_rank.items():
        used = [value / steps for value in values if value is not None]
        parts.append(f"{name}: ({min(used):.2f}, {max(used):.2f})" if minmax else f"{name}: {max(used):.2f}")
    return " | ".join(parts)
