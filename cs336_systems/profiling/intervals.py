"""Sets of moments as lists of half-open intervals [start, end) of integers: exact, since nothing is rounded.

A list that `union` returns is in order, and its intervals neither overlap nor touch. The others take such.
"""

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of the intervals, each once. Intervals may come in any order; empty ones vanish."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The moments in both unions."""
    result, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def subtraction(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The moments in the first union and not in the second."""
    if not first:
        return []
    gaps, free = [], first[0][0]
    for start, end in second:
        if free < start:
            gaps.append((free, start))
        free = end
    if free < first[-1][1]:
        gaps.append((free, first[-1][1]))
    return intersection(first, gaps)


def length(intervals: Iterable[Interval]) -> int:
    """How long a union is in all."""
    return sum(end - start for start, end in intervals)
