"""Corrupted JSON: each field of a valid document in turn is replaced by a value of each type."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

VALUES = [None, True, -7.5, 10**300, float("inf"), "9" * 5000, "\ud800<b>|`*", [], [1, [2]], {}]
Place = Sequence[Any]


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """The places of all that is inside some JSON, as keys and indices."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*above, key)
        yield from places(each, (*above, key))


def inner(value: Any, place: Place) -> Any:
    """The value at a place."""
    for key in place:
        value = value[key]
    return value


def replaced(good: Any, place: Place, value: Any) -> Any:
    """Some JSON with another value at a place; it shares with the first what lies elsewhere."""
    if not place:
        return copy(value)
    made = copy(good)
    made[place[0]] = replaced(good[place[0]], place[1:], value)
    return made


def garbled(good: Any, inside: Place = (), values: Sequence[Any] = VALUES) -> Iterator[tuple[Place, Any, Any]]:
    """(place, value, JSON) for every place inside a part of some JSON, and every value."""
    for place in places(inner(good, inside), inside):
        for value in values:
            yield place, value, replaced(good, place, value)
