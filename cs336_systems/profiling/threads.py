"""Which thread of a rank does what: the one that takes the steps, autograd's, those that communicate.

A trace names threads by numbers only, so they are told by what ran on them.
"""

import re

from cs336_systems.profiling.attribution import ENGINE, PHASES
from cs336_systems.profiling.names import step_number
from cs336_systems.profiling.tags import parse_tag
from cs336_systems.profiling.trace import COMMUNICATION, HOST, Lane, Span, Trace, once

MAIN = "main thread"
AUTOGRAD = "autograd thread"
COMMUNICATING = "communication thread"
IN_FLIGHT = "in flight"
OTHER = "other thread"
ROLES = (MAIN, AUTOGRAD, COMMUNICATING, IN_FLIGHT, OTHER)


@once
def roles(trace: Trace) -> dict[Lane, str]:
    """What each lane of the CPU is, in the order in which they are shown.

    "main thread" takes the steps. "autograd thread" runs backward where that is not the main thread, as on a GPU; a
    second one, of another GPU, is "autograd thread 1". "communication thread 0", 1 ... run gloo's collectives. "in
    flight 0", 1 ... are no threads, but hold what was posted until it was waited for. All others are "other thread 0".
    """
    lanes = trace.lanes(HOST)
    threads = [lane for lane in lanes if not _in_flight(lane)]
    main = max(threads, key=lambda lane: _mastery(lane, lanes[lane]), default=None)
    kinds: dict[str, list[Lane]] = {role: [] for role in ROLES}
    for lane in sorted(lanes, key=lambda lane: (lane_number(lane), str(lane))):
        kinds[MAIN if lane == main else _kind(lane, lanes[lane])].append(lane)
    unnumbered = (MAIN, AUTOGRAD)
    return {
        lane: role if role in unnumbered and not number else f"{role} {number}"
        for role, found in kinds.items()
        for number, lane in enumerate(found)
    }


def role_of(name: str) -> str:
    """One of ROLES: `communication thread 1` -> `communication thread`."""
    return next(role for role in ROLES if name.startswith(role))


def lane_number(lane: Lane) -> int:
    """The number in what a lane is called, to sort by."""
    found = re.search(r"\d+", str(lane[1]))
    return int(found[0]) if found else 0


def _in_flight(lane: Lane) -> bool:
    return str(lane[1]).startswith(IN_FLIGHT)


def _mastery(lane: Lane, spans: list[Span]) -> tuple[int, bool, int, int]:
    """By what a thread is the main one: steps, phases and modules annotated there, or else Linux's first thread."""
    told = sum(span.category == "user_annotation" and _is_ours(span.name) for span in spans)
    return told, lane[0] == lane[1], len(spans), -lane_number(lane)


def _is_ours(name: str) -> bool:
    return name in PHASES or step_number(name) is not None or parse_tag(name) is not None


def _kind(lane: Lane, spans: list[Span]) -> str:
    if _in_flight(lane):
        return IN_FLIGHT
    if any(span.name.startswith(ENGINE) for span in spans):
        return AUTOGRAD
    # NCCL has no thread of its own: it annotates the one that launches.
    own = any(COMMUNICATION.match(span.name) and not span.name.startswith("nccl") for span in spans)
    return COMMUNICATING if own else OTHER
