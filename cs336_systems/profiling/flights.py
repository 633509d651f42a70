"""Every collective from its launch to the end of its wait, with the transfers that it consists of.

A backend's own spans do not say what they reduce: gloo's threads show `gloo:all_reduce`, a GPU's stream a kernel. Our
annotation of the launch does, and it is followed from there: a kernel by its correlation, a send or receive because it
was posted inside the launch, and gloo's queue because it is first in, first out.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.profiling.trace import COMMUNICATION, KERNEL, POSTED, Lane, Span, Trace

NAME = re.compile(r"^(launch|wait) ([\w-]+) (\S+#\d+) ?(.*)$")
SENDS = re.compile(r"^c10d::(send|recv)")


@dataclass(frozen=True)
class Flight:
    """One collective of one rank: its verb, its number in its group (`0#47`), what it was for, and its spans.

    `transfers` are in order of start: gloo's execution, NCCL's kernels, or what was posted. `wait` is None if nobody
    waited while the profiler ran. A transfer that no annotation accounts for is a flight of its own without a launch.
    """

    verb: str
    number: str
    label: str
    launch: Span | None
    wait: Span | None
    transfers: tuple[Span, ...]

    @property
    def posted(self) -> bool:
        """Whether its end is known only from the wait."""
        return any(span.name in POSTED for span in self.transfers)

    @property
    def start(self) -> int:
        """When it was launched."""
        return self.launch.start if self.launch else self.transfers[0].start

    @property
    def end(self) -> int:
        """When the last of its spans was over."""
        return max(span.end for span in (self.launch, self.wait, *self.transfers) if span is not None)


def flights(trace: Trace) -> list[Flight]:
    """A rank's collectives in order of launch. Works without our annotations as well: then nothing has a label."""
    waits: dict[tuple[str, ...], Span] = {}
    launches: list[tuple[tuple[str, ...], Span]] = []
    for span in trace.spans:
        if span.category == "user_annotation" and (found := NAME.match(span.name)):
            what, *rest = found.groups()
            if what == "wait":
                waits[tuple(rest)] = span  # may be interrupted; the last counts
            else:
                launches.append((tuple(rest), span))
    owned, free = _owned(trace, [span for _, span in launches])
    result = []
    for i, (key, span) in enumerate(launches):
        mine = sorted(owned.get(i, []), key=lambda each: each.start)
        verb, number, label = key
        result.append(Flight(verb, number, label, span, waits.get(key), tuple(mine)))
    result += [Flight(_verb(span), "", "", None, None, (span,)) for span in free]
    return sorted(result, key=lambda flight: flight.start)


def _verb(span: Span) -> str:
    """all-reduce for gloo:all_reduce and for ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)."""
    if COMMUNICATION.match(span.name):
        return span.name.split(":", 1)[1].replace("_", "-")
    found = re.search(r"Kernel_([A-Za-z]+)", span.name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", found[1]).lower() if found else "collective"


def _owned(trace: Trace, launches: Sequence[Span]) -> tuple[dict[int, list[Span]], list[Span]]:
    """The transfers of each launch, by its place in the list, and those of none."""
    inside = _Inside(launches)
    owned: dict[int, list[Span]] = {}
    free: list[Span] = []
    causes = _causes(trace)
    for span in trace.spans:
        if not _is_transfer(span):
            continue
        cause = causes.get(id(span))
        owner = inside.find(*cause) if cause else None
        (free if owner is None else owned.setdefault(owner, [])).append(span)
    return owned, free


def _is_transfer(span: Span) -> bool:
    if span.category == "kernel":
        return bool(KERNEL.search(span.name))
    return span.category == "user_annotation" and span.name.startswith("gloo:")


def _causes(trace: Trace) -> dict[int, tuple[Lane | None, int]]:
    """For every transfer, by identity, the thread and the time at which it was asked for. Posted ones were moved off
    their thread, so that theirs is unknown."""
    calls = {
        span.args["correlation"]: span
        for span in trace.spans
        if span.category in ("cuda_runtime", "cuda_driver") and "correlation" in span.args
    }
    queued = [s for s in trace.spans if s.name.startswith("c10d::") and not SENDS.match(s.name)]
    found: dict[int, tuple[Lane | None, int]] = {}
    for span in filter(_is_transfer, trace.spans):
        if span.name in POSTED:
            found[id(span)] = (None, span.start)
        elif span.category == "kernel":
            call = calls.get(span.args.get("correlation"))
            if call is not None:
                found[id(span)] = (call.lane, call.start)
        elif queued and queued[0].start <= span.start:
            first = queued.pop(0)
            found[id(span)] = (first.lane, first.start)
    return found


class _Inside:
    """Which of some spans, none of which lies in another on its thread, a moment is inside."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.starts = [span.start for span in spans]

    def find(self, lane: Lane | None, time: int) -> int | None:
        """The place in the list; on any thread if none is given."""
        for i in range(bisect_right(self.starts, time) - 1, -1, -1):
            span = self.spans[i]
            if span.start <= time < span.end and lane in (None, span.lane):
                return i
            if time - span.start > 10**9:
                return None
        return None
