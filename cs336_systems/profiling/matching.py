"""Which span on one rank is the same collective as which on the others.

Two families. Our own annotations, `launch all-reduce 0#47 bucket 0` and `wait ...`, bear the group's name and the
collective's number in it, so with the group's ranks, where they are known, they match exactly. A backend's spans
(gloo's on its threads, NCCL's on a GPU) bear none: there the k-th of a name and shape on one rank is the k-th on the
others, since collectives of a group run in order. Sends and receives join two ranks only and are left alone; so is what
could belong to one of several groups.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cs336_systems.profiling.memo import of_ranks
from cs336_systems.profiling.names import parse_collective
from cs336_systems.profiling.trace import COMMUNICATION, KERNEL, Lane, Span, Trace

# Verbs that nobody leaves before everybody has come. A broadcast's source needs nobody, and in an all-to-all two ranks
# may have nothing for each other.
JOINING = re.compile(r"all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|barrier", re.IGNORECASE)
POINT_TO_POINT = re.compile(r":(i?send|i?recv)|SendRecv", re.IGNORECASE)


@dataclass(frozen=True)
class Matched:
    """One collective as several ranks saw it: the span in which each joined it and, of our own, that of its wait (where
    waiting holds a thread up: with NCCL only the stream waits).

    `joins` says that no rank can leave before all have entered. `left` counts spans of the kind without a partner.
    """

    key: str
    spans: dict[int, Span]
    waits: dict[int, Span] = field(default_factory=dict)
    joins: bool = False
    left: int = 0

    @property
    def start(self) -> int:
        """When the first rank joined, in nanoseconds."""
        return min(span.start for span in self.spans.values())

    def leaving(self, rank: int) -> Span | None:
        """The span at whose end the rank knows the collective to be over; None if the trace does not show it."""
        return self.waits.get(rank) if parse_collective(self.spans[rank].name) else self.spans[rank]


def match(traces: Iterable[Trace]) -> list[Matched]:
    """The collectives that at least two ranks show, in order of the earliest start."""
    traces = list(traces)
    return of_ranks(traces, "match", lambda: _match(traces))


def _match(traces: list[Trace]) -> list[Matched]:
    return sorted((*_annotated(traces), *_of_backend(traces)), key=lambda each: (each.start, each.key))


def _annotated(traces: list[Trace]) -> Iterator[Matched]:
    launches: dict[tuple[str, str], dict[int, Span]] = {}
    waits: dict[tuple[str, str], dict[int, Span]] = {}
    joins: dict[tuple[str, str], bool] = {}
    for trace in traces:
        sent, blocks, ranks = _sending(trace), _blocks(trace), _ranks_of_groups(trace)
        for span in trace.spans:
            found = parse_collective(span.name) if span.category == "user_annotation" else None
            if not found:
                continue
            key = found.key, ranks.get(found.group, "")  # halves of a split may share a name
            if found.what == "launch":
                launches.setdefault(key, {}).setdefault(trace.rank, span)
                joins[key] = joins.get(key, True) and bool(JOINING.search(found.verb)) and _sends(span, sent)
            elif blocks:
                waits.setdefault(key, {}).setdefault(trace.rank, span)
    for key, spans in launches.items():
        if len(spans) > 1:
            yield Matched(key[0], spans, {r: w for r, w in waits.get(key, {}).items() if r in spans}, joins[key])


def _ranks_of_groups(trace: Trace) -> dict[str, str]:
    """The ranks of every group of a rank by its name, in words, as far as the trace tells."""
    return {name: members for name, members in _groups(trace) if name}


def _groups(trace: Trace) -> list[tuple[str, str]]:
    """(name, ranks) of the groups of a rank that have several ranks; a group without a name has an empty one."""
    groups = trace.chrome.get("distributedInfo", {}).get("pg_config", [])
    everyone = list(range(trace.world_size))  # an empty list stands for all
    found = [(each.get("pg_name", ""), each.get("ranks") or everyone) for each in groups if isinstance(each, dict)]
    return list(dict.fromkeys((str(name), str(ranks)) for name, ranks in found if len(ranks) > 1))


def _blocks(trace: Trace) -> bool:
    """Whether waiting holds a thread of the CPU up."""
    return not any(span.category == "kernel" and KERNEL.search(span.name) for span in trace.spans)


def _sending(trace: Trace) -> dict[Lane, list[int]]:
    """By lane the times at which torch was asked to send something; an empty tensor is not sent at all."""
    found: dict[Lane, list[int]] = {}
    for span in trace.spans:
        if span.name.startswith("c10d::") and _filled(span):
            found.setdefault(span.lane, []).append(span.start)
    return found


def _sends(launch: Span, sent: dict[Lane, list[int]]) -> bool:
    from_there = sent.get(launch.lane, [])
    first = bisect_left(from_there, launch.start)
    return first < len(from_there) and from_there[first] < launch.end


def _filled(span: Span) -> bool:
    """Whether none of its tensors is known to be empty."""
    return not re.search(r"\[0[\],]| 0[\],]", str(span.args.get("Input Dims", "")))


def _of_backend(traces: list[Trace]) -> Iterator[Matched]:
    found: dict[tuple[str, str, str, str], dict[int, list[Span]]] = {}
    for trace in traces:
        for span in _backend_spans(trace):
            group = _group(span, trace)
            if group is not None:
                shape = span.args.get("Input Dims", span.args.get("In msg nelems", ""))
                kind = str(span.args.get("Input type", span.args.get("dtype", "")))
                key = (span.name, _short(shape), _short(kind), group)
                found.setdefault(key, {}).setdefault(trace.rank, []).append(span)
    for (name, shape, kind, _), by_rank in found.items():
        if len(by_rank) < 2:
            continue
        common = min(map(len, by_rank.values()))
        left = sum(map(len, by_rank.values())) - common * len(by_rank)
        for k in range(common):
            spans = {rank: each[k] for rank, each in by_rank.items()}
            sure = not left and JOINING.search(name) and all(map(_filled, spans.values()))
            yield Matched(
                " ".join(f"{name.split('(')[0]} {shape} {kind} #{k}".split()), spans, joins=bool(sure), left=left
            )


def _backend_spans(trace: Trace) -> list[Span]:
    """What a backend did itself: gloo on its threads, NCCL's kernels, or what the profiler draws over those."""
    kernels = [span for span in trace.spans if span.category == "kernel" and KERNEL.search(span.name)]
    over = [span for span in trace.spans if span.category == "gpu_user_annotation" and span.name.startswith("nccl:")]
    # On the CPU a span of NCCL's says only when the kernel was enqueued.
    host = [
        span
        for span in trace.spans
        if COMMUNICATION.match(span.name) and span.category == "user_annotation" and not span.name.startswith("nccl:")
    ]
    found = sorted([*(kernels or over), *host], key=lambda span: span.start)
    return [span for span in found if not POINT_TO_POINT.search(span.name)]


def _group(span: Span, trace: Trace) -> str | None:
    """What tells the span's group from others: its name, or the ranks of the only one there is; None if unknown."""
    if name := span.args.get("Process Group Name"):
        return f"{name} {span.args.get('Process Group Ranks', '')}"  # halves of a split may share a name
    groups = _groups(trace)
    if len(groups) > 1:
        return None
    return groups[0][1] if groups else ""


def _short(value: Any) -> str:
    return str(value).replace("'", "") if value not in ("", [], None) else ""
