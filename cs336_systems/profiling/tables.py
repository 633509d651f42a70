"""The tables of a profile, of one rank and over all: for a terminal, as Markdown, and as rows that JSON can hold."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from cs336_systems.console import format_count
from cs336_systems.profiling.attribution import PHASES
from cs336_systems.profiling.module_table import ModuleRow, PartRow, kind_rows, module_rows
from cs336_systems.profiling.op_table import (
    OpRow,
    Sort,
    TimeRow,
    collective_rows,
    kernel_rows,
    op_rows,
    share,
)
from cs336_systems.profiling.over_ranks import Spread, pivot, times_of
from cs336_systems.profiling.shares import PRODUCTS, attention_rows, share_lines, share_rows
from cs336_systems.profiling.sheet import Sheet, milliseconds, percent
from cs336_systems.profiling.trace import Trace, uncollected
from cs336_systems.profiling.work import on_device, working

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
SPREAD_NOTE = "In milliseconds. Imbalance is the slowest rank over the mean; a rank without the row counts as 0."


@uncollected()
def render_markdown(traces: Sequence[Trace]) -> str:
    """All tables as one Markdown document: of the first rank, and over the ranks if there are several."""
    mine = traces[0]
    parts = [f"# Where the time goes\n\n{_about(traces)}\n", _shares_section(mine)]
    sheets = [attention_sheet(mine), parts_sheet(mine), modules_sheet(mine)]
    sheets += spread_sheets(traces, WRITTEN)
    by_total = op_rows(mine, limit=WRITTEN)
    sheets.append(operators_sheet(by_total, "Operators, whole step, by CPU total", OPERATORS_NOTE))
    sheets.append(operators_sheet(op_rows(mine, by="self", limit=WRITTEN), "Operators, whole step, by self CPU"))
    if on_device(mine):
        by_device = op_rows(mine, sort="device", limit=WRITTEN)
        sheets.append(operators_sheet(by_device, "Operators, whole step, by device total"))
    sort: Sort = "device" if on_device(mine) else "cpu"
    forward = op_rows(mine, sort=sort, limit=WRITTEN, phase="forward")
    sheets.append(operators_sheet(forward, f"Operators, forward pass only, by {CLOCK[sort]} total"))
    sheets.append(times_sheet(kernel_rows(mine, WRITTEN), "Kernels", "In milliseconds on the device."))
    sheets.append(times_sheet(collective_rows(mine), "Collectives, by thread", COLLECTIVES_NOTE))
    return "\n".join([*parts, *(sheet.markdown() for sheet in sheets if sheet.rows)])


@uncollected()
def show(traces: Sequence[Trace], console: Console) -> None:
    """Print the most important: the first rank's operators and parts, what the shares are, and the ranks compared."""
    mine = traces[0]
    sort: Sort = "device" if on_device(mine) else "cpu"
    rows = op_rows(mine, sort=sort, by="self", limit=SHOWN)
    console.print(_about(traces))
    title = f"Operators of rank {mine.rank} by self {CLOCK[sort]}"
    sheets = [operators_sheet(rows, title, OPERATORS_NOTE), parts_sheet(mine)]
    for sheet in (*sheets, *spread_sheets(traces, limit=8)[:2]):
        if sheet.rows:
            console.print(sheet.table())
    for line in share_lines(mine):
        console.print(line, markup=False)


@uncollected()
def as_json(traces: Sequence[Trace], limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of the tables, unrounded, one dictionary a rank; times in nanoseconds over all steps, shares of 1.

    Operators are listed for the step and for each phase: the `limit` longest by total and as many by self time.
    """
    return [_rank_json(trace, limit) for trace in traces]


def _rank_json(trace: Trace, limit: int | None) -> dict[str, Any]:
    shares = [asdict(row) | {"of_forward": row.of_forward, "of_step": row.of_step} for row in share_rows(trace)]
    periods: dict[str, str | None] = {"step": None} | {phase: phase for phase in PHASES}
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "steps": trace.ours.get("steps"),
        "clock": "device" if on_device(trace) else "cpu",
        "operators": {name: _operators_json(trace, phase, limit) for name, phase in periods.items()},
        "kernels": [asdict(row) for row in kernel_rows(trace, limit)],
        "collectives": [asdict(row) for row in collective_rows(trace)[:limit]],
        "parts": [asdict(row) for row in kind_rows(trace)],
        "modules": [asdict(row) for row in module_rows(trace, limit=limit)],
        "shares": shares,
        "attention": [asdict(row) for row in attention_rows(trace)],
        "phases": _phases(trace),
    }


def _operators_json(trace: Trace, phase: str | None, limit: int | None) -> list[dict[str, Any]]:
    sort: Sort = "device" if on_device(trace) else "cpu"
    rows = op_rows(trace, sort, phase=phase)
    most = {row.name for row in (*rows[:limit], *op_rows(trace, sort, "self", limit, phase))}
    return [asdict(row) | {"flops_per_second": row.flops_per_second} for row in rows if row.name in most]


def _about(traces: Sequence[Trace]) -> str:
    steps = traces[0].ours.get("steps")
    over = f"Times are sums over {steps} steps" if steps and steps > 1 else "Times are of all that was profiled"
    rank = traces[0].rank
    return f"{over}, on rank {rank} of {traces[0].world_size} where nothing else is said."


def _clock(trace: Trace) -> str:
    return "the device" if on_device(trace) else "CPU self time"


def _shares_section(trace: Trace) -> str:
    return "\n".join([f"## Shares, by {_clock(trace)}", "", *(f"- {line}" for line in share_lines(trace)), ""])


def operators_sheet(rows: Sequence[OpRow], title: str, note: str = "") -> Sheet:
    """Columns as torch.profiler names them; those of the device and of FLOPs only where there are any."""
    columns: list[tuple[str, Callable[[OpRow], str]]] = [
        ("name", lambda row: row.name),
        ("self CPU %", lambda row: percent(row.cpu_self_share)),
        ("self CPU", lambda row: milliseconds(row.cpu_self)),
        ("CPU total %", lambda row: percent(row.cpu_total_share)),
        ("CPU total", lambda row: milliseconds(row.cpu_total)),
        ("CPU time avg", lambda row: milliseconds(row.cpu_mean)),
    ]
    if any(row.device_total for row in rows):
        columns += [
            ("self device %", lambda row: percent(row.device_self_share)),
            ("self device", lambda row: milliseconds(row.device_self)),
            ("device total", lambda row: milliseconds(row.device_total)),
            ("device time avg", lambda row: milliseconds(row.device_mean)),
        ]
    columns.append(("# of calls", lambda row: str(row.calls)))
    if any(row.flops for row in rows):
        columns.append(("FLOPs", lambda row: format_count(row.flops) if row.flops else ""))
        columns.append(("FLOP/s", lambda row: format_count(row.flops_per_second) if row.flops_per_second else ""))
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return Sheet(title, [head for head, _ in columns], cells, note, names=True)


def times_sheet(rows: Sequence[TimeRow], title: str, note: str) -> Sheet:
    """Kernels with their shares, or collectives with their threads."""
    shares = any(row.share is not None for row in rows)
    heads = ["name", "share" if shares else "where", "total", "mean", "# of calls"]
    cells = [
        [
            row.name,
            row.where if row.share is None else percent(row.share),
            milliseconds(row.total),
            milliseconds(row.mean),
            str(row.calls),
        ]
        for row in rows
    ]
    return Sheet(title, heads, cells, note, names=True)


def parts_sheet(trace: Trace) -> Sheet:
    """The whole step by part of the model."""
    rows = kind_rows(trace)
    recomputed = any(row.recomputed for row in rows)
    heads = ["part", "forward", *(["recomputed"] if recomputed else []), "backward", "other", "total", "share"]
    cells = [[row.name, *_times(row, recomputed), milliseconds(row.total), percent(row.share)] for row in rows]
    return Sheet("Parts of the step", heads, cells, PARTS_NOTE.format(clock=_clock(trace)), names=True)


def _times(row: PartRow, recomputed: bool) -> list[str]:
    times = [row.forward, *([row.recomputed] if recomputed else []), row.backward, row.other]
    return [milliseconds(time) if time else "" for time in times]


def modules_sheet(trace: Trace) -> Sheet:
    """Every module, those of all blocks together, with its backward beside its forward."""
    rows = module_rows(trace, limit=WRITTEN)
    recomputed = any(row.inclusive_recomputed for row in rows)
    heads = ["module", "modules", "calls", "forward", *(["recomputed"] if recomputed else []), "backward", "total"]
    heads += ["share", "own forward", "own backward", "own share"]

    def cells(row: ModuleRow) -> list[str]:
        again = [milliseconds(row.inclusive_recomputed)] if recomputed else []
        times = [milliseconds(row.inclusive_forward), *again, milliseconds(row.inclusive_backward)]
        own = [milliseconds(row.forward), milliseconds(row.backward), percent(row.share)]
        whole = [milliseconds(row.inclusive), percent(row.inclusive_share)]
        return [row.name, str(row.modules), str(row.calls), *times, *whole, *own]

    return Sheet("Modules", heads, [cells(row) for row in rows], MODULES_NOTE.format(clock=_clock(trace)), names=True)


def attention_sheet(trace: Trace) -> Sheet:
    """Softmax beside the products of attention, time and FLOPs."""
    rows = attention_rows(trace)
    heads = ["part of attention", "forward", "share of it", "FLOPs", "FLOP/s", "backward", "FLOPs", "FLOP/s"]
    whole = sum(row.forward for row in rows if row.name != PRODUCTS)

    def speed(flops: int, time: int) -> list[str]:
        return [format_count(flops), format_count(flops / time * 1e9)] if flops and time else ["", ""]

    cells = [
        [
            row.name,
            milliseconds(row.forward),
            percent(share(row.forward, whole)),
            *speed(row.forward_flops, row.forward),
            milliseconds(row.backward) if row.backward else "",
            *speed(row.backward_flops, row.backward),
        ]
        for row in rows
    ]
    note = (
        f"In milliseconds of {_clock(trace)}. A softmax is counted as 5 FLOPs an element (compare, subtract, "
        "exponentiate, add, divide) and its backward as 4; what backward recomputes counts for backward."
    )
    return Sheet("Softmax beside the products of attention", heads, cells, note, names=True)


def _phases(trace: Trace) -> dict[str, int]:
    times: dict[str, int] = {}
    for each in (work.placed for work in working(trace)):
        if each.span.name in PHASES and each.span.category == "user_annotation":
            times[each.span.name] = times.get(each.span.name, 0) + each.node.duration
    return times


def spread_sheets(traces: Sequence[Trace], limit: int) -> list[Sheet]:
    """The ranks compared, if there are several: phases, operators by self time, collectives, and kernels."""
    if len(traces) < 2:
        return []
    device = any(on_device(trace) for trace in traces)

    def sheet(title: str, times: Callable[[Trace], dict[str, int]], note: str = "") -> Sheet:
        return spread_sheet(pivot({trace.rank: times(trace) for trace in traces}, limit), title, note)

    of = "device_self" if device else "cpu_self"
    return [
        sheet("Phases over the ranks, host time", _phases, SPREAD_NOTE),
        sheet(
            f"Operators over the ranks, self {CLOCK['device' if device else 'cpu']}",
            lambda trace: times_of(op_rows(trace), of),
        ),
        sheet("Parts over the ranks", lambda trace: times_of(kind_rows(trace), "total")),
        sheet("Collectives over the ranks", lambda trace: times_of(collective_rows(trace), "total")),
        sheet("Kernels over the ranks", lambda trace: times_of(kernel_rows(trace), "total")),
    ]


def spread_sheet(rows: Sequence[Spread], title: str, note: str = "") -> Sheet:
    """Least, mean, most and the slowest rank."""
    heads = ["name", "min", "mean", "max", "max on rank", "imbalance"]
    cells = [
        [
            row.name,
            milliseconds(row.least),
            milliseconds(row.mean),
            milliseconds(row.most),
            str(row.most_rank),
            f"{row.imbalance:.2f}",
        ]
        for row in rows
    ]
    return Sheet(title, heads, cells, note, names=True)
