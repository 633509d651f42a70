"""Commands over the traces of a run: `python -m cs336_systems.profiling merge DIR`, and `report DIR`."""

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click

from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.table import Table
from cs336_systems.profiling.align import offsets
from cs336_systems.profiling.merge import CROSSING, merge
from cs336_systems.profiling.report import MERGED, missing_ranks, write_report
from cs336_systems.profiling.trace import Trace, read_trace, trace_files, uncollected, write_json

CLOCKS = (
    "rank: rank text; host: host text; ahead by: nanoseconds ms or -; to within: bound ms or -;known from: source text"
)


@click.group(no_args_is_help=False)
def main() -> None:
    """Look at the traces of all ranks of a run."""


@main.command("merge")
@click.argument("folder", type=click.Path(path_type=Path))
@uncollected()
def merge_command(folder: Path) -> None:
    """Merge the traces in FOLDER, of all ranks, into one on one clock."""
    traces = read_ranks(trace_files(folder))
    merged, out = merge(traces), folder / MERGED
    with console.os_errors(f"write {out}"):
        write_json(merged, out)
    screen = console.console()
    clocks = offsets(traces)
    ranks = [SimpleNamespace(rank=each.rank, host=each.host, **clocks[each.rank]._asdict()) for each in traces]
    screen.print(Table.of("Clocks against the lowest rank's, in ms", ranks, CLOCKS, names=False).table())
    if note := missing_ranks(traces):
        screen.print(note)
    phases = Counter(event["ph"] for event in merged["traceEvents"])
    if crossing := merged["otherData"]["crossing"]:
        screen.print(CROSSING.format(crossing))
    screen.print(f"{phases['X']} slices, {phases['f']} arrows, {len(traces)} rank{'s' * (len(traces) > 1)}")
    screen.print(f"{out}: open it at https://ui.perfetto.dev", soft_wrap=True)


@main.command("report")
@click.argument("folder", type=click.Path(path_type=Path))
@uncollected()
def report_command(folder: Path) -> None:
    """Write all reports on the traces in FOLDER: tables, pictures, overlap, one trace for all ranks."""
    write_report(folder, read_ranks(trace_files(folder)), console.console())


def read_ranks(files: list[Path]) -> list[Trace]:
    """The traces in some files, by rank. Raises UserError for a file that is no trace, and for two of one rank. A trace
    made without a process group has the rank in its file's name, and is of as many ranks as the others say or show."""
    found: dict[int, tuple[Path, Trace]] = {}
    for file in files:
        trace = read_trace(file)
        named = re.match(r"rank(\d+)\.", file.name)
        told = {**trace.chrome.get("distributedInfo", {}), **trace.ours}
        if named and "rank" not in told:
            trace = replace(trace, rank=int(named[1]))
        if trace.rank in found:
            raise UserError(f"{found[trace.rank][0]} and {file} are both of rank {trace.rank}; name one of them")
        found[trace.rank] = (file, trace if "world_size" in told else replace(trace, world_size=0))
    runs = {trace.ours["run"]: file for file, trace in found.values() if "run" in trace.ours}
    if len(runs) > 1:
        raise UserError(f"{' and '.join(map(str, list(runs.values())[:2]))} are of different runs; keep those of one")
    size = max((max(trace.world_size, rank + 1) for rank, (_, trace) in found.items()), default=1)
    traces = (found[rank][1] for rank in sorted(found))
    return [trace if trace.world_size else replace(trace, world_size=size) for trace in traces]


if __name__ == "__main__":
    sys.exit(console.run_command(main))
