"""What takes long to make of one or several ranks' traces, kept with the first of them as long as that lives."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cs336_systems.profiling.trace import Trace

Made = TypeVar("Made")


def of_ranks(traces: Sequence[Trace], name: str, make: Callable[[], Made]) -> Made:
    """What `make` makes of these very traces in this order; made anew only for others. Nobody may change it."""
    cache = traces[0].cache if traces else {}
    kept: tuple[list[Trace], Made] | None = cache.get(name)
    if kept is None or list(map(id, kept[0])) != list(map(id, traces)):
        kept = cache[name] = (list(traces), make())
    return kept[1]
