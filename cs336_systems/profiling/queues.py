"""Which call of torch.distributed each span on gloo's threads ran.

Nothing in a trace joins the two. Every group has a queue and two threads of its own, so spans of several groups, and
even of one, may begin in another order than their calls. A span belongs to the first call in waiting that

- asks for the same verb, for tensors of the same shape and, where the call says so, type;
- was made before the span began, and whose wait, if there was one, ended after it;
- is of the same group as what else ran on that thread.

What is alike in all this, and in flight at once, is taken to run in the order of the calls. Where that leaves a span
without a call, earlier ones are assigned anew if it makes room: as many as possible have one (augmenting paths, Berge).
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from cs336_systems.profiling.trace import Lane, Span

CLOCK = 15_000  # nanoseconds by which torch.profiler's times were seen to be wrong
NO_TENSORS = ("", "Scalar", "ScalarList")  # types of arguments that bring no tensor
# gloo has no reduce-scatter of its own for what it reduces on the CPU.
RUN_AS = {"reducescatter": "allreduce"}
FORM = re.compile(r"((into)?tensor)?coalesced$|base$")  # of the arguments


@dataclass(frozen=True)
class Call:
    """A call of torch.distributed: a span `c10d::...`, its group if that is known, and when its wait was over, if
    anybody waited; nanoseconds."""

    span: Span
    group: str | None = None
    deadline: int | None = None


def run_by(calls: Sequence[Call], spans: Sequence[Span]) -> dict[int, int]:
    """For spans of gloo's threads, by identity, the place of the call that each ran. Both are in order of start."""
    matching = _Matching(calls, spans)
    for span in spans:
        matching.assign(span)
    return {id(span): place for place, span in matching.runs.items()}


class _Matching:
    """Calls in waiting, by what their spans will say, and the span that ran each of the others."""

    def __init__(self, calls: Sequence[Call], spans: Sequence[Span]) -> None:
        self.calls = calls
        self.waiting: dict[tuple[str, str], deque[int]] = {}
        self.runs: dict[int, Span] = {}
        self.taken: dict[tuple[str, str], dict[int, None]] = {}  # the calls that have a span, a set with an order
        self.missed: dict[tuple[str, str], list[int]] = {}  # calls without one whose wait is over
        for place, call in enumerate(calls):
            for key in _keys(call.span):
                self.waiting.setdefault(key, deque()).append(place)
        self.groups = _groups_of_threads(calls, spans, self.waiting)

    def assign(self, span: Span) -> None:
        """Find the call that a span ran, if there is one; spans come in order of start."""
        queue = self.waiting.get(_key(span), deque())
        while queue and (queue[0] in self.runs or _is_over(self.calls[queue[0]], span.start)):
            place = queue.popleft()
            if place not in self.runs:
                self.missed.setdefault(_key(span), []).append(place)
        free = [place for place in takewhile(lambda place: self._asked(place, span), queue) if place not in self.runs]
        found = next((place for place in free if self._fits(place, span)), None)
        if found is None:
            missed = [place for place in self.missed.get(_key(span), []) if place not in self.runs]
            found = self._make_room(span, missed + free)
        if found is not None:
            self.runs[found] = span
            self.taken.setdefault(_key(span), {})[found] = None

    def _asked(self, place: int, span: Span) -> bool:
        return self.calls[place].span.start <= span.start

    def _fits(self, place: int, span: Span) -> bool:
        call, group = self.calls[place], self.groups.get(span.lane)
        of_group = group is None or call.group in (None, group)
        return self._asked(place, span) and of_group and not _is_over(call, span.end) and _has_type(call, span)

    def _make_room(self, span: Span, free: Sequence[int]) -> int | None:
        """A call for the span that another had, which has moved to a call that fits it as well, after a third has moved
        and so on; the last of them takes a free one. None if there is no such chain."""
        taken = self.taken.get(_key(span), {}) if free else {}
        movers: deque[tuple[Span, int | None]] = deque([(span, None)])  # each with the call that it would leave
        wanted: dict[int, tuple[Span, int | None]] = {}  # by call, the mover that would take it
        while movers:
            mover, leaves = movers.popleft()
            for place in [each for each in reversed(taken) if each not in wanted and self._fits(each, mover)]:
                wanted[place] = mover, leaves
                holder = self.runs[place]
                if (other := next((each for each in free if self._fits(each, holder)), None)) is None:
                    movers.append((holder, place))
                    continue
                self.runs[other], taken[other] = holder, None
                mover, leaves = wanted[place]
                while leaves is not None:
                    self.runs[place], place = mover, leaves
                    mover, leaves = wanted[place]
                return place
        return None


def _is_over(call: Call, time: int) -> bool:
    return call.deadline is not None and call.deadline + CLOCK < time


def _groups_of_threads(
    calls: Sequence[Call], spans: Iterable[Span], waiting: dict[tuple[str, str], deque[int]]
) -> dict[Lane, str]:
    """The group of every thread that ran something which only one group had asked for."""
    first: dict[tuple[str, str], dict[str | None, int]] = {}
    for key, places in waiting.items():
        for place in places:
            first.setdefault(key, {}).setdefault(calls[place].group, calls[place].span.start)
    found: dict[Lane, set[str]] = {}
    for span in spans:
        asked = {group for group, time in first.get(_key(span), {}).items() if time <= span.start}
        if len(asked) == 1:
            found.setdefault(span.lane, set()).update(group for group in asked if group is not None)
    return {lane: groups.pop() for lane, groups in found.items() if len(groups) == 1}


def _key(span: Span) -> tuple[str, str]:
    """What a span of gloo's says of the call: the verb, and the shape of its first tensor."""
    shapes = span.args.get("Input Dims", [])
    return span.name.removeprefix("gloo:").replace("_", ""), str(shapes[0]) if shapes else ""


def _keys(call: Span) -> Iterator[tuple[str, str]]:
    """The keys of all spans that a call may be run by. Without shapes recorded, neither side has any."""
    plain = FORM.sub("", call.name.removeprefix("c10d::").replace("_", ""))
    shapes = {str(shape) for shape, _ in _tensors(call)}
    for verb in {plain, RUN_AS.get(plain, plain)}:
        for shape in {*shapes, ""}:
            yield verb, shape


def _tensors(call: Span) -> Iterator[tuple[Any, str]]:
    """The shape and, as far as it is known, the type of every tensor that a call was given."""
    shapes = call.args.get("Input Dims", [])
    types = call.args.get("Input type", [])
    for i, shape in enumerate(shapes):
        kind = types[i] if i < len(types) else ""
        if kind == "TensorList" or (shape and isinstance(shape[0], list)):
            yield from ((each, "") for each in shape)
        elif shape or kind not in NO_TENSORS:
            yield shape, kind


def _has_type(call: Call, span: Span) -> bool:
    known = {kind for _, kind in _tensors(call.span)}
    types = span.args.get("Input type", [])
    return not types or "" in known or not known or types[0] in known
