"""Cleans what torch.profiler writes: its notes on the terminal, and its JSON, which keeps the events of the steps only.

Frames of Python at which viewers stumble go, too.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cs336_systems.comm.events import MARK
from cs336_systems.profiling.memory_owners import Held
from cs336_systems.profiling.names import STEP
from cs336_systems.profiling.nesting import nest_host
from cs336_systems.profiling.trace import FRAME, HOST, parse

Event = dict[str, Any]
Label = tuple[int, str, int]  # nanoseconds since the epoch, category, address


def nanoseconds(event: Event, base: int) -> int:
    """The start of an event, since the epoch."""
    return base + round(1000 * float(event.get("ts", 0)))


def take_labels(chrome: dict[str, Any]) -> list[Label]:
    """Take the memory labels out of the trace's events."""
    labels, kept = [], []
    base = int(chrome.get("baseTimeNanoseconds", 0))
    for event in chrome["traceEvents"]:
        if str(event.get("name", "")).startswith(MARK):
            category, _, address = event["name"][len(MARK) :].rpartition(" ")
            labels.append((nanoseconds(event, base), category, int(address)))
        else:
            kept.append(event)
    chrome["traceEvents"] = kept
    return labels


def begin_at_first_step(
    chrome: dict[str, Any], held: list[Held], labels: list[Label]
) -> tuple[list[Held], list[Label]]:
    """Drop the events before the first step; returns what was held in memory then, and the labels since.

    The profiler runs from the last step of the warm-up on, so that its own start disturbs no step, and so that it knows
    the blocks that a step leaves to the next.
    """
    base, events = int(chrome.get("baseTimeNanoseconds", 0)), chrome["traceEvents"]
    steps = [nanoseconds(e, base) for e in events if e.get("ph") == "X" and STEP.match(str(e.get("name", "")))]
    start = min(steps, default=0)
    early = [event.get("ph") != "M" and nanoseconds(event, base) < start for event in events]
    chrome["traceEvents"] = [event for event, is_early in zip(events, early, strict=True) if not is_early]
    alive = {each.address: each for each in held}
    named = {address: category for time, category, address in labels if time < start}
    allocations = [e for e, is_early in zip(events, early, strict=True) if is_early and e.get("name") == "[memory]"]
    for event in sorted(allocations, key=lambda event: event["ts"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        alive.pop(address, None)
        if nbytes > 0:
            device = "cpu" if event["args"]["Device Type"] == 0 else "cuda"
            alive[address] = Held(named.get(address, "other"), address, nbytes, device)
    return list(alive.values()), [label for label in labels if label[0] >= start]


def without_crossings(chrome: dict[str, Any]) -> list[Event]:
    """The events less those Python frames that cross an annotation, which viewers would drop with all inside, and cut
    where a child outlasts its parent by the rounding of a clock."""
    if not any(event.get("cat") == FRAME for event in chrome["traceEvents"]):
        return list(chrome["traceEvents"])
    base = int(chrome.get("baseTimeNanoseconds", 0))
    ends = {
        (node.span.lane, node.span.start, node.span.name, node.span.end): node.end
        for roots in nest_host(parse(chrome)).values()
        for root in roots
        for node in root.walk()
    }
    kept = []
    for event in chrome["traceEvents"]:
        if event.get("cat") in HOST and event["ph"] == "X":
            start = nanoseconds(event, base)
            key = ((event["pid"], event["tid"]), start, event["name"], start + round(1000 * event["dur"]))
            if key not in ends and event["cat"] == FRAME:
                continue
            event["dur"] = (ends.get(key, key[3]) - start) / 1000
        kept.append(event)
    return kept


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Pass on what C++ libraries write to stderr inside the block, except lines that begin with USDT."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
