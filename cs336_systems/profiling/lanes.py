"""Numbers and names for the processes and threads of all ranks in one picture.

Every rank is one machine's view: its process ids may be another rank's, and GPU 0 is process 0 on each. So they get
new numbers, rank * 1000 + 1, + 2 ..., and names that say whose they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cs336_systems.profiling.names import FRAME
from cs336_systems.profiling.nesting import Node, nest
from cs336_systems.profiling.threads import IN_FLIGHT, OTHER, lane_number, role_of, roles
from cs336_systems.profiling.trace import DEVICE, HOST, KERNEL, Lane, Span, Trace

PER_RANK = 1000  # process numbers of one rank
ON_GPU = (*DEVICE, "gpu_user_annotation", "cuda_sync")


@dataclass
class Row:
    """One line of the picture: slices that nest. Row 0 of a lane has all but what crosses something on it."""

    rank: int
    pid: int
    tid: int
    name: str
    order: int
    roots: list[Node] = field(default_factory=list)


@dataclass
class Process:
    """One process of the picture: a rank's own, or one of its GPUs."""

    rank: int
    pid: int
    name: str
    order: int


def lay_out(trace: Trace) -> tuple[list[Process], dict[Lane, list[Row]]]:
    """A rank's processes in order, and for each of its lanes the rows that hold all its spans.

    Python frames that cross an annotation are left out, as in `nest`: they are artefacts of the profiler.
    """
    lanes: dict[Lane, list[Span]] = {}
    for span in trace.spans:
        lanes.setdefault(span.lane, []).append(span)
    groups: dict[Any, dict[Lane, list[Span]]] = {}
    for lane, spans in lanes.items():
        groups.setdefault(lane[0], {})[lane] = spans
    processes: list[Process] = []
    rows: dict[Lane, list[Row]] = {}
    for old, inside in sorted(groups.items(), key=lambda item: (_rank_of_process(item[1]), str(item[0]).zfill(9))):
        pid = trace.rank * PER_RANK + len(processes) + 1
        processes.append(Process(trace.rank, pid, _process_name(trace, old, inside), pid))
        tid = pid * PER_RANK
        for order, name, lane in _named_lanes(trace, inside):
            rows[lane] = []
            for number, roots in enumerate(untangle(inside[lane])):
                full = f"{name}, crossing {number}" if number else name
                rows[lane].append(Row(trace.rank, pid, tid, full, order, roots))
                tid += 1
    return processes, rows


def untangle(spans: Iterable[Span]) -> list[list[Node]]:
    """One lane's spans as few rows in which they nest; Python frames that do not are left out."""
    rows, left = [], list(spans)
    while left:
        roots = nest(left)
        rows.append(roots)
        kept = {id(node.span) for root in roots for node in root.walk()}
        left = [span for span in left if id(span) not in kept and span.category != FRAME]
    return rows


def _rank_of_process(lanes: dict[Lane, list[Span]]) -> int:
    """0 for where Python ran, 1 for a GPU, 2 for what the profiler says of itself."""
    found = {span.category for spans in lanes.values() for span in spans}
    return 0 if found & set(HOST) else 1 if found & set(ON_GPU) else 2


def _process_name(trace: Trace, old: Any, lanes: dict[Lane, list[Span]]) -> str:
    kind = _rank_of_process(lanes)
    if kind == 0:
        return f"rank {trace.rank} ({trace.host}, pid {old})" if trace.host else f"rank {trace.rank} (pid {old})"
    return f"rank {trace.rank} GPU {old}" if kind == 1 else f"rank {trace.rank}, the profiler"


def _named_lanes(trace: Trace, lanes: dict[Lane, list[Span]]) -> list[tuple[int, str, Lane]]:
    """(place from the top, name, lane) of one process."""
    if _rank_of_process(lanes) == 1:
        streams = sorted(lanes, key=lambda lane: (lane_number(lane), str(lane)))
        return [(order, _stream_name(lane, lanes[lane]), lane) for order, lane in enumerate(streams)]
    known = roles(trace)
    threads = [lane for lane in known if lane in lanes]
    threads += sorted(lanes.keys() - known.keys(), key=str)
    return [(order, _thread_name(lane, known.get(lane, OTHER), trace), lane) for order, lane in enumerate(threads)]


def _thread_name(lane: Lane, name: str, trace: Trace) -> str:
    role = role_of(name)
    if role == OTHER:
        return trace.threads.get(lane, f"thread {lane[1]}")
    return name if role == IN_FLIGHT else f"{name} ({lane[1]})"


def _stream_name(lane: Lane, spans: list[Span]) -> str:
    carries = any(KERNEL.search(span.name) for span in spans if span.category == "kernel")
    return f"stream {lane[1]}" + (", communication" if carries else "")
