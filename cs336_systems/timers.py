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
    """One named timer of `Timers`: a context manager, or `start` and `stop`. Laps add up until it is reset."""

    def __init__(self, name: str, mark: Callable[[], Any]) -> None:
        self.name, self.mark = name, mark
        self.begun: Any = None
        self.pending: list[tuple[Any, Any]] = []  # laps between two CUDA events, not yet read
        self.laps, self.nanoseconds = 0, 0.0

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
        self.laps += 1
        if isinstance(ended, int):
            self.nanoseconds += ended - begun
        else:
            self.pending.append((begun, ended))

    def __enter__(self) -> "Timer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def reset(self) -> None:
        """Forget the laps that have ended. One that is under way will count in full when it ends."""
        self.pending, self.laps, self.nanoseconds = [], 0, 0.0

    def milliseconds(self) -> float:
        """The sum of all laps that have ended. On a GPU it must have passed the events."""
        self.nanoseconds += 1e6 * sum(begun.elapsed_time(ended) for begun, ended in self.pending)
        self.pending = []
        return self.nanoseconds / 1e6


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
        if self.device.type != "cuda":
            return self.clock()
        if self.synchronise:
            torch.cuda.synchronize(self.device)
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

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
        if any(timer.pending for timer in self.timers.values()):
            torch.cuda.synchronize(self.device)
        return {name: timer.milliseconds() for name, timer in self.timers.items() if timer.laps}

    def reset(self) -> None:
        """Begin a new report."""
        for timer in self.timers.values():
            timer.reset()

    def over_ranks(self) -> dict[str, Spread]:
        """Every timer over the ranks, the same on each; every rank of the group must call this.

        Ranks may use different timers: a pipeline's first stage receives no activations. Such a rank is left out of a
        timer's spread, since to count it as zero would halve the mean of a thing that the others do.
        """
        ranks = [0] if self.group is None else [global_rank(rank, self.group) for rank in range(self.group.size())]
        return {name: _spread(values, ranks) for name, values in self.by_rank().items()}

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
        mine = [own.get(name, torch.nan) for name in names]
        table = torch.zeros(self.group.size(), len(names), dtype=torch.float64, device=self.device)
        table[self.group.rank()] = torch.tensor(mine, dtype=torch.float64)
        all_gather(table.view(-1), self.group, "timers").wait()
        return dict(zip(names, table.T.tolist(), strict=True))

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


def _spread(milliseconds: list[float], ranks: list[int]) -> Spread:
    """Over the ranks whose figure is a number."""
    used = [(value, rank) for value, rank in zip(milliseconds, ranks, strict=True) if value == value]
    values = [value for value, _ in used]
    least, most = min(values), max(values)
    least_rank, most_rank = used[values.index(least)][1], used[values.index(most)][1]
    return Spread(least, most, sum(values) / len(values), least_rank, most_rank, len(values))
