"""Record of every collective, for tests and predictions, and marks that tell a profiler what a storage is used for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from cs336_systems.traffic import sent

MARK = "memory mark: "


class Event(NamedTuple):
    """One collective over `ranks` ranks, or message between two, on a tensor of `numel` elements in all; `label` names
    its purpose."""

    verb: str
    label: str
    numel: int
    dtype: torch.dtype
    ranks: int
    algorithm: str  # the verb whose traffic this made: gloo reduce-scatters a CUDA tensor by an all-reduce
    group: str = ""  # name of the process group, from which a mesh finds the axis

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def bytes_sent(self) -> float:
        """Bytes that one rank sends."""
        return self.nbytes * sent(self.algorithm, self.ranks)


records: list[list[Event]] = []  # lists of the `record` blocks that are open


@contextmanager
def record() -> Iterator[list[Event]]:
    """List every collective that this rank launches inside the block, in order."""
    events: list[Event] = []
    records.append(events)
    try:
        yield events
    finally:
        records[:] = [each for each in records if each is not events]


def is_profiling() -> bool:
    """True if a profiler runs in this thread. torch has no public name for this."""
    return bool(torch._C._autograd._profiler_enabled())


def mark(category: str, storage: Tensor | int) -> None:
    """Tell a running profiler that the storage of a tensor, or at an address, holds `parameters`, `gradients` or
    `optimizer state` from now on. The trace gets an event, in the order of time among those of the allocations."""
    if is_profiling():
        address = storage.untyped_storage().data_ptr() if isinstance(storage, Tensor) else storage
        with record_function(f"{MARK}{category} {address}"):
            pass
