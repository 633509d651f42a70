"""One row over all ranks: the least, the mean, the most, which rank that is, and how uneven they are.

Ranks that wait for each other are as fast as the slowest, so what one does longer than the mean, all pay for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Named(Protocol):
    """Any row of a table."""

    @property
    def name(self) -> str:
        """What the row is about."""


@dataclass(frozen=True)
class Spread:
    """A row's nanoseconds over the ranks; `imbalance` is the most over the mean, 1 if all ranks are equal."""

    name: str
    least: int
    mean: float
    most: int
    most_rank: int
    imbalance: float


def times_of(rows: Iterable[Named], of: str) -> dict[str, int]:
    """The nanoseconds of each row by its name, for `pivot`; rows of one name are added up. `of` is the field."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.name] = found.get(row.name, 0) + int(getattr(row, of))
    return found


def pivot(ranks: Mapping[int, Mapping[str, int]], limit: int | None = None) -> list[Spread]:
    """Rows of several ranks, {rank: {name: nanoseconds}}, the largest mean first.

    A rank that lacks a row spent no time on it. Of ranks that are equal the lowest is named.
    """
    names = dict.fromkeys(name for times in ranks.values() for name in times)
    rows = []
    for name in names:
        times = {rank: ranks[rank].get(name, 0) for rank in sorted(ranks)}
        most_rank = max(times, key=lambda rank: times[rank])
        mean = sum(times.values()) / len(times)
        imbalance = times[most_rank] / mean if mean else 1.0
        rows.append(Spread(name, min(times.values()), mean, times[most_rank], most_rank, imbalance))
    return sorted(rows, key=lambda row: (-row.mean, row.name))[:limit]
