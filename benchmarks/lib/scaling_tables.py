"""Tables of scaling studies: records measured here, imported runs, all timers, and remarks on them."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.scaling_anomalies import anomalies
from benchmarks.lib.scaling_logs import read_runs
from benchmarks.lib.scaling_record import MEBIBYTE, study_run
from benchmarks.lib.scaling_run import (
    ScalingRun,
    bubble,
    default_base,
    efficiency,
    ideal_bubble,
    parent,
    sample_flops,
    top_level_ms,
    utilisation,
)
from benchmarks.records import Record, read_records
from cs336_systems.host import console
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.table import Table
from cs336_systems.host.text import markdown_text

PUBLISHED = Path(__file__).parents[1] / "published" / "megatron_bert_345m.json"
NOT_YET = "Not measured yet: `python -m benchmarks.scaling`, then `make readme`."
NONE = "-"
EXPLAINED = (
    "gbs: global batch; m: micro-batches of a replica in an iteration. eff.: throughput of a rank, relative to the run "
    "on so many. bubble: (forward-recv + "
    "backward-embedding-all-reduce) / all of the pipeline's timers; ideal: (p - 1) / (m + p - 1)."
)
APART = (  # settings that a table's records share, layouts aside
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
    "peak memory": lambda found, said: spread(found["memory_bytes"], " MiB", MEBIBYTE),
    "util.": lambda found, said: spread(found["gpu_utilisation"], "%"),
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
        "which a rank computes nothing, mean over all ranks, from their timers; theory: its closed form. peak memory: "
        "least and most over the ranks."
    )
    columns = {name: cell for name, cell in COLUMNS.items() if name != "util." or config["device"] == "cuda"}
    rows = []
    for record in records:
        found = [cell(record.metrics, record.predicted) if record.samples_ms else NONE for cell in columns.values()]
        rows.append([str(record.config["layout"]), *found])
    return Table(title, ["layout", *columns], rows, note)


def spread(values: Sequence[float | None], unit: str = "", scale: float = 1) -> str:
    """`5,624-6,176 MiB`: the least and the most of the values that are known."""
    known = [each / scale for each in values if each is not None]
    if not known:
        return NONE
    least, most = f"{min(known):,.0f}", f"{max(known):,.0f}"
    return f"{least}{unit}" if least == most else f"{least}-{most}{unit}"


def scaling_sheet(runs: Sequence[ScalingRun], base: ScalingRun | None = None) -> Table:
    """A row for each run: its speed, its efficiency from the first run and from `base`, and the causes of the loss.

    A row smaller than `base` has no efficiency relative to it.
    """
    first, base = runs[0], base or default_base(runs)
    columns: dict[str, Callable[[ScalingRun], str]] = {
        "run": lambda run: run.name,
        "W": lambda run: str(run.world),
        "TP/PP/DP": lambda run: run.layout,
        "gbs": lambda run: str(run.global_batch_size),
        "m": lambda run: str(run.micro_batches),
        "ms / sample": lambda run: figure(run.ms_per_sample),
        "ms / iter": lambda run: f"{run.iteration_ms:.1f}",
        "samples / s": lambda run: f"{run.samples_per_s:.1f}",
        "tokens / s": lambda run: thousands(run.tokens_per_s),
        f"eff. vs {first.world}": lambda run: percent(efficiency(run, first)),
        f"eff. vs {base.world} ": lambda run: percent(efficiency(run, base) if run.world >= base.world else None),
        "bubble": lambda run: percent(bubble(run)),
        "ideal": lambda run: percent(ideal_bubble(run)),
        "HFU": lambda run: percent(utilisation(run)),
        "MFU": lambda run: percent(utilisation(run, model_only=True)),
        "util.": lambda run: NONE if run.gpu_util is None else f"{run.gpu_util:.0f}%",
    }
    if len({(run.layout, run.global_batch_size) for run in runs}) == len(runs):
        del columns["run"]
    if base is first:
        del columns[f"eff. vs {base.world} "]
    found = anomalies(runs)
    notes = [", ".join(str(n) for n, each in enumerate(found, 1) if i in each.runs) for i in range(len(runs))]
    rows = [[cell(run) for cell in columns.values()] + [note] for run, note in zip(runs, notes, strict=True)]
    sources = "; ".join(dict.fromkeys(run.source for run in runs if run.source))
    return Table(f"Scaling: {sources or 'measured here'}", [*map(str.strip, columns), "see"], rows, explanation(runs))


def explanation(runs: Sequence[ScalingRun]) -> str:
    """Text below the table: the meaning of its columns, with this study's figures."""
    parts = [EXPLAINED]
    run = runs[-1]
    spent, model = sample_flops(run), sample_flops(run, model_only=True)
    if spent is not None and model is not None and run.peak_flops:
        parts.append(
            f"HFU: {format_count(spent)}FLOP a sample with recompute {run.recompute}, MFU: {format_count(model)}FLOP "
            f"without, over {format_count(run.peak_flops)}FLOP/s a device."
        )
    busy = [each.gpu_util for each in runs if each.gpu_util is not None]
    arithmetic = [share for each in runs if (share := utilisation(each)) is not None]
    if busy and arithmetic:
        parts.append(
            f"util. is nvidia-smi's: {min(busy):.0f}% to {max(busy):.0f}% of the time some kernel was there, be it one "
            f"that waits in a collective; the arithmetic needs {min(arithmetic):.1%} to {max(arithmetic):.1%}."
        )
    return " ".join(parts)


def timer_sheet(runs: Sequence[ScalingRun]) -> Table:
    """A row for each timer, a column for each run; then what no timer knows, and the memory."""
    names = list(dict.fromkeys(name for run in sorted(runs, key=lambda run: -len(run.timers)) for name in run.timers))
    rows = [
        [name, parent(name, names) or "", *(f"{run.timers[name]:.2f}" if name in run.timers else NONE for run in runs)]
        for name in names
    ]
    rows.append(["sum of those in no other", "", *(f"{top_level_ms(run):.1f}" for run in runs)])
    rows.append(["iteration", "", *(f"{run.iteration_ms:.1f}" for run in runs)])
    rows.append(["unaccounted", "", *(f"{run.iteration_ms - top_level_ms(run):.1f}" for run in runs)])
    if any(run.gpu_memory for run in runs):
        rows.append(["memory, MiB", "", *(spread(run.gpu_memory or ()) for run in runs)])
    totals = {run.gpu_memory_total for run in runs} - {None}
    note = f"Memory: least and most over the ranks, of {totals.pop():,.0f} MiB each." if len(totals) == 1 else ""
    whose = "the most over the ranks" if any(run.over_ranks for run in runs) else "the last rank"
    heads = ["timer", "inside", *run_heads(runs)]
    return Table(f"Timers of {whose}, ms an iteration", heads, rows, note, names=True)


def run_heads(runs: Sequence[ScalingRun]) -> list[str]:
    """A head for each run: `W = 8`, tp x pp x dp among runs on as many ranks, the name among those laid out alike."""
    worlds, layouts = Counter(run.world for run in runs), Counter(run.layout for run in runs)
    return [
        f"W = {run.world}" if worlds[run.world] == 1 else
        f"{run.tp}x{run.pp}x{run.dp}" if layouts[run.layout] == 1 else run.name
        for run in runs
    ]  # fmt: skip


def figure(value: float) -> str:
    """22.39 -> `22.39`, 0.012345 -> `0.0123`: two decimals, or three digits if it is small."""
    return f"{round(value, 2):,g}" if value >= 0.1 else f"{value:.3g}"


def thousands(value: float | None) -> str:
    """22867 -> `22.9k`, 512 -> `512`."""
    if value is None:
        return NONE
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """0.386 -> `38.6%`, and a dash for what is unknown."""
    return NONE if share is None else f"{share:.1%}"


def findings(runs: Sequence[ScalingRun]) -> list[str]:
    """Results in the table to doubt: a sentence each, numbered as in the table."""
    return [f"{number}. {each.text}" for number, each in enumerate(anomalies(runs), 1)]


def remarks(records: Sequence[Record]) -> list[str]:
    """The flags of some records, but for the anomalies, each once with the layouts that it is about."""
    told = {each.text for each in anomalies([study_run(record) for record in records if record.samples_ms])}
    found: dict[str, list[str]] = {}
    for record in records:
        for flag in record.flags:
            if flag not in told:
                found.setdefault(flag, []).append(record.config["layout"])
    return [f"{', '.join(layouts)}: {flag}" for flag, layouts in found.items()]


def markdown(runs: Sequence[ScalingRun], level: int = 2) -> str:
    """The tables and the findings as Markdown, with headings of a level."""
    parts = [scaling_sheet(runs).markdown(level), timer_sheet(runs).markdown(level)]
    return "\n".join([*parts, *(["To be read with care:\n", *findings(runs)] if findings(runs) else [])]) + "\n"


def show_runs(runs: Sequence[ScalingRun]) -> None:
    """Print the tables and the findings."""
    out = console.console()
    for sheet in (scaling_sheet(runs), timer_sheet(runs)):
        out.print(sheet.table())
    for line in findings(runs):
        out.print(line, markup=False)


def tables_apart(records: Sequence[Record]) -> list[list[Record]]:
    """The records that one table can show, a list each."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.config[name] for name in APART), []).append(record)
    return list(groups.values())


def sheets(records: list[Record]) -> tuple[list[Table], list[str], list[ScalingRun]]:
    """Tables of records that belong together, remarks on them, and those that were measured as runs of a study.

    Not `scaling_sheet`, whose bubble and FLOPs are what a log lets one know: the summary has them of all ranks.
    """
    measured = [study_run(record) for record in records if record.samples_ms]
    return [summary(records), *([timer_sheet(measured)] if measured else [])], remarks(records), measured


def show_records(records: Sequence[Record]) -> None:
    """Print, for each precision, the summary, all timers of the last rank, remarks and findings."""
    out = console.console()
    for mine in tables_apart(records):
        tables, said, measured = sheets(mine)
        for table in tables:
            out.print(table.table())
        for line in said + findings(measured):
            out.print(line, markup=False)


def scaling_tables(results: Path) -> list[str]:
    """Markdown of every machine's records, and of the published study with its doubtful figures."""
    found = []
    for path in sorted(results.glob("*/scaling.jsonl")):
        for mine in tables_apart(read_records(path)):
            tables, said, measured = sheets(mine)
            lines = [f"- {markdown_text(line)}" for line in (*said, *(each.text for each in anomalies(measured)))]
            found.append("\n".join([*(table.markdown(0) for table in tables), *lines]))
    return [*(found or [NOT_YET]), published()]


def published() -> str:
    """Markdown of the published study that this benchmark follows."""
    return markdown(read_runs([PUBLISHED]), level=3)
