"""Every collective from its launch to the end of its wait, with the transfers that it consists of.

A backend's own spans do not say which buffer they reduce: gloo's threads show `gloo:all_reduce`, a GPU's stream a
kernel. Our annotation of the launch does. It finds a kernel by its correlation, and a send or receive because that is
posted inside the launch. But a span on gloo's threads has no link to its call of torch.distributed, and every group has
two threads, so spans may begin in another order than their calls. Such a span fits a call that

- asks for the same verb, for tensors of the same shape and, where the call says so, type;
- was made before the span began, and whose wait, if there was one, ended after it;
- is of the same group as the other spans of that thread.

Of several free calls that fit, a span takes the one whose wait ended first: so as many spans as possible have a call.
"""

import re
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cs336_systems.profiling.fields import shapes_of, types_of
from cs336_systems.profiling.intervals import FOREVER
from cs336_systems.profiling.names import COMMUNICATION, Collective
from cs336_systems.profiling.trace import KERNEL, POSTED, Lane, Span, Trace, grouped, once

# torch.profiler counts a processor's ticks and converts them. Its times were seen to be up to 15 us off the clock.
CONVERSION = 15_000  # nanoseconds
Form = tuple[str, str]  # verb and shape
GLOO = re.compile(r"^gloo:")
FORM = re.compile(r"((into)?tensor)?coalesced$|base$")  # endings of verbs that name the form of the arguments


@dataclass(frozen=True)
class Call:
    """A call of torch.distributed."""

    span: Span  # `c10d::...`
    group: str | None = None  # if that is known
    deadline: int | None = None  # when its wait ended, if there was one

    def forms(self) -> Iterator[Form]:
        """Those of all spans that may run it. Without shapes recorded, neither side has any."""
        plain = FORM.sub("", self.span.name.removeprefix("c10d::").replace("_", ""))
        # gloo has no reduce-scatter of its own on the CPU.
        for verb in {plain, "allreduce" if plain == "reducescatter" else plain}:
            for shape in {*(str(shape) for shape, _ in self.tensors()), ""}:
                yield verb, shape

    def tensors(self) -> Iterator[tuple[Any, str]]:
        """The shape and, if known, the data type of every tensor that it was given."""
        types = types_of(self.span.args)
        for i, shape in enumerate(shapes_of(self.span.args)):
            kind = types[i] if i < len(types) else ""
            if kind == "TensorList" or (shape and isinstance(shape[0], list)):
                yield from ((each, "") for each in shape)
            elif shape or kind not in ("", "Scalar", "ScalarList"):
                yield shape, kind

    @property
    def over(self) -> int:
        """The latest end of the span that ran it."""
        return FOREVER if self.deadline is None else self.deadline + CONVERSION

    @cached_property
    def kind(self) -> tuple[str | None, frozenset[str]]:
        """Its group, and the data types of its tensors, with "" for one that is not known."""
        return self.group, frozenset(kind for _, kind in self.tensors())


def run_by(calls: Sequence[Call], spans: Sequence[Span]) -> dict[int, int]:
    """Index of the call that each span of gloo's threads ran, by identity. Both are in order of start."""
    groups = _groups_of_threads(calls, spans)
    # By form, and by group and types: (latest end, index) of the calls made so far that no span has, in order.
    free = defaultdict[Form, dict[Any, list[tuple[int, int]]]](dict)
    runs = dict[int, int]()
    for span, since in _with_calls(calls, spans):
        for index in since:
            for form in calls[index].forms():
                insort(free[form].setdefault(calls[index].kind, []), (calls[index].over, index))
        group, data = groups.get(span.lane), next(iter(types_of(span.args)), None)
        fit = list[tuple[int, int]]()
        for (its_group, types), waiting in free[_form(span)].items():
            typed = data is None or not types or bool(types & {"", data})
            if typed and (group is None or its_group in (None, group)):
                fit += waiting[(first := bisect_left(waiting, (span.end,))) : first + 1]
        if fit:
            _, index = found = min(fit)
            runs[id(span)] = index
            for form in calls[index].forms():
                waiting = free[form][calls[index].kind]
                del waiting[bisect_left(waiting, found)]
    return runs


def _with_calls(calls: Sequence[Call], spans: Sequence[Span]) -> Iterator[tuple[Span, range]]:
    """Each span with the indices of the calls that were made since the span before it."""
    made = 0
    for span in spans:
        first = made
        while made < len(calls) and calls[made].span.start <= span.start:
            made += 1
        yield span, range(first, made)


def _form(span: Span) -> Form:
    shapes = shapes_of(span.args)
    return span.name.removeprefix("gloo:").replace("_", ""), str(shapes[0]) if shapes else ""


def _groups_of_threads(calls: Sequence[Call], spans: Sequence[Span]) -> dict[Lane, str]:
    """The group of each of gloo's threads: the only one that had asked for what it ran."""
    asked, found = defaultdict[Form, set[str | None]](set), defaultdict[Lane, set[str]](set)
    for span, since in _with_calls(calls, spans):
        for index in since:
            for form in calls[index].forms():
                asked[form].add(calls[index].group)
        match [*asked[_form(span)]]:
            case [str(only)]:
                found[span.lane].add(only)
    return {lane: names.pop() for lane, names in found.items() if len(names) == 1}


@dataclass(frozen=True)
class Flight:
    """One collective of one rank. A transfer that belongs to no annotation is a collective without a launch."""

    verb: str
    number: str  # in its group, `0#47`
    label: str
    launch: Span | None
    wait: Span | None  # None if there was no wait while the profiler ran
    transfers: tuple[Span, ...]  # in order of start: gloo's execution, NCCL's kernels, or what was posted

    @property
    def posted(self) -> bool:
        """True if its end is known only from the wait."""
        return any(span.name in POSTED for span in self.transfers)

    @property
    def start(self) -> int:
        return self.launch.start if self.launch else self.transfers[0].start

    @property
    def end(self) -> int:
        return max(span.end for span in (self.launch, self.wait, *self.transfers) if span is not None)


@once
def transfers(trace: Trace) -> list[Span]:
    """A backend's own spans: gloo's on its threads, NCCL's kernels, or what the profiler draws over those."""
    kernels = [span for span in trace.spans if span.category == "kernel" and KERNEL.search(span.name)]
    over = [span for span in trace.spans if span.category == "gpu_user_annotation" and span.name.startswith("nccl:")]
    return sorted([*(kernels or over), *on_host(trace)], key=lambda span: span.start)


def on_host(trace: Trace) -> list[Span]:
    """A backend's spans on the CPU's threads. NCCL's are none: they say only when a kernel was enqueued."""
    return [s for s in trace.annotated if COMMUNICATION.match(s.name) and not s.name.startswith("nccl:")]


@once
def flights(trace: Trace) -> list[Flight]:
    """A rank's collectives in order of launch. Without our annotations nothing has a label."""
    launches = [(about, span) for about, span in trace.collectives if about.action == "launch"]
    # A wait may be interrupted; the last counts.
    waits = {about.key: span for about, span in trace.collectives if about.action == "wait"}
    owners = _owners(trace, launches, waits)
    owned = grouped(transfers(trace), lambda span: owners.get(id(span)))
    result = [Flight(_verb(span), "", "", None, None, (span,)) for span in owned.get(None, [])]
    for i, (about, span) in enumerate(launches):
        number, mine = f"{about.group}#{about.number}", tuple(owned.get(i, []))
        result.append(Flight(about.verb, number, about.label, span, waits.get(about.key), mine))
    return sorted(result, key=lambda flight: flight.start)


def _verb(span: Span) -> str:
    """all-reduce for gloo:all_reduce and for ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)."""
    if COMMUNICATION.match(span.name):
        return span.name.split(":", 1)[1].replace("_", "-")
    found = re.search(r"Kernel_([A-Za-z]+)", span.name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", found[1]).lower() if found else "collective"


def _owners(trace: Trace, launches: Sequence[tuple[Collective, Span]], waits: dict[str, Span]) -> dict[int, int | None]:
    """Index of the launch that made each transfer, by identity."""
    lanes = grouped(range(len(launches)), lambda i: launches[i][1].lane)  # launches of one thread do not nest

    def launch_at(time: int, lane: Lane | None = None) -> int | None:
        """The launch that is under way at a moment; on any thread if none is given."""
        for indices in lanes.values() if lane is None else [lanes.get(lane, [])]:
            before = bisect_right(indices, time, key=lambda i: launches[i][1].start)
            if before and time < launches[indices[before - 1]][1].end:
                return indices[before - 1]
        return None

    owners: dict[int, int | None] = {}
    calls: list[Call] = []
    makers: list[int | None] = []
    for span in trace.spans:
        if span.category == "kernel" and (call := trace.calls.get(span.args.get("correlation"))):
            owners[id(span)] = launch_at(call.start, call.lane)
        elif span.name.startswith("c10d::"):
            makers.append(maker := launch_at(span.start, span.lane))
            about = launches[maker][0] if maker is not None else None
            wait = waits.get(about.key) if about else None
            calls.append(Call(span, about.group if about else None, wait.end if wait else None))
        elif span.name in POSTED:
            owners[id(span)] = launch_at(span.start)  # its thread is no longer known
    queued = [span for span in trace.annotated if GLOO.search(span.name) and span.name not in POSTED]
    return owners | {identity: makers[index] for identity, index in run_by(calls, queued).items()}
