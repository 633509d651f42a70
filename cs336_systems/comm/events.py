"""Record of every collective: tests count it, and predictions are made from it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cs336_systems.comm.memory_labels import is_profiling
from cs336_systems.traffic import sent


@dataclass(frozen=True)
class Event:
    """One collective over `ranks` ranks, or message between two, on a tensor of `numel` elements in all; `label` says
    what it was for."""

    verb: str
    label: str
    numel: int
    dtype: torch.dtype
    ranks: int
    algorithm: str  # the verb whose traffic this made: gloo reduce-scatters a CUDA tensor by an all-reduce
    group: str = ""  # name of the process group, by which a mesh tells the axis

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def bytes_sent(self) -> float:
        """Bytes that one rank sends."""
        return self.nbytes * sent(self.algorithm, self.ranks)

    def annotate(self, what: str, number: int, group: str) -> AbstractContextManager[Any]:
        """Span in a profiler's trace, such as `wait all-reduce 0#3 bucket 1` for the third collective of group 0.
        Traces of several ranks are matched by this name. No effect without a profiler."""
        if not is_profiling():
            return nullcontext()
        return torch.profiler.record_function(f"{what} {self.verb} {group}#{number} {self.label}".rstrip())


_recorders: list[list[Event]] = []


@contextmanager
def record() -> Iterator[list[Event]]:
    """Lists every collective that this rank launches inside the block, in order."""
    events: list[Event] = []
    _recorders.append(events)
    try:
        yield events
    finally:
        _recorders[:] = [each for each in _recorders if each is not events]


def log(event: Event) -> None:
    """Append a collective to every open record."""
    for events in _recorders:
        events.append(event)
