"""Checks of a merged trace for errors that make Perfetto drop events silently.

A viewer draws a slice only if it nests with the others of its thread, and an arrow only if both its ends lie in slices.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
Thread = tuple[Any, Any]  # (pid, tid)


@dataclass
class Checked:
    """The contents of a trace, and its problems, a line each."""

    slices: int = 0
    ranks: int = 0
    problems: list[str] = field(default_factory=list)


def validate(chrome: dict[str, Any]) -> Checked:
    """Checks that times are finite and not negative, that slices nest, that every flow has one start and then an end,
    all inside slices, and that no process or thread is two ranks'."""
    checked = Checked()
    threads: dict[Thread, list[Event]] = {}
    flows: dict[tuple[Any, Any, Any], list[Event]] = {}
    for event in chrome["traceEvents"]:
        if event["ph"] != "M" and not _sound(event):
            checked.problems.append(f"{event.get('name')!r} has times that are no times: {event.get('ts')}")
        elif event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
            checked.slices += 1
        elif event["ph"] in ("s", "t", "f"):
            flows.setdefault((event.get("cat"), event.get("name"), event.get("id")), []).append(event)
    for thread, slices in threads.items():
        checked.problems += _crossings(thread, slices)
    outermost = {thread: _outermost(slices) for thread, slices in threads.items()}
    for key, events in flows.items():
        checked.problems += _flow_problems(key, events, outermost)
    _check_names(chrome, set(threads), checked)
    return checked


def _sound(event: Event) -> bool:
    times = [event.get("ts"), event.get("dur", 0 if event["ph"] != "X" else None)]
    return all(isinstance(time, int | float) and math.isfinite(time) and time >= 0 for time in times)


def _times(event: Event) -> tuple[int, int]:
    """Start and end in nanoseconds, which are whole where microseconds have three decimals."""
    start = round(1000 * event["ts"])
    return start, start + round(1000 * event.get("dur", 0))


def _crossings(thread: Thread, slices: list[Event]) -> list[str]:
    problems, open_ends = [], [math.inf]
    for event in sorted(slices, key=lambda event: (_times(event)[0], -_times(event)[1])):
        start, end = _times(event)
        while open_ends[-1] <= start:
            open_ends.pop()
        if end > open_ends[-1]:
            problems.append(f"{event['name']!r} on thread {thread} at {event['ts']} us crosses another slice")
        else:
            open_ends.append(end)
    return problems


def _outermost(slices: list[Event]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(map(_times, slices)):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _flow_problems(
    key: tuple[Any, Any, Any], events: list[Event], outermost: dict[Thread, list[tuple[int, int]]]
) -> list[str]:
    name = f"flow {key[2]} ({key[0]}, {key[1]!r})"
    starts = [event["ts"] for event in events if event["ph"] == "s"]
    ends = [event["ts"] for event in events if event["ph"] == "f"]
    if len(starts) != 1 or not ends:
        return [f"{name} has {len(starts)} starts and {len(ends)} ends"]
    problems = [f"{name} ends before it starts"] if min(ends) < starts[0] else []
    for event in events:
        slices, time = outermost.get((event["pid"], event["tid"]), []), _times(event)[0]
        place = bisect_right(slices, (time, math.inf)) - 1
        if place < 0 or time >= slices[place][1]:
            problems.append(f"{name} touches no slice on thread {(event['pid'], event['tid'])} at {event['ts']} us")
    return problems


def _check_names(chrome: dict[str, Any], threads: set[Thread], checked: Checked) -> None:
    names: dict[str, dict[Any, set[str]]] = {"process_name": {}, "thread_name": {}}
    for event in chrome["traceEvents"]:
        if event["ph"] == "M" and event["name"] in names:
            who = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            names[event["name"]].setdefault(who, set()).add(event["args"]["name"])
    ranks = {" ".join(name.split()[:2]).strip(",") for each in names["process_name"].values() for name in each}
    checked.ranks = len({rank for rank in ranks if rank.startswith("rank ")})
    for what, found in (("process", names["process_name"]), ("thread", names["thread_name"])):
        for who, several in found.items():
            if len(several) > 1:
                checked.problems.append(f"{what} {who} has the names {', '.join(sorted(several))}")
    for thread in sorted(threads, key=str):
        if thread[0] not in names["process_name"] or thread not in names["thread_name"]:
            checked.problems.append(f"thread {thread} or its process has no name")
