"""Files of an evaluation: scores by word, and a profile of all ranks with the published profile's two tables."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.moe_blocks import Blocks
from cs336_systems.host.console import console as make_console
from cs336_systems.host.console import os_errors
from cs336_systems.host.table import Table
from cs336_systems.profiling import Trace, read_trace, trace_files
from cs336_systems.profiling.operators import OUTSIDE, OpRow, Sort, op_rows
from cs336_systems.profiling.overlap import overlaps
from cs336_systems.profiling.report import MERGED, PAGE, write_report
from cs336_systems.profiling.timeline import timeline
from cs336_systems.profiling.trace import uncollected

SHOWN = 25  # operators of a table, as many as were published
TABLES = "eval_lm.md"


def write_words(path: Path, blocks: Blocks, log_probs: dict[int, list[float]]) -> None:
    """A line for each word: its block, its place there, the word (a byte), its log-probability in nats. Raises
    UserError where the file cannot be written."""
    lines = ["block\tplace\tword\tlog_prob"]
    for number, values in log_probs.items():
        first = number * blocks.context + 1
        words = blocks.tokens[first : first + len(values)].tolist()
        lines += [
            f"{number}\t{i}\t{word}\t{value!r}" for i, (word, value) in enumerate(zip(words, values, strict=True))
        ]
    with os_errors(f"write {path}", "name another file with --words-file"):
        path.write_text("\n".join([*lines, ""]))


def write_profile(folder: Path, dispatch: str, console: Console) -> None:
    """From every rank's trace in a folder the merged one with tables and pictures; print the two tables."""
    traces = [read_trace(path) for path in trace_files(folder)]
    write_report(folder, traces, make_console(quiet=True))
    sheets = [sheet for sort in ("cpu", "device") if (sheet := operators(traces, dispatch, sort)) is not None]
    (folder / TABLES).write_text("\n".join(sheet.markdown() for sheet in sheets))
    for sheet in sheets:
        console.print(sheet.table())
    if len(sheets) == 1:
        console.print(f"{dispatch}: no table by CUDA total, for there is no device but the CPU.")
    if len(traces) > 1:
        console.print(waits_line(traces, dispatch))
    console.print(f"{folder}: {TABLES}, {MERGED} (all ranks on one clock, for https://ui.perfetto.dev), {PAGE}")


@uncollected()
def operators(traces: Sequence[Trace], dispatch: str, sort: Sort) -> Table | None:
    """Operators and tags by their total on the CPU or the device, the largest mean over ranks first; None for a device
    that is not there. Columns are those of torch.profiler, with the least and the most over ranks."""
    if sort == "device" and not any(timeline(trace).on_device for trace in traces):
        return None
    ranks = [{row.name: row for row in op_rows(trace) if row.name != OUTSIDE} for trace in traces]
    names = dict.fromkeys(name for rows in ranks for name in rows)
    table = [(name, [rows[name] for rows in ranks if name in rows]) for name in names]
    table.sort(key=lambda entry: -sum(getattr(row, f"{sort}_total") for row in entry[1]))
    cells = [_cells(name, rows, len(ranks), sort) for name, rows in table[:SHOWN]]
    clock = "CPU" if sort == "cpu" else "CUDA"
    heads = ("name", f"self {clock} %", f"self {clock}", f"{clock} total %", "min", "mean", "max", f"{clock} time avg")
    note = f"Milliseconds; means over {len(ranks)} ranks, and the least and the most {clock} total of a rank."
    return Table(f"{dispatch}: sorted by {clock} total", (*heads, "# of calls"), cells, note, names=True)


def _cells(name: str, rows: Sequence[OpRow], ranks: int, sort: Sort) -> list[str]:
    totals = [getattr(row, f"{sort}_total") for row in rows] + [0] * (ranks - len(rows))
    own, calls = sum(getattr(row, f"{sort}_self") for row in rows) / ranks, [row.calls for row in rows]
    shares = [sum(getattr(row, f"{sort}_{what}_share") for row in rows) / ranks for what in ("self", "total")]
    mean = sum(totals) / ranks
    called = str(calls[0]) if len(set(calls)) == 1 and len(rows) == ranks else f"{min(calls)}-{max(calls)}"
    times = [_milliseconds(time) for time in (min(totals), mean, max(totals), sum(totals) / max(1, sum(calls)))]
    shown = [f"{share:.1%}" for share in shares]
    return [name, shown[0], _milliseconds(own), shown[1], *times, called]


def _milliseconds(nanoseconds: float) -> str:
    """A call may take microseconds and a run minutes, and the columns are many."""
    return f"{nanoseconds / 1e6:,.{0 if nanoseconds > 1e11 else 1 if nanoseconds > 1e9 else 3}f}"


def waits_line(traces: Sequence[Trace], dispatch: str) -> str:
    """How much of communication was waiting for the last rank, over all ranks."""
    found = overlaps(traces)
    waited, moved = (sum(getattr(each, what) or 0 for each in found) for what in ("waited", "transferred"))
    total = max(1, waited + moved)
    return (
        f"{dispatch}: of {total / len(found) / 1e9:.2f} s in collectives a rank, {waited / total:.0%} was waiting for "
        "the last rank to join, the rest transferring"
    )
