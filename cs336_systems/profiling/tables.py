"""The tables of a profile, of one rank and over all: for a terminal, as Markdown, and as rows that JSON can hold."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from cs336_systems.host.console import format_count
from cs336_systems.host.table import Table, milliseconds, percent
from cs336_systems.profiling.breakdown import PRODUCTS, AttentionRow, attention_rows, share_lines, share_rows
from cs336_systems.profiling.modules import ModuleRow, PartRow, module_rows, part_rows
from cs336_systems.profiling.names import PHASES
from cs336_systems.profiling.operators import OpRow, Sort, TimeRow, collective_rows, kernel_rows, op_rows, share
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import Trace, uncollected


@dataclass(frozen=True)
class Spread:
    """A row's nanoseconds over the ranks; `imbalance` is the most over the mean, 1 if all ranks are equal.

    Ranks that wait for each other are as fast as the slowest, so all pay for what one does longer than the mean.
    """

    name: str
    least: int
    mean: float
    most: int
    most_rank: int
    imbalance: float


def times_of(rows: Iterable[Any], of: str) -> dict[str, int]:
    """The nanoseconds in the field `of` of each row, by the row's name; rows of one name are added up."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.name] = found.get(row.name, 0) + int(getattr(row, of))
    return found


def pivot(ranks: Mapping[int, Mapping[str, int]], limit: int | None = None) -> list[Spread]:
    """Compare {rank: {name: nanoseconds}} by name, the largest mean first.

    A rank that lacks a row spent no time on it. Of ranks that are equal the lowest is named.
    """
    rows = []
    for name in dict.fromkeys(name for times in ranks.values() for name in times):
        times = {rank: ranks[rank].get(name, 0) for rank in sorted(ranks)}
        most_rank = max(times, key=lambda rank: times[rank])
        most, mean = times[most_rank], sum(times.values()) / len(times)
        rows.append(Spread(name, min(times.values()), mean, most, most_rank, most / mean if mean else 1.0))
    return sorted(rows, key=lambda row: (-row.mean, row.name))[:limit]


SHOWN, WRITTEN = 15, 40  # rows of operators on a terminal and in a file
CLOCK = {"cpu": "CPU", "device": "device"}
OPERATORS_NOTE = (
    "Times in milliseconds. Self times partition what the threads that compute did, so they add up to 100%: to thread "
    "time, in which the main thread's wait for autograd's, which runs backward on a GPU, counts for nothing. Totals "
    "hold what an operator calls and overlap. FLOPs are those of matrix products and fused attention themselves."
)
COLLECTIVES_NOTE = (
    "In milliseconds. They run on threads of the communication library beside those that compute, so they are in no "
    "100% above; a collective lasts from its start on this rank until all ranks have taken part."
)
PARTS_NOTE = "In milliseconds of {clock}. Each nanosecond is in one row only."
MODULES_NOTE = (
    "In milliseconds of {clock}. `own` is without the modules inside, the others are with them; `blocks.*` stands for "
    "all blocks."
)
ATTENTION_NOTE = (
    "In milliseconds of {clock}. A softmax is counted as 5 FLOPs an element (compare, subtract, exponentiate, add, "
    "divide) and its backward as 4; what backward recomputes counts for backward."
)
SPREAD_NOTE = "In milliseconds. Imbalance is the slowest rank over the mean; a rank without the row counts as 0."


@uncollected()
def render_markdown(traces: Sequence[Trace]) -> str:
    """All tables as one Markdown document: of the first rank, and over the ranks if there are several."""
    mine = traces[0]
    sort = sort_of(mine)
    lines = [f"# Where the time goes\n\n{_about(traces)}\n", f"## Shares, by {_clock(mine)}", ""]
    lines += [*(f"- {line}" for line in share_lines(mine)), ""]
    by_total, by_self = op_rows(mine, limit=WRITTEN), op_rows(mine, by="self", limit=WRITTEN)
    by_device = op_rows(mine, sort="device", limit=WRITTEN) if sort == "device" else []
    forward = op_rows(mine, sort=sort, limit=WRITTEN, phase="forward")
    tables = [
        attention_table(mine),
        parts_table(mine),
        modules_table(mine),
        *spread_tables(traces, WRITTEN),
        operators_table(by_total, "Operators, whole step, by CPU total", OPERATORS_NOTE),
        operators_table(by_self, "Operators, whole step, by self CPU"),
        operators_table(by_device, "Operators, whole step, by device total"),
        operators_table(forward, f"Operators, forward pass only, by {CLOCK[sort]} total"),
        times_table(kernel_rows(mine, WRITTEN), "Kernels", "In milliseconds on the device."),
        times_table(collective_rows(mine), "Collectives, by thread", COLLECTIVES_NOTE),
    ]
    return "\n".join([*lines, *(table.markdown() for table in tables if table.rows)])


@uncollected()
def show(traces: Sequence[Trace], console: Console) -> None:
    """Print the most important: the first rank's operators and parts, the breakdown, and the ranks compared."""
    mine = traces[0]
    sort = sort_of(mine)
    rows = op_rows(mine, sort=sort, by="self", limit=SHOWN)
    console.print(_about(traces))
    operators = operators_table(rows, f"Operators of rank {mine.rank} by self {CLOCK[sort]}", OPERATORS_NOTE)
    for table in (operators, parts_table(mine), *spread_tables(traces, limit=8)[:2]):
        if table.rows:
            console.print(table.table())
    for line in share_lines(mine):
        console.print(line, markup=False)


@uncollected()
def as_json(traces: Sequence[Trace], limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of the tables, unrounded, one dictionary for each rank; times are nanoseconds over all steps.

    Operators are listed for the step and for each phase: the `limit` longest by total and as many by self time.
    """
    return [_rank_json(trace, limit, sort_of(trace)) for trace in traces]


def _rank_json(trace: Trace, limit: int | None, sort: Sort) -> dict[str, Any]:
    shares = [asdict(row) | {"of_forward": row.of_forward, "of_step": row.of_step} for row in share_rows(trace)]
    operators = {}
    for name, phase in {"step": None, **{phase: phase for phase in PHASES}}.items():
        rows = op_rows(trace, sort, phase=phase)
        most = {row.name for row in (*rows[:limit], *op_rows(trace, sort, "self", limit, phase))}
        operators[name] = [asdict(row) | {"flops_per_second": row.flops_per_second} for row in rows if row.name in most]
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "steps": trace.ours.get("steps"),
        "clock": sort,
        "operators": operators,
        "kernels": [asdict(row) for row in kernel_rows(trace, limit)],
        "collectives": [asdict(row) for row in collective_rows(trace)[:limit]],
        "parts": [asdict(row) for row in part_rows(trace)],
        "modules": [asdict(row) for row in module_rows(trace, limit=limit)],
        "shares": shares,
        "attention": [asdict(row) for row in attention_rows(trace)],
        "phases": _phases(trace),
    }


def sort_of(trace: Trace) -> Sort:
    """The clock that tables go by: the device's if an operator launched anything there."""
    return "device" if timeline(trace).on_device else "cpu"


def _about(traces: Sequence[Trace]) -> str:
    mine, steps = traces[0], traces[0].ours.get("steps")
    over = f"Times are sums over {steps} steps" if steps and steps > 1 else "Times are of all that was profiled"
    return f"{over}, on rank {mine.rank} of {mine.world_size} where nothing else is said."


def _clock(trace: Trace) -> str:
    return {"device": "the device", "cpu": "CPU self time"}[sort_of(trace)]


def _unless_zero(time: int) -> str:
    return milliseconds(time) if time else ""


def operators_table(rows: Sequence[OpRow], title: str, note: str = "") -> Table:
    """Columns as torch.profiler names them; those of the device and of FLOPs only where there are any."""
    columns: dict[str, Callable[[OpRow], str]] = {
        "name": lambda row: row.name,
        "self CPU %": lambda row: percent(row.cpu_self_share),
        "self CPU": lambda row: milliseconds(row.cpu_self),
        "CPU total %": lambda row: percent(row.cpu_total_share),
        "CPU total": lambda row: milliseconds(row.cpu_total),
        "CPU time avg": lambda row: milliseconds(row.cpu_total / row.calls),
    }
    if any(row.device_total for row in rows):
        columns |= {
            "self device %": lambda row: percent(row.device_self_share),
            "self device": lambda row: milliseconds(row.device_self),
            "device total": lambda row: milliseconds(row.device_total),
            "device time avg": lambda row: milliseconds(row.device_total / row.calls),
        }
    columns["# of calls"] = lambda row: str(row.calls)
    if any(row.flops for row in rows):
        columns["FLOPs"] = lambda row: format_count(row.flops) if row.flops else ""
        columns["FLOP/s"] = lambda row: format_count(row.flops_per_second) if row.flops_per_second else ""
    return Table.of(title, rows, columns, note)


def times_table(rows: Sequence[TimeRow], title: str, note: str) -> Table:
    """Kernels with their shares, or collectives with their threads."""
    columns: dict[str, Callable[[TimeRow], str]] = {"name": lambda row: row.name}
    if any(row.share is not None for row in rows):
        columns["share"] = lambda row: percent(row.share or 0.0)
    else:
        columns["where"] = lambda row: row.where
    columns |= {
        "total": lambda row: milliseconds(row.total),
        "mean": lambda row: milliseconds(row.total / row.calls),
        "# of calls": lambda row: str(row.calls),
    }
    return Table.of(title, rows, columns, note)


def parts_table(trace: Trace) -> Table:
    """The whole step by part of the model."""
    rows = part_rows(trace)
    columns: dict[str, Callable[[PartRow], str]] = {
        "part": lambda row: row.name,
        "forward": lambda row: _unless_zero(row.forward),
        "recomputed": lambda row: _unless_zero(row.recomputed),
        "backward": lambda row: _unless_zero(row.backward),
        "other": lambda row: _unless_zero(row.other),
        "total": lambda row: milliseconds(row.total),
        "share": lambda row: percent(row.share),
    }
    if not any(row.recomputed for row in rows):
        del columns["recomputed"]
    return Table.of("Parts of the step", rows, columns, PARTS_NOTE.format(clock=_clock(trace)))


def modules_table(trace: Trace) -> Table:
    """Every module, those of all blocks together, with its backward beside its forward."""
    rows = module_rows(trace, limit=WRITTEN)
    columns: dict[str, Callable[[ModuleRow], str]] = {
        "module": lambda row: row.name,
        "modules": lambda row: str(row.modules),
        "calls": lambda row: str(row.calls),
        "forward": lambda row: milliseconds(row.inclusive_forward),
        "recomputed": lambda row: milliseconds(row.inclusive_recomputed),
        "backward": lambda row: milliseconds(row.inclusive_backward),
        "total": lambda row: milliseconds(row.inclusive),
        "share": lambda row: percent(row.inclusive_share),
        "own forward": lambda row: milliseconds(row.forward),
        "own backward": lambda row: milliseconds(row.backward),
        "own share": lambda row: percent(row.share),
    }
    if not any(row.inclusive_recomputed for row in rows):
        del columns["recomputed"]
    return Table.of("Modules", rows, columns, MODULES_NOTE.format(clock=_clock(trace)))


def attention_table(trace: Trace) -> Table:
    """Softmax beside the products of attention, time and FLOPs."""
    rows = attention_rows(trace)
    heads = ["part of attention", "forward", "share of it", "FLOPs", "FLOP/s", "backward", "FLOPs", "FLOP/s"]
    whole = sum(row.forward for row in rows if row.name != PRODUCTS)

    def speed(flops: int, time: int) -> list[str]:
        return [format_count(flops), format_count(flops / time * 1e9)] if flops and time else ["", ""]

    def cells(row: AttentionRow) -> list[str]:
        forward = [milliseconds(row.forward), percent(share(row.forward, whole))]
        backward = [_unless_zero(row.backward), *speed(row.backward_flops, row.backward)]
        return [row.name, *forward, *speed(row.forward_flops, row.forward), *backward]

    note = ATTENTION_NOTE.format(clock=_clock(trace))
    return Table("Softmax beside the products of attention", heads, [cells(row) for row in rows], note, names=True)


def _phases(trace: Trace) -> dict[str, int]:
    """Nanoseconds of the host in each phase."""
    times: dict[str, int] = {}
    for node in timeline(trace).busy:
        if node.span.category == "user_annotation" and node.span.name in PHASES:
            times[node.span.name] = times.get(node.span.name, 0) + node.duration
    return times


def spread_tables(traces: Sequence[Trace], limit: int) -> list[Table]:
    """The ranks compared, if there are several: phases, operators by self time, parts, collectives, and kernels."""
    if len(traces) < 2:
        return []
    clock = "device" if "device" in map(sort_of, traces) else "cpu"
    compared: dict[str, Callable[[Trace], dict[str, int]]] = {
        "Phases over the ranks, host time": _phases,
        f"Operators over the ranks, self {CLOCK[clock]}": lambda trace: times_of(op_rows(trace), f"{clock}_self"),
        "Parts over the ranks": lambda trace: times_of(part_rows(trace), "total"),
        "Collectives over the ranks": lambda trace: times_of(collective_rows(trace), "total"),
        "Kernels over the ranks": lambda trace: times_of(kernel_rows(trace), "total"),
    }
    columns: dict[str, Callable[[Spread], str]] = {
        "name": lambda row: row.name,
        "min": lambda row: milliseconds(row.least),
        "mean": lambda row: milliseconds(row.mean),
        "max": lambda row: milliseconds(row.most),
        "max on rank": lambda row: str(row.most_rank),
        "imbalance": lambda row: f"{row.imbalance:.2f}",
    }
    tables = []
    for title, times in compared.items():
        rows = pivot({trace.rank: times(trace) for trace in traces}, limit)
        tables.append(Table.of(title, rows, columns, SPREAD_NOTE if times is _phases else ""))
    return tables
