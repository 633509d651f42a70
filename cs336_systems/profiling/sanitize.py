"""Cleans what torch.profiler writes: its notes on the terminal, and its JSON, of which the events of steps are kept."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cs336_systems.comm.events import MARK
from cs336_systems.profiling.labels import Held
from cs336_systems.profiling.names import STEP
from cs336_systems.profiling.nesting import nest_host
from cs336_systems.profiling.trace import FRAME, HOST, parse

Label = tuple[int, str, int]  # nanoseconds since the epoch, category, address


def clean(chrome: dict[str, Any], held: list[Held], stepwise: bool) -> tuple[list[Held], list[Label]]:
    """Take the memory labels out of a trace's events and, `stepwise`, all before the first step; returns what was held
    in memory then, and the labels since. (The profiler runs from the last step of the warm-up on, so that its own start
    disturbs no step, and so that it knows the blocks that a step leaves to the next.)"""
    base, events = int(chrome.get("baseTimeNanoseconds", 0)), chrome["traceEvents"]
    times = [base + round(1000 * float(event.get("ts", 0))) for event in events]
    named = list(zip(events, times, [str(event.get("name", "")) for event in events], strict=True))
    steps = [time for event, time, name in named if event.get("ph") == "X" and STEP.match(name)]
    start = min(steps, default=0) if stepwise else 0
    kept, early, labels, categories = [], [], list[Label](), dict[int, str]()
    for event, time, name in named:
        before = event.get("ph") != "M" and time < start
        if name.startswith(MARK):
            category, _, address = name.removeprefix(MARK).rpartition(" ")
            if before:
                categories[int(address)] = category
            else:
                labels.append((time, category, int(address)))
        elif not before:
            kept.append(event)
        elif name == "[memory]":
            early.append(event)
    alive = {each.address: each for each in held}
    for event in sorted(early, key=lambda event: event["ts"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        alive.pop(address, None)
        if nbytes > 0:
            device = "cpu" if event["args"]["Device Type"] == 0 else "cuda"
            alive[address] = Held(categories.get(address, "other"), address, nbytes, device)
    chrome["traceEvents"] = kept
    _cut_crossings(chrome, base)
    return list(alive.values()), labels


def _cut_crossings(chrome: dict[str, Any], base: int) -> None:
    """Drop Python frames that cross an annotation, which viewers would drop with all inside, and cut a child that
    outlasts its parent by the rounding of a clock."""
    if not any(event.get("cat") == FRAME for event in chrome["traceEvents"]):
        return
    nodes = (node for roots in nest_host(parse(chrome)).values() for root in roots for node in root.walk())
    ends = {(node.span.lane, node.span.start, node.span.name, node.span.end): node.end for node in nodes}
    kept = []
    for event in chrome["traceEvents"]:
        if event.get("cat") in HOST and event["ph"] == "X":
            start = base + round(1000 * float(event["ts"]))
            key = ((event["pid"], event["tid"]), start, event["name"], start + round(1000 * event["dur"]))
            if key not in ends and event["cat"] == FRAME:
                continue
            event["dur"] = (ends.get(key, key[3]) - start) / 1000
        kept.append(event)
    chrome["traceEvents"] = kept


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
