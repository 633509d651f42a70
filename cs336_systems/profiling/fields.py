"""Types of a trace's fields, checked once when it is read: all code that reads events relies on them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

OURS = "cs336"  # the key of what capture.py adds to a trace
MOST = 2**62
UNREAD = frozenset(("Ev Idx", "Record function id", "Python id", "Python parent id", "Python module id"))
SHORT = 20  # most elements of lists that events share, such as shapes and types
Kind = tuple[tuple[type, ...], int]  # types, and the bound of a number; 0: none
NAME, LIST, DICT, TIME, BYTES = ((str,), 0), ((list,), 0), ((dict,), 0), ((int, float), 2**52), ((int,), 2**50)
ID, RANKS = ((int, str, float, bool, type(None)), 0), ((int,), 2**20)
EVENT: dict[str, Kind] = {"ph": NAME, "name": NAME, "cat": NAME, "ts": TIME, "dur": TIME, "args": DICT}
EVENT |= dict.fromkeys(("pid", "tid", "id"), ID)
ARGS: dict[str, Kind] = {"Addr": ((int,), 0), "Bytes": BYTES, "Total Allocated": BYTES}  # others may have any type
ARGS |= dict.fromkeys(("External id", "correlation", "stream", "Device Id"), ID)
HEAD: dict[str, Kind] = {"baseTimeNanoseconds": ((int,), MOST), "host_name": NAME, "distributedInfo": DICT, OURS: DICT}
ROWS = {"held": (str, int, int, str), "marks": (int, str, int)}
RANK: dict[str, Kind] = {"rank": RANKS, "world_size": RANKS, "steps": ((int,), 0), "run": ID}
RANK |= dict.fromkeys(("pg_config", *ROWS), LIST)


def check(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raises TypeError, naming the field, for a value of another type or size."""
    for name, value in fields.items():
        if name in kinds:
            types, most = kinds[name]
            if type(value) not in types or (most and not -most < value < most):
                raise TypeError(f"its {name} is {value!r:.40}")


def about_rank(chrome: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a trace about its rank, torch's and ours. Raises TypeError for a field of another type, and
    ValueError for a rank that there cannot be."""
    check(chrome, HEAD)
    found = chrome.get("distributedInfo", {}) | chrome.get(OURS, {})
    check(found, RANK)
    if not 0 <= found.get("rank", 0) < found.get("world_size", MOST):
        raise ValueError(f"its rank is {found.get('rank', 0)}, its world_size {found.get('world_size', 'unknown')}")
    for group in found.get("pg_config", ()):
        if not isinstance(group, dict) or not isinstance(group.get("ranks", []), list):
            raise TypeError(f"its pg_config has {group!r:.40}")
    for name, types in ROWS.items():
        for row in found.get(name, ()):
            right = isinstance(row, list | tuple) and tuple(map(type, row)) == types
            if not right or any(isinstance(each, int) and abs(each) > MOST for each in row):
                raise TypeError(f"its {name} have {row!r:.40}, which is no row of them")
    return found


def shapes_of(args: Mapping[str, Any]) -> list[Any]:
    """The shapes of an operator's inputs, [2, 3], several for a list of tensors; none if they were not recorded."""
    found = args.get("Input Dims")
    if not isinstance(found, list):
        return []
    known = (_is_shape(each) or (type(each) is list and all(map(_is_shape, each))) for each in found)
    return found if all(known) else []


def types_of(args: Mapping[str, Any]) -> list[str]:
    """The types of an operator's inputs, as far as they are recorded."""
    found = args.get("Input type")
    return [*map(str, found)] if isinstance(found, list) else []


def _is_shape(found: Any) -> bool:
    counts = type(found) is list and len(found) <= 64 and all(type(each) is int and each >= 0 for each in found)
    return counts and math.prod(found) < MOST


def slim() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A hook that saves memory: objects share equal texts and lists, and lose numbers that matter only inside torch."""
    texts, lists = dict[str, str](), dict[str, list[Any]]()

    def hook(found: dict[str, Any]) -> dict[str, Any]:
        for key in UNREAD.intersection(found):
            del found[key]
        for key, value in found.items():
            if type(value) is str:
                found[key] = texts.setdefault(value, value)
            elif type(value) is list and len(value) < SHORT:
                found[key] = lists.setdefault(str(value), value)
        return found

    return hook
