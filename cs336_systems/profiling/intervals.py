"""Sets of moments as sorted lists of half-open intervals [start, end) of integers, so that lengths are exact."""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import chain
from typing import Any, TypeVar

Interval = tuple[int, int]
FOREVER = 10**30  # nanoseconds
Bar = TypeVar("Bar", bound=Any)  # has a start and an end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals, in any order, into sorted ones that neither overlap nor touch; empty ones vanish."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif start < end:
            result.append((start, end))
    return result


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The moments in both of two unions."""
    result, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        i, j = (i + 1, j) if first[i][1] < second[j][1] else (i, j + 1)
    return result


def subtraction(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The moments in the first union and not in the second."""
    edges = [-FOREVER, *chain.from_iterable(second), FOREVER]
    return intersection(first, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> int:
    """The sum of the intervals' lengths."""
    return sum(end - start for start, end in intervals)


def pack(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Distribute what has a start and an end over as few tracks as leave none over another, each on the first free."""
    tracks, free, taken = list[list[Bar]](), list[int](), list[tuple[int, int]]()  # heaps; the latter with the end
    for bar in sorted(bars, key=lambda bar: bar.start):
        while taken and taken[0][0] <= bar.start:
            heappush(free, heappop(taken)[1])
        if not free:
            free.append(len(tracks))
            tracks.append([])
        track = heappop(free)
        tracks[track].append(bar)
        heappush(taken, (bar.end, track))
    return tracks
