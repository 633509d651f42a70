"""Every collective from its launch to the end of its wait, with the transfers that it consists of.

A backend's own spans do not say what they reduce: gloo's threads show `gloo:all_reduce`, a GPU's stream a kernel. Our
annotation of the launch does, and leads to them: to a kernel by its correlation, to a send or receive because it was
posted inside the launch. Nothing joins what gloo queued to its call of torch.distributed, and every group has two
threads, so spans may begin in another order than their calls. A span of gloo's fits a call that

- asks for the same verb, for tensors of the same shape and, where the call says so, type;
- was made before the span began, and whose wait, if there was one, ended after it;
- is of the same group as what else ran on that thread.

Of several that fit, a span takes the first free one. Where none is free, earlier spans move to other calls that fit
them, so that as many as possible have one (augmenting paths, Berge).
"""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.profiling.fields import shapes_of, types_of
from cs336_systems.profiling.names import COMMUNICATION, Collective, parse_collective
from cs336_systems.profiling.trace import KERNEL, POSTED, Lane, Span, Trace, grouped, once

# torch.profiler counts a processor's ticks and converts them. Its times were seen to miss the clock by up to 15 us.
CONVERSION = 15_000  # nanoseconds
GLOO = re.compile(r"^gloo:")
FORM = re.compile(r"((into)?tensor)?coalesced$|base$")  # endings of verbs that name the form of the arguments


@dataclass(frozen=True)
class Call:
    """A call of torch.distributed."""

    span: Span  # `c10d::...`
    group: str | None = None  # if that is known
    deadline: int | None = None  # when its wait was over, if anybody waited

    def forms(self) -> Iterator[tuple[str, str]]:
        """(verb, shape) of all spans that may run it. Without shapes recorded, neither side has any."""
        plain = FORM.sub("", self.span.name.removeprefix("c10d::").replace("_", ""))
        # gloo has no reduce-scatter of its own for what it reduces on the CPU.
        for verb in {plain, "allreduce" if plain == "reducescatter" else plain}:
            for shape in {*(str(shape) for shape, _ in self.tensors()), ""}:
                yield verb, shape

    def tensors(self) -> Iterator[tuple[Any, str]]:
        """The shape and, as far as it is known, the type of every tensor that it was given."""
        types = types_of(self.span.args)
        for i, shape in enumerate(shapes_of(self.span.args)):
            kind = types[i] if i < len(types) else ""
            if kind == "TensorList" or (shape and isinstance(shape[0], list)):
                yield from ((each, "") for each in shape)
            elif shape or kind not in ("", "Scalar", "ScalarList"):
                yield shape, kind

    def fits(self, span: Span, group: str | None) -> bool:
        """True if a span of the same key, on a thread of a group, may have run it."""
        over = self.deadline is not None and self.deadline + CONVERSION < span.end
        if self.span.start > span.start or over or (group is not None and self.group not in (None, group)):
            return False
        known, types = {kind for _, kind in self.tensors()}, types_of(span.args)
        return not types or "" in known or not known or types[0] in known


def run_by(calls: Sequence[Call], spans: Sequence[Span]) -> dict[int, int]:
    """For spans of gloo's threads, by identity, the index of the call that each ran. Both are in order of start."""
    by_key: dict[tuple[str, str], list[int]] = {}
    for index, call in enumerate(calls):
        for key in call.forms():
            by_key.setdefault(key, []).append(index)

    def same(span: Span) -> list[int]:
        shapes = shapes_of(span.args)
        verb = span.name.removeprefix("gloo:").replace("_", "")
        return by_key.get((verb, str(shapes[0]) if shapes else ""), [])

    asked: dict[Lane, set[str | None]] = {}  # the groups for which threads must have run what only one had asked for
    for span in spans:
        groups = {calls[i].group for i in same(span) if calls[i].span.start <= span.start}
        if len(groups) == 1:
            asked.setdefault(span.lane, set()).update(groups - {None})
    group_of = {lane: next(iter(groups)) for lane, groups in asked.items() if len(groups) == 1}
    runs: dict[int, Span] = {}  # by call
    for span in spans:
        wanted: dict[int, tuple[Span, int | None]] = {}  # by call, the span that would take it, and the call it leaves
        movers: deque[tuple[Span, int | None]] = deque([(span, None)])
        while movers:
            mover, leaves = movers.popleft()
            fit = [i for i in same(mover) if i not in wanted and calls[i].fits(mover, group_of.get(mover.lane))]
            free = next((index for index in fit if index not in runs), None)
            wanted |= dict.fromkeys(fit if free is None else [free], (mover, leaves))
            if free is not None:
                while free is not None:
                    runs[free], free = wanted[free]
                break
            movers.extend((runs[index], index) for index in reversed(fit))
    return {id(span): index for index, span in runs.items()}


@dataclass(frozen=True)
class Flight:
    """One collective of one rank. A transfer that no annotation accounts for is one of its own without a launch."""

    verb: str
    number: str  # in its group, `0#47`
    label: str
    launch: Span | None
    wait: Span | None  # None if nobody waited while the profiler ran
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
def flights(trace: Trace) -> list[Flight]:
    """A rank's collectives in order of launch. Without our annotations nothing has a label."""
    ours = [(found, span) for span in trace.annotated if (found := parse_collective(span.name))]
    launches = [(about, span) for about, span in ours if about.action == "launch"]
    waits = {about.key: span for about, span in ours if about.action == "wait"}  # may be interrupted; the last counts
    owners = _owners(trace, launches, waits)
    named = {"kernel": KERNEL, "user_annotation": GLOO}
    transfers = (span for span in trace.spans if span.category in named and named[span.category].search(span.name))
    owned = grouped(transfers, lambda span: owners.get(id(span)))
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
    """For every transfer, by identity, the index of the launch that made it."""
    lanes = grouped(range(len(launches)), lambda i: launches[i][1].lane)  # launches of one thread do not nest

    def launch_at(time: int, lane: Lane | None = None) -> int | None:
        """The launch inside which a moment lies; on any thread if none is given."""
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
            owners[id(span)] = launch_at(span.start)  # its own thread is not known any more
    queued = [span for span in trace.annotated if GLOO.search(span.name) and span.name not in POSTED]
    return owners | {identity: makers[index] for identity, index in run_by(calls, queued).items()}
