"""From torch.profiler's JSON to what `Capture` writes: the events of the steps, and none that viewers stumble at."""

from typing import Any

from cs336_systems.marks import MARK
from cs336_systems.profiling.held import Held
from cs336_systems.profiling.names import FRAME, STEP
from cs336_systems.profiling.nesting import nest_host
from cs336_systems.profiling.trace import HOST, parse

Event = dict[str, Any]
Mark = tuple[int, str, int]  # nanoseconds since the epoch, category, address


def nanoseconds(event: Event, base: int) -> int:
    """When an event began, since the epoch."""
    return base + round(1000 * float(event.get("ts", 0)))


def take_marks(chrome: dict[str, Any]) -> list[Mark]:
    """The memory marks, taken out of the trace's events."""
    marks, kept = [], []
    base = int(chrome.get("baseTimeNanoseconds", 0))
    for event in chrome["traceEvents"]:
        if str(event.get("name", "")).startswith(MARK):
            category, _, address = event["name"][len(MARK) :].rpartition(" ")
            marks.append((nanoseconds(event, base), category, int(address)))
        else:
            kept.append(event)
    chrome["traceEvents"] = kept
    return marks


def begin_at_first_step(chrome: dict[str, Any], held: list[Held], marks: list[Mark]) -> tuple[list[Held], list[Mark]]:
    """Drop what happened before the first step, and return what was held in memory then, and the marks since.

    The profiler runs from the last step of the warm-up on, so that its own start disturbs no step, and so that it knows
    the blocks that a step leaves to the next.
    """
    base, events = int(chrome.get("baseTimeNanoseconds", 0)), chrome["traceEvents"]
    steps = [nanoseconds(e, base) for e in events if e.get("ph") == "X" and STEP.match(str(e.get("name", "")))]
    start = min(steps, default=0)
    earlier = [event for event in events if event.get("ph") != "M" and nanoseconds(event, base) < start]
    dropped = {id(event) for event in earlier}
    chrome["traceEvents"] = [event for event in events if id(event) not in dropped]
    alive = {each.address: each for each in held}
    named = {address: category for time, category, address in marks if time < start}
    allocations = [event for event in earlier if event.get("name") == "[memory]"]
    for event in sorted(allocations, key=lambda event: event["ts"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        alive.pop(address, None)
        if nbytes > 0:
            device = "cpu" if event["args"]["Device Type"] == 0 else "cuda"
            alive[address] = Held(named.get(address, "other"), address, nbytes, device)
    return list(alive.values()), [mark for mark in marks if mark[0] >= start]


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
