"""Output of a scaling study: Megatron-LM's line of every layout, a summary, all timers, and remarks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Record, read_records
from benchmarks.scaling_anomalies import anomalies
from benchmarks.scaling_logs import read_runs
from benchmarks.scaling_record import MEBIBYTE, study_run
from benchmarks.scaling_table import NONE, PUBLISHED, find_base, findings, markdown, percent, timer_sheet
from cs336_systems.host import console
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.table import Table
from cs336_systems.host.text import markdown_text

NOT_YET = "Not measured yet: `python -m benchmarks.scaling`, then `make readme`."
APART = (  # what a table's records have in common, layouts aside
    *("size", "objective", "precision", "scaling", "micro_batch_size", "context", "backend", "data", "recompute"),
    *("device", "threads"),
)
Cell = Callable[[dict[str, Any], dict[str, Any]], str]  # of a record's metrics and predictions
COLUMNS: dict[str, Cell] = {
    "step": lambda found, said: format_seconds(found["median_ms"] / 1e3),
    "predicted": lambda found, said: format_seconds(said["mean_ms"] / 1e3) if "mean_ms" in said else NONE,
    "ms / sample": lambda found, said: f"{found['ms_per_sample']:.3g}",
    "tokens / s": lambda found, said: format_count(found["tokens_per_s"]),
    "efficiency": lambda found, said: percent(found["efficiency_median"]),
    "quartiles": lambda found, said: f"{100 * found['efficiency_low']:.0f}-{100 * found['efficiency_high']:.0f}%",
    "bubble": lambda found, said: percent(found["bubble"]),
    "theory": lambda found, said: percent(said["bubble"]),
    "peak memory": lambda found, said: spread([each / MEBIBYTE for each in known(found["memory_bytes"])], " MiB"),
    "util.": lambda found, said: spread(known(found["gpu_utilisation"]), "%"),
    "HFU": lambda found, said: percent(found["hfu"]),
    "MFU": lambda found, said: percent(found["mfu"]),
}


def summary(records: Sequence[Record]) -> Table:
    """One row a layout; without a column for the GPUs' utilisation where there are none."""
    config, where = records[0].config, records[0].environment
    ranks = f"{config['backend']} ranks" + (f" of {config['threads']} thread(s)" if config["device"] == "cpu" else "")
    title = (
        f"{config['size']} {config['objective']} in {config['precision']}, {config['scaling']} scaling, micro-batch "
        f"{config['micro_batch_size']} x {config['context']}; {ranks} on {where['device']}, {where['cores']} cores"
    )
    note = (
        "layout: tp x pp x dp. step: median of all turns. efficiency: throughput of a rank over that in "
        f"{markdown_text(config['base'])}, median and quartiles of the rounds. bubble: share of the pipeline's time in "
        "which a rank "
        "computes nothing, mean over all ranks, from their timers; theory: its closed form. peak memory: least and "
        "most over the ranks."
    )
    columns = {name: cell for name, cell in COLUMNS.items() if name != "util." or config["device"] == "cuda"}
    rows = [[str(record.config["layout"]), *row(record, list(columns.values()))] for record in records]
    return Table(title, ["layout", *columns], rows, note)


def row(record: Record, columns: Sequence[Cell]) -> list[str]:
    """A record as cells; dashes where there is no speed."""
    if not record.samples_ms:
        return [NONE] * len(columns)
    return [cell(record.metrics, record.predicted) for cell in columns]


def known(values: Sequence[float | None]) -> list[float]:
    """Those of the ranks that have a value."""
    return [each for each in values if each is not None]


def spread(values: Sequence[float], unit: str) -> str:
    """`75-77 MiB`: the least and the most."""
    if not values:
        return NONE
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{least}{unit}" if least == most else f"{least}-{most}{unit}"


def timer_line(record: Record) -> str:
    """The last rank's timers, as Megatron-LM prints them."""
    shown = study_run(record).timers.items()
    return " | ".join(["time (ms)", *(f"{name}: {value:.2f}" for name, value in shown)])


def remarks(records: Sequence[Record]) -> list[str]:
    """The flags of some records, but for the anomalies, each once with the layouts that it is about."""
    told = {each.text for each in anomalies([study_run(record) for record in records if record.samples_ms])}
    found: dict[str, list[str]] = {}
    for record in records:
        for flag in record.flags:
            if flag not in told:
                found.setdefault(flag, []).append(record.config["layout"])
    return [f"{', '.join(layouts)}: {flag}" for flag, layouts in found.items()]


def show(records: Sequence[Record]) -> None:
    """The timer line of every layout; for each precision the summary, all timers, remarks and findings.

    Not `scaling_sheet`, whose bubble and FLOPs are what a log lets one know: the summary has them of all ranks.
    """
    out = console.console()
    out.print("Timers of the last rank, as Megatron-LM prints them: a step's mean in the round of median speed.")
    for record in records:
        if record.samples_ms:
            name = f"{record.config['layout']} {record.config['precision']}"
            out.print(name, timer_line(record), soft_wrap=True, markup=False)
    for mine in tables_apart(records):
        measured = [study_run(record) for record in mine if record.samples_ms]
        for sheet in [summary(mine), *([timer_sheet(measured)] if measured else [])]:
            out.print(sheet.table())
        for line in remarks(mine) + findings(measured):
            out.print(line, markup=False)


def tables_apart(records: Sequence[Record]) -> list[list[Record]]:
    """The records that one table can show, a list each."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.config[name] for name in APART), []).append(record)
    return list(groups.values())


def scaling_tables(results: Path) -> list[str]:
    """Markdown of every machine's records, the summary, all timers of the last rank, and what is to be said of them;
    and of the published study."""
    tables = []
    for path in sorted(results.glob("*/scaling.jsonl")):
        for mine in tables_apart(read_records(path)):
            parts = [summary(mine).markdown(0)]
            measured = [study_run(record) for record in mine if record.samples_ms]
            if measured:
                parts.append(timer_sheet(measured).markdown(0))
            said = [*remarks(mine), *(each.text for each in anomalies(measured))]
            parts += ["\n".join(f"- {markdown_text(line)}" for line in said)] if said else []
            tables.append("\n".join(parts))
    return [*(tables or [NOT_YET]), published()]


def published() -> str:
    """Markdown of the study that this one takes after: its six rows, and what in them is not to be believed."""
    runs = read_runs([PUBLISHED])
    return markdown(runs, find_base(runs), level=3)
