"""Named timers: how long each part of a step took, its least and most over the ranks, waiting apart from transferring.

In the style of Megatron-LM, whose line they print: `time (ms) | forward-compute: 43.42 | backward-compute: 90.74`.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from cs336_systems.comm import Group, agree, all_gather, all_reduce, global_rank
from cs336_systems.errors import UserError

Kind = Literal["max", "minmax"]


@dataclass(frozen=True)
class Spread:
    """A timer's milliseconds over the `ranks` ranks that used it; the first of equal ranks is named.

    The slow rank is `most_rank` in work, but `least_rank` in a wait: who comes last waits for nobody.
    """

    least: float
    most: float
    mean: float
    least_rank: int
    most_rank: int
    ranks: int


class Timer:
    """One named timer of `Timers`: a context manager, or `start` and `stop`. Laps add up until `laps` is emptied."""

    def __init__(self, name: str, mark: Callable[[], Any]) -> None:
        self.name, self.mark = name, mark
        self.begun: Any = None
        self.laps: list[Any] = []  # milliseconds, or a pair of CUDA events that have not been read

    def start(self) -> None:
        """Begin a lap. Raises UserError if one is under way."""
        if self.begun is not None:
            raise UserError(f"timer {self.name!r} is running already: stop it before it starts again")
        self.begun = self.mark()

    def stop(self) -> None:
        """End the lap. Raises UserError if none is under way."""
        if self.begun is None:
            raise UserError(f"timer {self.name!r} is not running: start it before it stops")
        begun, self.begun, ended = self.begun, None, self.mark()
        self.laps.append((ended - begun) / 1e6 if isinstance(ended, int) else (begun, ended))

    def __enter__(self) -> "Timer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Timers:
    """Timers by name, the sums since the last report, compared over the ranks of `group` (None: this process alone).

        timers = Timers(device, group)
        with timers("forward-compute"): ...
        with timers.collective("backward-params-all-reduce"): ...
        print(timers.line(normaliser=steps))

    On a GPU, a timer marks the stream with events, read at the report only: the host never waits, and the time is that
    of the stream, the gaps in which the host was late included. With `synchronise`, the device is idle at both ends and
    the clock is read: the time of this work and nothing else, for the price of serialising host and device; so
    Megatron-LM's timers worked in 2021. A CPU works in step with its clock and needs neither.

    Timers may be nested (the outer one includes the inner) and repeated. `clock` returns nanoseconds.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group | None = None,
        synchronise: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.device, self.group, self.synchronise, self.clock = device, group, synchronise, clock
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer of this name, made if it is new."""
        return self.timers.setdefault(name, Timer(name, self._mark))

    def _mark(self) -> Any:
        if self.device.type == "cuda" and not self.synchronise:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Times a block with a collective that ends in it, and as `name`-wait how long this rank waited for the others.

        A tiny all-reduce lines the ranks up first, since a collective that begins before the last rank is there counts
        that rank's lateness as its own time. The wait includes the latency of that all-reduce.
        """
        with self(f"{name}-wait"):
            if self.group is not None:
                all_reduce(torch.zeros(1, device=self.device), self.group, "line up").wait()
        with self(name):
            yield

    def milliseconds(self) -> dict[str, float]:
        """This rank's sums by name since the last report, of timers that have ended a lap, in the order of first use.

        Waits for the device if there are events to be read.
        """
        if any(isinstance(lap, tuple) for timer in self.timers.values() for lap in timer.laps):
            torch.cuda.synchronize(self.device)
        for timer in self.timers.values():
            timer.laps = [lap[0].elapsed_time(lap[1]) if isinstance(lap, tuple) else lap for lap in timer.laps]
        return {name: sum(timer.laps) for name, timer in self.timers.items() if timer.laps}

    def reset(self) -> None:
        """Forget the laps that have ended. One that is under way will count in full when it ends."""
        for timer in self.timers.values():
            timer.laps = []

    def by_rank(self) -> dict[str, list[float]]:
        """The milliseconds of every timer on each rank of the group, NaN where a rank has not used it; the same on
        every rank, each of which must call this."""
        own = self.milliseconds()
        if self.group is None:
            return {name: [value] for name, value in own.items()}
        said = json.dumps([list(self.timers), list(own)], allow_nan=False)
        every = [json.loads(each) for each in agree("names of timers", said, self.group)]
        # In the order in which rank 0 named them, used or not, and then the next ranks.
        used = {name for _, some in every for name in some}
        names = list(dict.fromkeys(name for named, _ in every for name in named if name in used))
        if not names:
            return {}
        table = torch.zeros(self.group.size(), len(names), dtype=torch.float64, device=self.device)
        table[self.group.rank()] = torch.tensor([own.get(name, torch.nan) for name in names], dtype=torch.float64)
        all_gather(table.view(-1), self.group, "timers").wait()
        return dict(zip(names, table.T.tolist(), strict=True))

    def over_ranks(self) -> dict[str, Spread]:
        """Every timer over the ranks, the same on each; every rank of the group must call this.

        Ranks may use different timers: a pipeline's first stage receives no activations. Such a rank is left out of a
        timer's spread, since to count it as zero would halve the mean of a thing that the others do.
        """
        ranks = [0] if self.group is None else [global_rank(rank, self.group) for rank in range(self.group.size())]
        spreads = {}
        for name, values in self.by_rank().items():
            used = {rank: value for rank, value in zip(ranks, values, strict=True) if value == value}
            least, most = min(used, key=used.__getitem__), max(used, key=used.__getitem__)
            spreads[name] = Spread(used[least], used[most], sum(used.values()) / len(used), least, most, len(used))
        return spreads

    def line(self, normaliser: float = 1, kind: Kind = "max", reset: bool = True) -> str:
        """The report, in milliseconds over `normaliser` (the steps since the last one), the same on every rank.

        `time (ms) | forward-compute: 43.42 | ...`: of each timer the most over the ranks, or as "minmax" the least and
        the most, `forward-compute: (41.07, 43.42)`. Every rank must call this. Raises UserError for another kind, or a
        normaliser that is not positive.
        """
        if kind not in get_args(Kind):
            raise UserError(f"no kind of report {kind!r}; choose from {', '.join(get_args(Kind))}")
        if not normaliser > 0:
            raise UserError(f"the normaliser must be positive, not {normaliser}: it is the number of steps reported on")
        parts = ["time (ms)"]
        for name, spread in self.over_ranks().items():
            least, most = spread.least / normaliser, spread.most / normaliser
            parts.append(f"{name}: {most:.2f}" if kind == "max" else f"{name}: ({least:.2f}, {most:.2f})")
        if reset:
            self.reset()
        return " | ".join(parts)
