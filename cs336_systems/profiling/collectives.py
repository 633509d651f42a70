"""Every collective from its launch to the end of its wait, with the transfers that it consists of.

Only our annotation of the launch says which buffer is reduced. It finds a kernel by its correlation, and a send or
receive because that is posted inside the launch. But a span on gloo's threads has no link to its call of
torch.distributed, and every group has two threads, so spans may begin in another order than their calls. Such a span
fits a call for the same verb, shape and (where it says so) type that was made before the span began, whose wait, if
any, ended after it, and that is of the same group as the other spans of that thread. It takes the first free one. If
none is free, earlier spans move to others, so that as many as possible have a call (augmenting paths, Berge).
"""

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

from cs336_systems.profiling.fields import shapes_of, types_of
from cs336_systems.profiling.intervals import FOREVER
from cs336_systems.profiling.names import COMMUNICATION, ON_HOST, Collective
from cs336_systems.profiling.trace import KERNEL, POSTED, Lane, Span, Trace, grouped, once

# torch.profiler counts a processor's ticks and converts them. Its times were seen to be up to 15 us off the clock.
CONVERSION = 15_000  # nanoseconds
Kind = tuple[str, str, str | None, str | None]  # of a span: verb, shape, its thread's group and its data type, if known
GLOO = re.compile(r"^gloo:")
FORM = re.compile(r"((into)?tensor)?coalesced$|base$")  # endings of verbs that name the form of the arguments


@dataclass(frozen=True)
class Call:
    """A call of torch.distributed."""

    span: Span  # `c10d::...`
    group: str | None = None  # if that is known
    deadline: int | None = None  # when its wait ended, if there was one

    def forms(self) -> Iterator[tuple[str, str]]:
        """(verb, shape) of all spans that may run it. Without shapes recorded, neither side has any."""
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

    def suits(self, group: str | None, kind: str | None) -> bool:
        """True if a span of this data type, on a thread of this group, may have run it, as far as these are known."""
        known = {each for _, each in self.tensors()}
        typed = kind is None or not known or bool(known & {"", kind})
        return typed and (group is None or self.group in (None, group))


def run_by(calls: Sequence[Call], spans: Sequence[Span]) -> dict[int, int]:
    """Index of the call that each span of gloo's threads ran, by identity. Both are in order of start."""
    forms: dict[tuple[str, str], list[int]] = {}
    for index, call in enumerate(calls):
        for form in call.forms():
            forms.setdefault(form, []).append(index)
    kinds = _kinds(spans, {form: [calls[i] for i in indices] for form, indices in forms.items()})
    # By kind of span: the calls that fit it, and those of them that no span has; in order.
    suited = {kind: [i for i in forms.get(kind[:2], []) if calls[i].suits(*kind[2:])] for kind in set(kinds.values())}
    free = {kind: indices[:] for kind, indices in suited.items()}
    kinds_of = grouped(((index, kind) for kind in free for index in free[kind]), itemgetter(0))
    over = [FOREVER if call.deadline is None else call.deadline + CONVERSION for call in calls]
    latest = list(accumulate(over, max))  # in order, so that a span skips calls that ended long before
    runs: dict[int, Span] = {}  # by call

    def fitting(span: Span, those: dict[Kind, list[int]]) -> Iterator[int]:
        known = those[kinds[id(span)]]
        first = bisect_left(known, span.end, key=latest.__getitem__)
        last = bisect_right(known, span.start, key=lambda index: calls[index].span.start)
        return (known[k] for k in range(first, last) if over[known[k]] >= span.end)

    def drop(index: int, those: dict[Kind, list[int]]) -> None:
        for _, kind in kinds_of[index]:
            del those[kind][bisect_left(those[kind], index)]

    for span in spans:
        wanted: dict[int, tuple[Span, int | None]] = {}  # by call, the span that would take it, and the call it leaves
        movers: deque[tuple[Span, int | None]] = deque([(span, None)])
        while movers:
            mover, leaves = movers.popleft()
            if (found := next(fitting(mover, free), None)) is not None:
                wanted[found] = mover, leaves
                drop(found, free)
                while found is not None:
                    runs[found], found = wanted[found]
                break
            fit = [index for index in fitting(mover, suited) if index not in wanted]
            wanted |= dict.fromkeys(fit, (mover, leaves))
            movers.extend((runs[index], index) for index in reversed(fit))
        else:
            for index in wanted:
                drop(index, suited)  # for good: no later span can use it either
    return {id(span): index for index, span in runs.items()}


def _kinds(spans: Sequence[Span], asking: Mapping[tuple[str, str], Sequence[Call]]) -> dict[int, Kind]:
    """The kind of each span, by identity, given the calls that ask for a verb and shape. A thread belongs to the
    only group that had asked for what it ran."""
    mixed = {  # when a second group first asks for the same
        form: next((call.span.start for call in calls if call.group != calls[0].group), FOREVER)
        for form, calls in asking.items()
    }
    forms, groups = dict[int, tuple[str, str]](), dict[Lane, set[str | None]]()
    for span in spans:
        shape = str(next(iter(shapes_of(span.args)), ""))
        forms[id(span)] = form = span.name.removeprefix("gloo:").replace("_", ""), shape
        if form in asking and asking[form][0].span.start <= span.start < mixed[form]:
            groups.setdefault(span.lane, set()).add(asking[form][0].group)
    for names in groups.values():
        names.discard(None)
    group_of = {lane: next(iter(names)) for lane, names in groups.items() if len(names) == 1}
    return {
        id(span): (*forms[id(span)], group_of.get(span.lane), next(iter(types_of(span.args)), None)) for span in spans
    }


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
    """A backend's spans on the CPU's threads."""
    return [span for span in trace.annotated if ON_HOST.match(span.name)]


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
