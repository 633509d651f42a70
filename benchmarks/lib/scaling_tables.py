"""Tables of scaling studies: records measured here, imported runs, all timers, and findings below them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.scaling_anomalies import anomalies, marks
from benchmarks.lib.scaling_logs import (
    MEBIBYTE,
    ScalingRun,
    bubble,
    default_base,
    efficiency,
    ideal_bubble,
    parent,
    read_runs,
    top_level_ms,
)
from benchmarks.lib.scaling_record import layout_name, study_run
from benchmarks.lib.sheets import groups, pages, remarks
from benchmarks.records import Record
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
    "HFU": lambda found, said: percent(found["hfu"]),
    "MFU": lambda found, said: percent(found["mfu"]),
}


def sample_flops(run: ScalingRun, model_only: bool = False) -> float | None:
    """FLOPs of one sequence; None if the shape is not known. Matrix products only, of layers with an MLP of 4 h.

    A layer's forward pass takes 24 s h^2 for its weights and 4 s^2 h for its attention, the head's 2 s h V; backward
    takes twice as much, and recompute repeats the layers' forward, but not the head's. With full recompute that makes
    96 s l h^2 (1 + s / 6h + V / 16lh) (arXiv:2104.04473, equation 3 and appendix), without it
    72 s l h^2 (1 + s / 6h + V / 12lh) (arXiv:2205.05198, appendix A), which `model_only` returns in any case. Selective
    recompute repeats the attention's 4 s^2 h only.
    """
    if run.num_layers is None or run.hidden_size is None or run.seq_length is None or run.vocab_size is None:
        return None
    s, h, v = float(run.seq_length), float(run.hidden_size), float(run.vocab_size)
    attention, head = 4 * s * s * h, 2 * s * h * v
    layer = 24 * s * h * h + attention
    repeated = 0 if model_only else {"none": 0, "selective": attention, "full": layer}[run.recompute]
    return run.num_layers * (3 * layer + repeated) + 3 * head


def utilisation(run: ScalingRun, model_only: bool = False) -> float | None:
    """FLOP/s of the hardware (HFU), or of the model's own arithmetic (MFU), over the devices' peak; None if unknown."""
    flops = sample_flops(run, model_only)
    if flops is None or run.peak_flops is None:
        return None
    return flops * run.samples_per_s / (run.world * run.peak_flops)


def percent(share: float | None) -> str:
    """0.386 -> `38.6%`, and a dash for what is unknown."""
    return NONE if share is None else f"{share:.1%}"


def spread(values: Sequence[float | None], unit: str = "", scale: float = 1) -> str:
    """`5,624-6,176 MiB`: the least and the most of the values that are known."""
    known = [each / scale for each in values if each is not None]
    ends = dict.fromkeys(f"{pick(known):,.0f}" for pick in (min, max) if known)
    return f"{'-'.join(ends)}{unit}" if known else NONE


def summary(records: Sequence[Record]) -> Table:
    """One row a layout. Bubble and FLOPs are those of all ranks, where `scaling_sheet` has what a log lets one know."""
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
        "least and most over the ranks. ms / sample, tokens / s, bubble, HFU and MFU: the turn of median speed."
    )
    rows = []
    for record in records:
        found = [cell(record.metrics, record.predicted) if record.samples_ms else NONE for cell in COLUMNS.values()]
        rows.append([layout_name(record), *found])
    return Table(title, ["layout", *COLUMNS], rows, note)


def scaling_sheet(runs: Sequence[ScalingRun]) -> Table:
    """A row for each run: its speed, the causes of the loss, and its efficiency relative to the first run and to the
    smallest that is laid out like the largest; a row smaller than that has none."""
    first, base = runs[0], default_base(runs)
    columns: dict[str, Callable[[ScalingRun], str]] = {
        "run": lambda run: run.name,
        "W": lambda run: str(run.world),
        "TP/PP/DP": lambda run: run.layout,
        "gbs": lambda run: str(run.global_batch_size),
        "m": lambda run: str(run.micro_batches),
        "ms / sample": lambda run: f"{round(run.ms_per_sample, 2 if run.ms_per_sample >= 0.1 else 4):,g}",
        "ms / iter": lambda run: f"{run.iteration_ms:.1f}",
        "samples / s": lambda run: f"{run.samples_per_s:.1f}",
        "tokens / s": lambda run: f"{run.samples_per_s * run.seq_length / 1e3:.1f}k" if run.seq_length else NONE,
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
    rows = [[*(cell(run) for cell in columns.values()), see] for run, see in zip(runs, marks(runs), strict=True)]
    sources = "; ".join(dict.fromkeys(run.source for run in runs if run.source))
    return Table(f"Scaling: {sources or 'measured here'}", [*map(str.strip, columns), "see"], rows, _explained(runs))


def _explained(runs: Sequence[ScalingRun]) -> str:
    """Text below the table: the meaning of its columns, with this study's figures."""
    parts, run = [EXPLAINED], runs[-1]
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


def timer_sheet(runs: Sequence[ScalingRun], below: str = "") -> Table:
    """A row for each timer, a column for each run; then what no timer knows, and the memory; `below` ends the note.

    Columns are headed `W = 8`, by tp x pp x dp among runs on as many ranks, by name among those laid out alike.
    """
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
    worlds, layouts = Counter(run.world for run in runs), Counter(run.layout for run in runs)
    heads = [
        f"W = {run.world}" if worlds[run.world] == 1 else
        f"{run.tp}x{run.pp}x{run.dp}" if layouts[run.layout] == 1 else run.name
        for run in runs
    ]  # fmt: skip
    totals = {run.gpu_memory_total for run in runs} - {None}
    note = f"Memory: least and most over the ranks, of {totals.pop():,.0f} MiB each." if len(totals) == 1 else ""
    title = f"Timers of {'the most over the ranks' if any(r.over_ranks for r in runs) else 'the last rank'}"
    note = "\n\n".join(filter(None, (note, below)))
    return Table(f"{title}, ms an iteration", ["timer", "inside", *heads], rows, note, names=True)


def run_sheets(runs: Sequence[ScalingRun]) -> list[Table]:
    """Both tables of imported runs, with a numbered list of the findings below."""
    found = [f"{number}. {each.text}" for number, each in enumerate(anomalies(runs), 1)]
    return [scaling_sheet(runs), timer_sheet(runs, "\n".join(["To be read with care:\n", *found]) if found else "")]


def markdown(runs: Sequence[ScalingRun], level: int = 2) -> str:
    """These tables as Markdown, with headings of a level."""
    return "\n".join(table.markdown(level) for table in run_sheets(runs))


def tables_apart(records: Sequence[Record]) -> list[list[Record]]:
    """The records that one table can show, a list each."""
    return groups(records, lambda record: tuple(record.config[name] for name in APART))


def sheets(records: Sequence[Record]) -> list[Table]:
    """For records that belong together: the summary, the timers of the last rank, and below them all flags."""
    found = []
    for mine in tables_apart(records):
        flags = "\n".join(f"- {markdown_text(line)}" for line in remarks(mine, layout_name))
        if measured := [study_run(record) for record in mine if record.samples_ms]:
            found += [summary(mine), timer_sheet(measured, flags)]
        else:
            table = summary(mine)
            found.append(replace(table, note=f"{table.note}\n\n{flags}"))
    return found


def scaling_tables(results: Path) -> list[str]:
    """Markdown of every machine's records, and of the published study with what in it is not to be believed."""
    return [*(pages(results, "scaling", sheets) or [NOT_YET]), markdown(read_runs([PUBLISHED]), level=3)]
