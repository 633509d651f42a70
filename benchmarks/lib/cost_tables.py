"""The tables of docs/cost.md: machines, constants, published runs, and errors of this project's predictions.

All but the last are computed; nothing is measured here.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean, median, quantiles

from benchmarks.records import Record, read_records
from cs336_systems.cost.machines import CONSTANTS, SYSTEMS, Constants, System
from cs336_systems.cost.notebook.tables import DIFFERENCES
from cs336_systems.cost.runs import PUBLISHED, TrainingRun, families, left_out_errors, read_runs, summed_up
from cs336_systems.cost.stacks import STACKS
from cs336_systems.host.table import Table

OWN = ("kort22", "mlm2020")
MEANING = {
    "product": "of the attainable rate that large products reach in a run",
    "ramp": "steps of the inner dimension that beginning and ending a tile take",
    "wave": "of a wave of tiles that is empty",
    "fused": "of the rate of products that fused attention reaches",
    "memory": "of memory's bandwidth",
    "start": "s a kernel",
    "host": "s in which the host gives out a kernel",
    "call": "s a collective, whatever it sends",
    "inside": "of a link's bandwidth in a node",
    "between": "of a link's bandwidth between nodes",
    "hidden": "of a transfer behind computing that computing loses",
}


def cost_tables(results: Path) -> list[str]:
    """Every table, as Markdown."""
    runs = read_runs(PUBLISHED)
    constants = [(each.name, MEANING[each.name], f"{getattr(CONSTANTS, each.name):.3g}") for each in fields(Constants)]
    notebook = [(each.name, each.notebook, each.right, each.effect) for each in DIFFERENCES]
    tables = (
        machines_table(),
        Table("Constants", ("constant", "meaning", "value"), constants),
        stacks_table(),
        families_table(runs),
        runs_table([run for run in runs if run.id.startswith(OWN)]),
        own_table(results),
        Table("What the notebook has otherwise", ("", "the notebook", "right", "effect"), notebook),
    )
    return [table.markdown(level=3).rstrip("\n") for table in tables]


def machines_table() -> Table:
    """Table of the machine presets, and the sources of their figures."""
    columns: dict[str, Callable[[System], str]] = {
        "machine": lambda it: it.name,
        "16-bit TFLOP/s": lambda it: f"{it.matmul_flops / 1e12:.0f}",
        "attainable": lambda it: f"{it.attainable:.0%}",
        "8-bit TFLOP/s": lambda it: f"{it.narrow_flops / 1e12:.0f}" if it.narrow_flops else "",
        "attainable ": lambda it: f"{it.narrow_attainable:.0%}" if it.narrow_flops else "",
        "memory GB/s": lambda it: f"{it.bandwidth / 1e9:.0f}",
        "GiB": lambda it: f"{it.memory / 2**30:.0f}",
        "processors": lambda it: str(it.processors),
        "in a node": lambda it: str(it.node),
        "link GB/s": lambda it: f"{it.inside.bandwidth / 1e9:.0f}",
        "network GB/s": lambda it: f"{it.between.bandwidth / 1e9:.4g}",
    }
    rows = [[cell(system) for cell in columns.values()] for system in SYSTEMS.values()]
    names: dict[str, list[str]] = {}
    for system in SYSTEMS.values():
        for field, source in system.sources.items():
            names.setdefault(f"{field}: {source}", []).append(system.name)
    lines = [f"- {source} ({', '.join(machines)})" for source, machines in names.items()]
    note = "\n".join(["Each for one accelerator, links in one direction. Sources:", "", *lines])
    return Table("Machines", [*map(str.strip, columns)], rows, note)


def stacks_table() -> Table:
    """Implementations: their constants, the range of measured over predicted, and what they do to memory."""
    rows = []
    for each in STACKS.values():
        own = ", ".join(f"{name} {value:g}" for name, value in each.constants.items())
        newer = ", ".join(f"{name} x {value:g}" for name, value in each.hopper.items())
        memory = f"state x {each.state:g}, activations x {each.activations:g}, + {each.besides:g} GiB"
        ranges = (f"{low:.2f} to {high:.2f}" for low, high in (each.range, each.memory_range))
        rows.append((each.name, each.about, f"{own}{f'; on H100 {newer}' if newer else ''}", memory, *ranges))
    heads = ("stack", "what it is", "constants of its own", "memory", "time, range", "memory, range")
    return Table("Stacks", heads, rows)


def families_table(runs: Sequence[TrainingRun]) -> Table:
    """The error of each family, those that constants were fitted to first; then sentences on those that were fitted, on
    those that were not, and on figures without a source."""
    lines = []
    for (fitted, *names, stack, machine), some in families(runs, by_source=True).items():
        size, off, worst = summed_up(left_out_errors(some))
        inside, now = mean(run.in_range for run in some), summed_up(run.error for run in some)[0]
        cells = f"{size:.1%}", f"{off:+.1%}", f"{worst:+.1%}", f"{inside:.0%}", f"{now:.1%}"
        lines.append((*names, stack, machine, "yes" if fitted else "no", str(len(some)), *cells))
    columns = (
        "family", "source", "stack", "machine", "fitted", "runs", "error, left out", "mean", "worst", "in range",
        "error, fitted",
    )  # fmt: skip
    said = []
    for wanted, words in ((True, "were fitted"), (False, "were only predicted")):
        some = [run for run in runs if run.given["fitted"] == wanted]
        size, off, worst = summed_up(run.error for run in some)
        said.append(
            f"{len(some)} runs {words}: an error of {size:.1%} on average, {off:+.1%} with its sign, "
            f"{worst:+.1%} at worst."
        )
    unchecked = sum(not run.given["checked"] for run in runs)
    said.append(f"{unchecked} of all figures are quoted from memory of the table that is named.")
    return Table("Published runs, by family", columns, lines, " ".join(said))


def runs_table(runs: Sequence[TrainingRun]) -> Table:
    """Predicted and measured seconds of some runs."""
    lines = []
    for run, step in ((run, run.step) for run in runs):
        cells = f"{run.seconds:.4g}", f"{step.total:.4g}", f"{run.error:+.1%}", f"{step.mfu:.1%}"
        lines.append((run.id, f"{run.plan.ranks} {run.system.name}", *cells))
    heads = ("run", "machines", "measured s", "predicted s", "error", "MFU")
    return Table("Those of 2020 and of Korthikanti, one by one", heads, lines)


def own_table(results: Path) -> Table:
    """Table of predicted over measured time, for each benchmark's records that have a prediction."""
    lines = []
    for path in sorted(results.glob("*/*.jsonl")):
        ratios = sorted(ratio for record in read_records(path) if (ratio := predicted_ratio(record)) is not None)
        if len(ratios) < 2:
            continue
        low, _, high = quantiles(ratios, n=4)
        near = sum(0.8 <= ratio <= 1.25 for ratio in ratios) / len(ratios)
        cells = [f"{median(ratios):.2f}", *(f"{a:.2f} to {b:.2f}" for a, b in ((low, high), (ratios[0], ratios[-1])))]
        lines.append((path.parent.name, path.stem, str(len(ratios)), *cells, f"{near:.0%}"))
    columns = ("machine", "benchmark", "records", "predicted / measured", "quartiles", "range", "within a quarter")
    return Table("Predicted and measured by this project's own benchmarks", columns, lines)


def predicted_ratio(record: Record) -> float | None:
    """Predicted over measured time; None where there is not both."""
    for name in ("median_ms", "mean_ms"):
        said, seen = record.predicted.get(name), record.metrics.get(name)
        if said and seen:
            return float(said / seen)
    return None
