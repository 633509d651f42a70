"""The table of a scaling study, from runs measured here or imported: throughput, efficiency, bubble, every timer."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.allreduce_plot import HOW_TO_PLOT, can_plot
from benchmarks.scaling_anomalies import anomalies
from benchmarks.scaling_logs import read_runs
from benchmarks.scaling_plot import save
from benchmarks.scaling_run import (
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
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import finite, format_count
from cs336_systems.host.table import Table
from cs336_systems.host.text import printable

PUBLISHED = Path(__file__).parent / "published" / "megatron_bert_345m.json"
NONE = "-"
EXPLAINED = (
    "gbs: global batch; m: micro-batches of a replica in an iteration. eff.: throughput of a rank, relative to the run "
    "on so many. bubble: (forward-recv + "
    "backward-embedding-all-reduce) / all of the pipeline's timers; ideal: (p - 1) / (m + p - 1)."
)


def find_base(runs: Sequence[ScalingRun], world: int | None = None) -> ScalingRun:
    """The run on `world` ranks that efficiency is relative to, or the one to choose by default.

    Raises UserError if no run has so many ranks.
    """
    if world is None:
        return default_base(runs)
    for run in runs:
        if run.world == world:
            return run
    have = ", ".join(dict.fromkeys(str(run.world) for run in runs))
    raise UserError(f"--base {world}: no run has {world} ranks; choose from {have}")


def scaling_sheet(runs: Sequence[ScalingRun], base: ScalingRun | None = None) -> Table:
    """A row for each run: how fast, how well it scales from the first run and from `base`, where the rest went.

    A row smaller than `base` has no efficiency relative to it. Raises UserError without a run.
    """
    if not runs:
        raise UserError("no runs, no table of scaling: measure some, or give a log")
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
        rows.append(["memory, MiB", "", *map(memory, runs)])
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


def memory(run: ScalingRun) -> str:
    """`5,624-6,176`: MiB, least and most over the ranks."""
    if run.gpu_memory is None:
        return NONE
    least, most = run.gpu_memory
    return f"{least:,.0f}" if least == most else f"{least:,.0f}-{most:,.0f}"


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


def markdown(runs: Sequence[ScalingRun], base: ScalingRun | None = None, level: int = 2) -> str:
    """The tables and the findings as Markdown, with headings of a level."""
    parts = [scaling_sheet(runs, base).markdown(level), timer_sheet(runs).markdown(level)]
    return "\n".join([*parts, *(["To be read with care:\n", *findings(runs)] if findings(runs) else [])]) + "\n"


def show(runs: Sequence[ScalingRun], base: ScalingRun | None = None) -> None:
    """Print the tables and the findings."""
    out = console.console()
    for sheet in (scaling_sheet(runs, base), timer_sheet(runs)):
        out.print(sheet.table())
    for line in findings(runs):
        out.print(line, markup=False)


@click.command("import-log")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--base", type=int, help="Ranks of the run that efficiency is relative to, beside the first one.")
@click.option("--peak-tflops", type=float, callback=finite, help="TFLOP/s of a device, if logs lack it: 312 for A100.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Picture to draw: .png, .svg or .pdf.")
def import_log(
    files: tuple[Path, ...], base: int | None, peak_tflops: float | None, as_markdown: bool, plot: Path | None
) -> None:
    """Tables of the runs in logs of Megatron-LM and of this project's train (the .jsonl of --log-file).

    Without FILES, of the published study of BERT-345M.
    """
    runs = read_runs(files or (PUBLISHED,))
    if peak_tflops is not None:
        if not peak_tflops > 0:
            raise UserError(f"--peak-tflops must be positive, not {peak_tflops:g}")
        runs = [replace(run, peak_flops=run.peak_flops or 1e12 * peak_tflops) for run in runs]
    chosen = find_base(runs, base)
    if plot is not None and not can_plot():
        raise UserError(HOW_TO_PLOT)
    if as_markdown:
        print(markdown(runs, chosen), end="")
    else:
        show(runs, chosen)
    if plot is not None:
        print(printable(str(save(runs, plot, chosen))))
