"""How long do a forward pass, a backward pass and a training step take? `python -m benchmarks.e2e --size xl`."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
import torch
from rich.table import Table

from benchmarks.plan import Bench, Settings, make_bench, peak_of
from benchmarks.records import RESULTS, Record, append_records, machine_name
from benchmarks.workload import PHASES, Work, Workload, check
from cs336_systems import console
from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost import MODES, Hardware, count_parameters
from cs336_systems.cost.fit import describe_parts, require_fit
from cs336_systems.errors import UserError
from cs336_systems.machine import choose_device, usable_memory
from cs336_systems.presets import course_sizes

HEADS = ("size", "pass", "mean", "± std", "median", "predicted", "tokens/s", "FLOP/s", "MFU", "peak", "predicted")


def show_plan(bench: Bench, size: str, work: Work) -> float:
    """Print what each pass needs and whether it will be run; returns the expected seconds of all runs."""
    settings, seq = bench.settings, work.config.context_length
    parameters = format_count(sum(count_parameters(work.config).values()), billion="B")
    runs = bench.plan(work)
    seconds = sum(bench.passes(work, mode) * bench.seconds(work, mode) for mode in runs)
    shown = [mode for modes in runs.values() for mode in modes]
    table = Table(
        title=f"{size}: {parameters} parameters, batch {work.batch} x {seq}, {work.precision}; "
        f"{format_bytes(bench.usable)} usable",
        title_justify="left",
    )
    for column in ("pass", "needs", "of which", "predicted", ""):
        table.add_column(column, justify="right" if column in ("needs", "predicted") else "left")
    for mode in [settings.mode] if settings.mode else MODES:
        predicted = bench.predicted(work, mode)
        time, parts = format_seconds(predicted["mean_ms"] / 1e3), describe_parts(predicted["memory_by_part"])
        verdict = "" if mode in shown else "does not fit"
        table.add_row(mode, format_bytes(predicted["peak_memory_bytes"]), parts, time, verdict)
    out = console.console()
    out.print(table)
    if runs:
        counts = ", ".join(f"{mode} {bench.passes(work, mode)} times" for mode in runs)
        out.print(f"{counts} ({settings.warmup} to warm up): about {format_seconds(seconds)} to measure\n")
    return seconds


def measure_size(bench: Bench, size: str, work: Work) -> Iterator[Record]:
    """Gate, build, run and record one size; the modes that do not fit come last."""
    settings, runs, measured = bench.settings, bench.plan(work), set()
    try:
        if runs:
            off, tolerance = check(work)
            print(f"gate: one block's loss and gradient equal float64's within {off:.1e} (tolerance {tolerance:.1e})")
            print(f"building {size}", file=sys.stderr)
            workload = Workload(work)
        for run, modes in runs.items():
            passes = bench.passes(work, run)
            with console.progress(f"{size} {run}", passes, passes * bench.seconds(work, run)) as advance:
                done = workload.run(run, settings.warmup, passes - settings.warmup, advance)
            if not torch.isfinite(workload.loss):
                raise UserError(f"{size} {run}: the loss is {workload.loss.item()}, so no speed is reported")
            for mode in modes:
                measured.add(mode)
                yield bench.record(size, work, mode, done.total(PHASES[mode]), peak_of(done, mode))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"{size}: out of memory although it was counted to fit", file=sys.stderr)
    for mode in [settings.mode] if settings.mode else MODES:
        if mode not in measured:
            yield bench.missing(size, work, mode)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory, which only a GPU's allocator says by the type of its error."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def show_records(records: list[Record], hardware: Hardware) -> None:
    """The table of what was measured, predictions beside it, and what did not fit."""
    peak, copy = format_count(hardware.matmul_flops), format_bytes(hardware.bandwidth)
    title = f"{hardware.name}: {peak}FLOP/s and {copy}/s, {hardware.source}"
    table = Table(title=title, title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("size", "pass") else "right")
    for record in records:
        name, mode, metrics = record.config["size"], record.config["mode"], record.metrics
        predicted = record.predicted
        expected = [format_seconds(predicted["mean_ms"] / 1e3), format_bytes(predicted["peak_memory_bytes"])]
        if record.status != "ok":
            table.add_row(name, mode, "does not fit", "", "", expected[0], "", "", "", "", expected[1], style="dim")
            continue
        times = [format_seconds(metrics[key] / 1e3) for key in ("mean_ms", "std_ms", "median_ms")]
        speeds = [format_count(metrics[key]) for key in ("tokens_per_s", "flops_per_s")]
        peak = "unknown" if metrics["peak_memory_bytes"] is None else format_bytes(metrics["peak_memory_bytes"])
        table.add_row(name, mode, *times, expected[0], *speeds, f"{metrics['mfu']:.0%}", peak, expected[1])
    out = console.console()
    out.print(table)
    for record in records:
        for flag in record.flags:
            out.print(f"{record.config['size']} {record.config['mode']}: {flag}")


def run(settings: Settings) -> list[Record]:
    """Plan, measure, print and, unless it is a smoke run, record. Raises UserError for what cannot be run."""
    if settings.smoke:
        settings = replace(settings, size="tiny", all_sizes=False, batch_size=1, warmup=0, steps=1)
    device = choose_device(settings.device)
    sizes = course_sizes(settings.year) if settings.all_sizes else (settings.size,)
    works = {size: settings.work(size, device) for size in sizes}
    if settings.mode and not settings.all_sizes:
        work = works[settings.size]
        seq = work.config.context_length
        usable = usable_memory(device)
        require_fit(settings.size, work.config, work.batch, seq, settings.mode, settings.precision, usable)
    bench = make_bench(settings, device)
    total = sum(show_plan(bench, size, work) for size, work in works.items())
    if settings.all_sizes:
        print(f"all sizes: about {format_seconds(total)} to measure, building apart")
    records: list[Record] = []
    folder = settings.results or RESULTS / machine_name(device, settings.machine)
    for size, work in works.items():
        fresh = list(measure_size(bench, size, work))
        path = None if settings.smoke else append_records(fresh, folder)
        records += fresh
    show_records(records, bench.hardware)
    if not settings.smoke:
        print(f"{len(records)} records appended to {path}")
    return records


@click.command()
@console.options(Settings)
def main(**settings: Any) -> None:
    """Time forward, backward and optimizer of a transformer on random tokens, with predictions beside the figures."""
    run(Settings(**settings))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
