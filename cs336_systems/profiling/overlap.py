"""How much communication hides behind computation: communication, overlapped and exposed time of every rank.

On a GPU the definition is Holistic Trace Analysis's (`get_comm_comp_overlap`): communication is NCCL's kernels,
computation all others (copies are neither), and the share is |communication ∩ computation| / |communication|, each as
a union over streams. On a CPU gloo's spans take the place of NCCL's kernels, and operators that would launch a kernel
that of computation. Neither an operator of gloo's own threads counts, nor what a thread does inside `wait ...` or
`launch ...`, nor a view or an allocation: with those, gradients that are reduced one by one after backward would seem
to overlap with the slicing of the next.

gloo does not record when a send or receive was done, only when it was posted and when somebody had waited for it.
Where there are such, communication, overlapped and exposed are upper bounds; `blocked` is what it cost at least.
Two processes on one core take turns: then overlapped does not mean free.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cs336_systems.profiling.align import aligned
from cs336_systems.profiling.flights import flights
from cs336_systems.profiling.intervals import Interval, intersection, length, subtraction, union
from cs336_systems.profiling.matching import match
from cs336_systems.profiling.names import parse_collective, step_number
from cs336_systems.profiling.sheet import Sheet
from cs336_systems.profiling.trace import COMMUNICATION, KERNEL, POSTED, Lane, Span, Trace, once

# Operators that launch no kernel on a GPU. What they call, as `reshape` may `clone`, is judged by its own name.
NO_KERNEL = re.compile(
    r"aten::(_?conj|_local_scalar_dense|_reshape_alias|_unsafe_view|_version|alias|as_strided_?|broadcast_to|chunk|"
    r"contiguous|detach_?|diagonal|expand(_as)?|flatten|imag|is_nonzero|item|lift|"
    r"lift_fresh|movedim|narrow|numpy_T|permute|real|requires_grad_|reshape(_as)?|resolve_(conj|neg)|"
    r"result_type|select|set_|slice|(unsafe_)?split|split_with_sizes|(un)?squeeze|swapaxes|t|to|transpose|type_as|"
    r"unbind|unflatten|unfold|unsafe_chunk|view(_as|_as_complex|_as_real)?)$"
)
# Nothing inside them counts either: with deterministic algorithms torch fills what it allocates, to show its misuse.
ALLOCATION = re.compile(r"aten::((new_)?empty(_like|_strided)?|resize_)$")


@dataclass(frozen=True)
class Overlap:
    """One rank's communication in nanoseconds, each moment once however many collectives it is part of.

    `blocked` is what a CPU thread spent inside our `wait ...`, None where the waits are not ours. With the other ranks'
    traces communication is parted into `waited`, until the last rank had joined, and `transferred`; both are None
    without. `posted` says that the times are upper bounds.
    """

    rank: int
    communication: int
    overlapped: int
    blocked: int | None
    posted: bool = False
    waited: int | None = None
    transferred: int | None = None

    @property
    def exposed(self) -> int:
        """Communication during which nothing was computed."""
        return self.communication - self.overlapped

    @property
    def share(self) -> float | None:
        """overlapped / communication, None if there is none."""
        return self.overlapped / self.communication if self.communication else None


@dataclass(frozen=True)
class Activity:
    """The spans in which a rank communicated and those in which it computed. Both may overlap among themselves."""

    communication: list[Span]
    compute: list[Span]

    @cached_property
    def communicating(self) -> list[Interval]:
        """When it communicated."""
        return union(_times(self.communication))

    @cached_property
    def computing(self) -> list[Interval]:
        """When it computed."""
        return union(_times(self.compute))


def _times(spans: Sequence[Span]) -> list[Interval]:
    return [(span.start, span.end) for span in spans]


@once
def activity(trace: Trace) -> Activity:
    """What a trace says of communication and computation, by the definition of its device."""
    kernels = [span for span in trace.spans if span.category == "kernel" and span.args.get("stream", -1) != -1]
    host = [span for span in trace.spans if COMMUNICATION.match(span.name) and span.category == "user_annotation"]
    if not kernels:
        return Activity(host, _operators(trace, {span.lane for span in host}))
    nccl = [span for span in kernels if KERNEL.search(span.name)]
    # gloo reduces a GPU's tensors as well, on the CPU's threads.
    gloo = [] if nccl else [span for span in host if span.name.startswith("gloo:")]
    return Activity(nccl or gloo, [span for span in kernels if not KERNEL.search(span.name)])


def _operators(trace: Trace, apart: set[Lane]) -> list[Span]:
    """The outermost operators that compute, cut where their thread waits or launches."""
    waits = {lane: union(_times(spans)) for lane, spans in _annotations(trace).items()}
    result: list[Span] = []
    for lane, spans in trace.lanes(["cpu_op"]).items():
        done = 0
        for span in spans if lane not in apart else ():
            if not span.name.startswith("aten::") or NO_KERNEL.match(span.name) or span.end <= done:
                continue
            if not ALLOCATION.match(span.name):
                result += _cut(replace(span, start=max(span.start, done)), waits.get(lane, []))
            done = span.end
    return result


def _annotations(trace: Trace, *what: str) -> dict[Lane, list[Span]]:
    """Our annotations of collectives by lane, those of launches and waits or of one of them."""
    lanes = trace.lanes(["user_annotation"]).items()
    return {lane: [span for span in spans if _is_about(span, what or ("launch", "wait"))] for lane, spans in lanes}


def waits_of(trace: Trace) -> list[Span]:
    """Our annotations of waits, on whatever thread."""
    return [span for spans in _annotations(trace, "wait").values() for span in spans]


def _is_about(span: Span, what: tuple[str, ...]) -> bool:
    found = parse_collective(span.name)
    return found is not None and found.what in what


def _cut(span: Span, waits: list[Interval]) -> list[Span]:
    first, last = bisect_right(waits, span.start, key=lambda it: it[1]), bisect_left(waits, (span.end, 0))
    pieces = subtraction([(span.start, span.end)], waits[first:last])
    return [replace(span, start=start, end=end) for start, end in pieces]


def overlap(trace: Trace) -> Overlap:
    """One rank's communication, and how much of it was hidden."""
    what, waits = activity(trace), waits_of(trace)
    return Overlap(
        rank=trace.rank,
        communication=length(what.communicating),
        overlapped=length(intersection(what.communicating, what.computing)),
        blocked=length(union(_times(waits))) if waits or not what.communication else None,
        posted=any(span.name in POSTED for span in what.communication),
    )


def overlaps(traces: Sequence[Trace]) -> list[Overlap]:
    """Every rank's, by rank, with time waited for the last rank apart from time transferred if there are several.

    A collective's wait lasts from a rank's own start to the last rank's, on aligned clocks; what then follows is the
    transfer. While one collective transfers, a rank that waits in another does not count as waiting. What has no
    partner in the other traces counts as transferred.
    """
    traces = sorted(aligned(list(traces)), key=lambda trace: trace.rank)
    if len(traces) == 1:
        return [overlap(traces[0])]
    last = last_starts(traces)
    result = []
    for trace in traces:
        what = activity(trace)
        begun = [(min(last.get(id(span), span.start), span.end), span.end) for span in what.communication]
        transferred = length(union(begun))
        waited = length(what.communicating) - transferred
        result.append(replace(overlap(trace), waited=waited, transferred=transferred))
    return result


def last_starts(traces: Sequence[Trace]) -> dict[int, int]:
    """When the last rank joined, for every matched span by its identity.

    Transfers of collectives that we annotated go by what the annotation says, all others by counting (`matching.py`).
    What was posted begins where the last rank launched it.
    """
    last: dict[int, int] = {}
    launched = {id(flight.launch): flight for trace in traces for flight in flights(trace) if flight.launch}
    matches = match(traces)
    for matched in matches:
        _note(matched.spans.values(), last)
    for matched in matches:
        same = [launched[id(span)] for span in matched.spans.values() if id(span) in launched]
        if any(flight.posted for flight in same):
            begin = max(flight.start for flight in same)
            last |= {id(span): max(span.start, begin) for flight in same for span in flight.transfers}
        elif len({len(flight.transfers) for flight in same}) == 1:
            for spans in zip(*(flight.transfers for flight in same), strict=True):
                _note(spans, last)
    return last


def _note(spans: Iterable[Span], last: dict[int, int]) -> None:
    spans = list(spans)
    begin = max(span.start for span in spans)
    last |= {id(span): begin for span in spans}


HEADINGS = ("rank", "communication", "overlapped", "exposed", "overlap", "waited", "transferred", "blocked")


def _rows(found: Sequence[Overlap]) -> list[list[str]]:
    """Cells in milliseconds."""
    rows = []
    for each in found:
        times = [each.communication, each.overlapped, each.exposed, each.waited, each.transferred, each.blocked]
        cells = ["-" if time is None else f"{time / 1e6:.3f}" for time in times]
        cells.insert(3, "-" if each.share is None else f"{100 * each.share:.1f} %")
        rows.append([str(each.rank), *cells])
    return rows


def _notes(found: Sequence[Overlap], steps: int) -> list[str]:
    sums = f"Sums over {steps} steps, in" if steps > 1 else "In"
    notes = [
        f"{sums} ms. overlap = overlapped / communication; waited = for the last rank to join; blocked = a CPU thread "
        "stood still in our wait."
    ]
    if any(each.posted for each in found):
        notes.append(
            "Sends and receives count from posting until they had been waited for, so communication, overlapped and "
            "exposed are at most this; blocked is what they cost at least."
        )
    return notes


def overlap_sheet(traces: Sequence[Trace]) -> Sheet:
    """The overlap of every rank in milliseconds, with what the columns mean below."""
    found, steps = overlaps(traces), sum(step_number(span.name) is not None for span in traces[0].spans)
    return Sheet("Communication behind computation, in ms", HEADINGS, _rows(found), "\n".join(_notes(found, steps)))
