"""Overlap of communication with computation: communication, overlapped and exposed time of every rank.

Each is a union of intervals (docs/profiling.md); on a GPU as in Holistic Trace Analysis. On a CPU views and allocations
are no computation: else gradients reduced one by one after backward would overlap with the slicing of the next.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cs336_systems.host.table import Table
from cs336_systems.profiling.align import aligned, match
from cs336_systems.profiling.collectives import flights, on_host
from cs336_systems.profiling.intervals import Interval, intersection, length, subtraction, union
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import KERNEL, POSTED, Lane, Span, Trace, grouped, once

# Operators that launch no kernel on a GPU. Those that they call, such as `clone` in `reshape`, are judged by name.
NO_KERNEL = re.compile(
    r"aten::(_?conj|_local_scalar_dense|_reshape_alias|_unsafe_view|_version|alias|as_strided_?|broadcast_to|chunk|"
    r"contiguous|detach_?|diagonal|expand(_as)?|flatten|imag|is_nonzero|item|lift|"
    r"lift_fresh|movedim|narrow|numpy_T|permute|real|requires_grad_|reshape(_as)?|resolve_(conj|neg)|"
    r"result_type|select|set_|slice|(unsafe_)?split|split_with_sizes|(un)?squeeze|swapaxes|t|to|transpose|type_as|"
    r"unbind|unflatten|unfold|unsafe_chunk|view(_as|_as_complex|_as_real)?)$"
)
# Nothing inside them counts either: with deterministic algorithms torch fills what it allocates, to show its misuse.
ALLOCATION = re.compile(r"aten::((new_)?empty(_like|_strided)?|resize_)$")
COLUMNS = (
    "rank: rank text; communication: communication ms or -; overlapped: overlapped ms or -; exposed: exposed ms or -;"
    "overlap: share % or -; waited: waited ms or -; transferred: transferred ms or -; blocked: blocked ms or -"
)


@dataclass(frozen=True)
class Overlap:
    """One rank's communication in nanoseconds, where a moment in several collectives counts once."""

    rank: int
    communication: int
    overlapped: int
    blocked: int | None  # a CPU thread's time inside our `wait ...`; None if the waits are not ours
    posted: bool = False  # the times are upper bounds
    waited: int | None = None  # until the last rank had joined; None without the other ranks' traces
    transferred: int | None = None  # the rest of `communication`

    @property
    def exposed(self) -> int:
        return self.communication - self.overlapped

    @property
    def share(self) -> float | None:
        """overlapped / communication, None if there is none."""
        return self.overlapped / self.communication if self.communication else None


class Activity(NamedTuple):
    """Spans of a rank's communication and of its computation, and the union of the times of each."""

    communication: list[Span]
    compute: list[Span]
    communicating: list[Interval]
    computing: list[Interval]


def _times(spans: Iterable[Span]) -> list[Interval]:
    return union((span.start, span.end) for span in spans)


@once
def activity(trace: Trace) -> Activity:
    """Find a rank's spans of communication and computation, by the definition for its device."""
    streams = (span for span in trace.spans if span.category == "kernel" and span.args.get("stream", -1) != -1)
    kernels = grouped(streams, lambda span: bool(KERNEL.search(span.name)))
    host = on_host(trace)
    if kernels:
        # gloo reduces a GPU's tensors as well, on the CPU's threads.
        communication, compute = kernels.get(True, host), kernels.get(False, [])
    else:
        # In shared memory the thread that waits does the work, and the trace has only the wait; NCCL works on a GPU.
        nccl = any(span.name.startswith("nccl:") for span in trace.annotated)
        communication = host or ([] if nccl else waits_of(trace))
        compute = _operators(trace, {span.lane for span in host})
    return Activity(communication, compute, _times(communication), _times(compute))


def _operators(trace: Trace, apart: set[Lane]) -> list[Span]:
    """The outermost operators that compute, cut where their thread waits or launches."""
    pauses, result = grouped((span for _, span in trace.collectives), lambda span: span.lane), list[Span]()
    for lane, spans in trace.lanes("cpu_op").items():
        done, cuts = 0, _times(pauses.get(lane, ()))
        for span in spans if lane not in apart else ():
            if not span.name.startswith("aten::") or NO_KERNEL.match(span.name) or span.end <= done:
                continue
            start, done = max(span.start, done), span.end
            if not ALLOCATION.match(span.name):
                first, last = bisect_right(cuts, start, key=lambda it: it[1]), bisect_left(cuts, (span.end, 0))
                pieces = subtraction([(start, span.end)], cuts[first:last])
                result += [span._replace(start=begin, end=end) for begin, end in pieces]
    return result


def waits_of(trace: Trace) -> list[Span]:
    """Our annotations of waits, on any thread."""
    return [span for about, span in trace.collectives if about.action == "wait"]


def overlap(trace: Trace, last: Mapping[int, int] | None = None) -> Overlap:
    """One rank's communication, and how much of it was hidden; `last` is what `last_starts` finds."""
    what, waits = activity(trace), waits_of(trace)
    communication, transferred = length(what.communicating), None
    if last is not None:
        transferred = length(union((min(last.get(id(s), s.start), s.end), s.end) for s in what.communication))
    return Overlap(
        rank=trace.rank,
        communication=communication,
        overlapped=length(intersection(what.communicating, what.computing)),
        blocked=length(_times(waits)) if waits or not what.communication else None,
        posted=any(span.name in POSTED for span in what.communication),
        waited=None if transferred is None else communication - transferred,
        transferred=transferred,
    )


def overlaps(traces: Sequence[Trace]) -> list[Overlap]:
    """Overlap of every rank, on aligned clocks. With several ranks the wait for the last one is apart from transfer; an
    unmatched collective is transfer, as is the time in which a rank waits in one while another transfers."""
    traces = sorted(aligned(list(traces)), key=lambda trace: trace.rank)
    last = last_starts(traces) if len(traces) > 1 else None
    return [overlap(trace, last) for trace in traces]


@once
def last_starts(traces: list[Trace]) -> dict[int, int]:
    """The time at which the last rank joined, for every matched span by its identity. A span that was over by then did
    not wait: it is a broadcast's source, or counting has matched it wrongly."""
    last: dict[int, int] = {}
    launched = {id(flight.launch): flight for trace in traces for flight in flights(trace) if flight.launch}
    together = [list(matched.spans.values()) for matched in match(traces)]
    for matched in match(traces):  # in shared memory only the waits are known, for the ranks that have launched
        begin = max(span.start for span in matched.spans.values())
        last |= {id(span): max(span.start, begin) for span in matched.waits.values()}
    posted: dict[int, int] = {}
    for spans in together[:]:
        same = [launched[id(span)] for span in spans if id(span) in launched]
        if any(flight.posted for flight in same):
            begin = max(flight.start for flight in same)
            posted |= {id(span): max(span.start, begin) for flight in same for span in flight.transfers}
        elif len({len(flight.transfers) for flight in same}) == 1:
            together += map(list, zip(*(flight.transfers for flight in same), strict=True))
    for spans in together:
        begin = max(span.start for span in spans)
        last |= {id(span): begin for span in spans if span.end >= begin or id(span) in launched}
    return last | posted


def overlap_table(traces: Sequence[Trace]) -> Table:
    """The overlap of every rank in milliseconds, with the meaning of the columns below."""
    found, steps = overlaps(traces), timeline(traces[0]).step_count
    sums = f"Sums over {steps} steps, in" if steps > 1 else "In"
    notes = [
        f"{sums} ms. communication = overlapped (while the rank computes) + exposed = waited (until the last rank "
        "joined) + transferred; overlap = overlapped / communication; blocked = time of a CPU thread inside our wait."
    ]
    if any(each.posted for each in found):
        notes.append(
            "Sends and receives count from posting to the end of their wait, so communication, overlapped and exposed "
            "are upper bounds; blocked is a lower bound of their cost."
        )
    return Table.of("Overlap of communication with computation, in ms", found, COLUMNS, "\n".join(notes), names=False)
