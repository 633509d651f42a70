"""Every collective from its launch to the end of its wait, with the transfers that it consists of.

A backend's own spans do not say what they reduce: gloo's threads show `gloo:all_reduce`, a GPU's stream a kernel. Our
annotation of the launch does, and it is followed from there: a kernel by its correlation, a send or receive because it
was posted inside the launch, and what gloo queued by `queues.py`.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.profiling.names import Collective, parse_collective
from cs336_systems.profiling.queues import Call, run_by
from cs336_systems.profiling.trace import COMMUNICATION, KERNEL, POSTED, Lane, Span, Trace, once


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


@once
def flights(trace: Trace) -> list[Flight]:
    """A rank's collectives in order of launch. Works without our annotations as well: then nothing has a label."""
    waits: dict[tuple[str, str], Span] = {}
    launches: list[tuple[Collective, Span]] = []
    for span in trace.spans:
        if span.category == "user_annotation" and (found := parse_collective(span.name)):
            if found.what == "wait":
                waits[found.group, found.key] = span  # may be interrupted; the last counts
            else:
                launches.append((found, span))
    launched = [(what, span, waits.get((what.group, what.key))) for what, span in launches]
    owned, free = _owned(trace, launched)
    result = []
    for i, (what, span, wait) in enumerate(launched):
        mine = sorted(owned.get(i, []), key=lambda each: each.start)
        result.append(Flight(what.verb, f"{what.group}#{what.number}", what.label, span, wait, tuple(mine)))
    result += [Flight(_verb(span), "", "", None, None, (span,)) for span in free]
    return sorted(result, key=lambda flight: flight.start)


def _verb(span: Span) -> str:
    """all-reduce for gloo:all_reduce and for ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)."""
    if COMMUNICATION.match(span.name):
        return span.name.split(":", 1)[1].replace("_", "-")
    found = re.search(r"Kernel_([A-Za-z]+)", span.name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", found[1]).lower() if found else "collective"


def _owned(
    trace: Trace, launched: Sequence[tuple[Collective, Span, Span | None]]
) -> tuple[dict[int, list[Span]], list[Span]]:
    """The transfers of each launch, by its place in the list, and those of none."""
    inside = _Inside([span for _, span, _ in launched])
    transfers = [span for span in trace.spans if _is_transfer(span)]
    owners = _of_kernels(trace, inside) | _of_queues(trace, launched, inside, transfers)
    owned: dict[int, list[Span]] = {}
    free: list[Span] = []
    for span in transfers:
        # What was posted was moved off its thread, so that this is unknown.
        owner = inside.find(None, span.start) if span.name in POSTED else owners.get(id(span))
        (free if owner is None else owned.setdefault(owner, [])).append(span)
    return owned, free


def _is_transfer(span: Span) -> bool:
    if span.category == "kernel":
        return bool(KERNEL.search(span.name))
    return span.category == "user_annotation" and span.name.startswith("gloo:")


def _of_kernels(trace: Trace, inside: "_Inside") -> dict[int, int | None]:
    """The launch of every kernel, by identity."""
    kernels = {span.args.get("correlation"): span for span in trace.spans if span.category == "kernel"}
    return {
        id(kernels[span.args["correlation"]]): inside.find(span.lane, span.start)
        for span in trace.spans
        if span.category in ("cuda_runtime", "cuda_driver") and span.args.get("correlation") in kernels
    }


def _of_queues(
    trace: Trace,
    launched: Sequence[tuple[Collective, Span, Span | None]],
    inside: "_Inside",
    transfers: Sequence[Span],
) -> dict[int, int | None]:
    """The launch of every span of gloo's threads, by identity."""
    calls: list[Call] = []
    owners: list[int | None] = []
    for span in trace.spans:
        if span.name.startswith("c10d::"):
            owner = inside.find(span.lane, span.start)
            what, _, wait = launched[owner] if owner is not None else (None, None, None)
            calls.append(Call(span, what.group if what else None, wait.end if wait else None))
            owners.append(owner)
    queued = [span for span in transfers if span.category != "kernel" and span.name not in POSTED]
    return {identity: owners[place] for identity, place in run_by(calls, queued).items()}


class _Inside:
    """Which of some spans, none of which lies in another on its thread, a moment is inside."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.places: dict[Lane, list[int]] = {}
        for i, span in enumerate(spans):
            self.places.setdefault(span.lane, []).append(i)

    def find(self, lane: Lane | None, time: int) -> int | None:
        """The place in the list; on any thread if none is given."""
        for each in self.places if lane is None else (lane,):
            places = self.places.get(each, [])
            before = bisect_right(places, time, key=lambda i: self.spans[i].start)
            if before and time < self.spans[places[before - 1]].end:
                return places[before - 1]
        return None
