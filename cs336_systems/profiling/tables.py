"""The tables of a profile, of one rank and over all: for a terminal, and as Markdown."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cs336_systems.host.table import Table
from cs336_systems.profiling.breakdown import attention_rows, module_rows, part_rows, share_note, share_rows
from cs336_systems.profiling.names import PHASES
from cs336_systems.profiling.nesting import outermost
from cs336_systems.profiling.operators import collective_rows, kernel_rows, op_rows
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace

SHOWN, WRITTEN = 15, 40  # rows of operators on a terminal and in a file
CLOCK = {"cpu": "CPU", "device": "device"}
MEASURED = {"cpu": "In milliseconds of CPU self time.", "device": "In milliseconds of the device."}
OPERATORS_NOTE = (
    "Times in milliseconds. Self times divide up the time of the threads that compute, so they add up to 100%; the "
    "main thread's wait for autograd's thread, which runs backward on a GPU, does not count. Totals include the "
    "operators that an operator calls, so they overlap. FLOPs are those of matrix products and fused attention."
)
MEMORY_NOTE = "Memory is bytes allocated less bytes freed."
COLLECTIVES_NOTE = (
    "In milliseconds. They run on threads of the communication library while others compute, so the 100% above are "
    "without them; a collective lasts from its start on this rank until all ranks have taken part."
)
PARTS_NOTE = (
    "Each nanosecond is in one row only. Between their parts, blocks mostly add residuals; outside modules, backward "
    "accumulates gradients and runs hooks."
)
MODULES_NOTE = "`own` is without the modules inside, the others are with them; `blocks.*` stands for all blocks."
ATTENTION_NOTE = (
    "A softmax is counted as 5 FLOPs an element (compare, subtract, exponentiate, add, divide) and its backward as 4; "
    "recomputation counts for backward."
)
SPREAD_NOTE = "In milliseconds. Imbalance is the slowest rank over the mean; a rank without the row counts as 0."
# Columns with torch.profiler's names.
MEMORY = "self memory: memory_self bytes?; memory: memory_total bytes?;"  # in files only: a terminal is too narrow
OPERATORS = (
    "name: name text; self CPU %: cpu_self_share %; self CPU: cpu_self ms; CPU total %: cpu_total_share %;"
    "CPU total: cpu_total ms; CPU time avg: cpu_total/calls ms; self device %: device_self_share %?;"
    "self device: device_self ms?; device total: device_total ms?; device time avg: device_total/calls ms?;"
    f"{MEMORY}"
    "# of calls: calls text; FLOPs: flops count?; FLOP/s: flops_per_second count?"
)
TIMES = "total: total ms; mean: total/calls ms; # of calls: calls text"
KERNELS_NOTE = "In milliseconds on the device. What was launched before the profile began is in no table."
KERNELS, COLLECTIVES = f"name: name text; share: share %; {TIMES}", f"name: name text; where: where text; {TIMES}"
SHARES = (
    "what: name text; forward: forward some; backward: backward some; other: other some; total: total ms;"
    "share: share %; share of forward: of_forward %"
)
PARTS = (
    "part: name text; forward: forward some; recomputed: recomputed some?; backward: backward some;"
    "other: other some; total: total ms; share: share %"
)
MODULES = (
    "module: name text; modules: modules text; calls: calls text; forward: inclusive.forward ms;"
    "recomputed: inclusive.recomputed ms?; backward: inclusive.backward ms; total: inclusive.total ms;"
    "share: inclusive.share %; own forward: forward ms; own backward: backward ms; own share: share %"
)
ATTENTION = (
    "part of attention: name text; forward: forward ms; share of forward: of_forward %; FLOPs: forward_flops count;"
    "FLOP/s: forward_flops/forward speed; backward: backward some; FLOPs: backward_flops count;"
    "FLOP/s: backward_flops/backward speed"
)
SPREADS = (
    "name: name text; min: least ms; mean: mean ms; max: most ms; max on rank: most_rank text;"
    "imbalance: imbalance ratio"
)


@dataclass(frozen=True)
class Spread:
    """A row's nanoseconds over the ranks. Ranks that wait for each other are as slow as the slowest, so `imbalance`,
    the maximum over the mean, is time that all of them lose."""

    name: str
    least: int
    mean: float
    most: int
    most_rank: int
    imbalance: float


def pivot(ranks: Mapping[int, Iterable[tuple[str, int]]], limit: int | None = None) -> list[Spread]:
    """Compare {rank: (name, nanoseconds) of its rows} by name, the largest mean first; rows of one name are added up. A
    rank without a row spent no time on it; of equal ranks the lowest is named."""
    found: dict[str, dict[int, int]] = {}
    for rank, rows in ranks.items():
        for name, time in rows:
            found.setdefault(name, dict.fromkeys(sorted(ranks), 0))[rank] += time
    spreads = []
    for name, times in found.items():
        most_rank = max(times, key=lambda rank: times[rank])
        most, mean = times[most_rank], sum(times.values()) / len(times)
        spreads.append(Spread(name, min(times.values()), mean, most, most_rank, most / mean if mean else 1.0))
    return sorted(spreads, key=lambda row: (-row.mean, row.name))[:limit]


def render_markdown(traces: Sequence[Trace]) -> str:
    """All tables as one Markdown document: of the first rank, and over the ranks if there are several."""
    mine, sort = traces[0], timeline(traces[0]).clock
    by_device = op_rows(mine, sort="device", limit=WRITTEN) if sort == "device" else []
    forward = op_rows(mine, sort=sort, limit=WRITTEN, phase="forward")
    shares, parts, *compared = _shared_tables(traces, WRITTEN)
    whole, of = "Operators, whole step, by", MEASURED[sort]
    tables = [
        shares,
        Table.of("Attention: softmax and products", attention_rows(mine), ATTENTION, f"{of} {ATTENTION_NOTE}"),
        parts,
        Table.of("Modules", module_rows(mine, WRITTEN), MODULES, f"{of} {MODULES_NOTE}"),
        *compared,
        Table.of(f"{whole} CPU total", op_rows(mine, limit=WRITTEN), OPERATORS, f"{OPERATORS_NOTE} {MEMORY_NOTE}"),
        Table.of(f"{whole} self CPU", op_rows(mine, by="self", limit=WRITTEN), OPERATORS),
        Table.of(f"{whole} device total", by_device, OPERATORS),
        Table.of(f"Operators, forward pass only, by {CLOCK[sort]} total", forward, OPERATORS),
        Table.of("Kernels", kernel_rows(mine, WRITTEN), KERNELS, KERNELS_NOTE),
        Table.of("Collectives, by thread", collective_rows(mine), COLLECTIVES, COLLECTIVES_NOTE),
    ]
    found = [table.markdown() for table in tables if table.rows]
    return "\n".join([f"# Where the time goes\n\n{_about(traces)}\n", *found])


def show(traces: Sequence[Trace], console: Console) -> None:
    """Print the main tables: the first rank's operators and parts, the breakdown, and the ranks compared."""
    mine, sort = traces[0], timeline(traces[0]).clock
    console.print(_about(traces))
    rows = op_rows(mine, sort=sort, by="self", limit=SHOWN)
    title = f"Operators of rank {mine.rank} by self {CLOCK[sort]}"
    operators = Table.of(title, rows, OPERATORS.replace(MEMORY, ""), OPERATORS_NOTE)
    for table in (operators, *_shared_tables(traces, limit=8)[:4]):
        if table.rows:
            console.print(table.table())


def _about(traces: Sequence[Trace]) -> str:
    mine, steps = traces[0], traces[0].ours.get("steps")
    over = f"Times are sums over {steps} steps" if steps and steps > 1 else "Times are of all that was profiled"
    return f"{over}, on rank {mine.rank} of {mine.world_size} unless a table says otherwise."


def phase_times(trace: Trace) -> Counter[str]:
    """Nanoseconds of the host in each phase."""
    found: Counter[str] = Counter()
    for node, name, first in outermost(timeline(trace).busy, lambda node: node.span.name):
        if first and node.span.category == "user_annotation" and name in PHASES:
            found[name] += node.duration
    return found


def _shared_tables(traces: Sequence[Trace], limit: int) -> list[Table]:
    """Tables for the terminal as well as for the file: shares and parts of the step and, if there are several ranks,
    these compared by phases, operators' self time, parts, collectives, and kernels."""
    mine, of_clock = traces[0], MEASURED[timeline(traces[0]).clock]
    shares = [row for row in share_rows(mine) if row.total]
    tables = [
        Table.of("Shares of the step", shares, SHARES, f"{of_clock} Rows may overlap. {share_note(mine)}".rstrip()),
        Table.of("Parts of the step", part_rows(mine), PARTS, f"{of_clock} {PARTS_NOTE}"),
    ]
    if len(traces) == 1:
        return tables
    clock = "device" if any(timeline(trace).clock == "device" for trace in traces) else "cpu"

    def of(rows: Callable[[Trace], Iterable[Any]], field: str = "total") -> dict[int, list[tuple[str, int]]]:
        return {trace.rank: [(row.name, getattr(row, field)) for row in rows(trace)] for trace in traces}

    compared: dict[str, Mapping[int, Iterable[tuple[str, int]]]] = {
        "Phases over the ranks, host time": {trace.rank: phase_times(trace).items() for trace in traces},
        f"Operators over the ranks, self {CLOCK[clock]}": of(op_rows, f"{clock}_self"),
        "Parts over the ranks": of(part_rows),
        "Collectives over the ranks": of(collective_rows),
        "Kernels over the ranks": of(kernel_rows),
    }
    for title, times in compared.items():
        note = SPREAD_NOTE if title.startswith("Phases") else ""
        tables.append(Table.of(title, pivot(times, limit), SPREADS, note))
    return tables
