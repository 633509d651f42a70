"""Times of a forward pass, a backward pass and a training step: `python -m benchmarks.e2e --size xl`."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
import torch

from benchmarks.gate import check
from benchmarks.lib.plan import Bench, PassSettings, make_bench, peak_of
from benchmarks.lib.sheets import show, time
from benchmarks.lib.workload import PHASES, Case, Workload
from benchmarks.records import Record
from cs336_systems.cost import MODES, Hardware, Mode, count_parameters
from cs336_systems.cost.capacity import describe_parts, require_fit
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.machine import choose_device, out_of_memory, usable_memory
from cs336_systems.host.table import Table
from cs336_systems.presets import course_sizes, with_edition

PLAN = ("pass", "needs", "of which", "predicted", "is")
COLUMNS = ("size", "pass", "mean", "± std", "median", "predicted", "tokens/s", "FLOP/s", "MFU", "peak", "predicted")


def show_plan(bench: Bench, size: str, case: Case) -> float:
    """Print what each pass needs and whether it will be run; returns the expected seconds of all runs."""
    settings, seq = bench.settings, case.config.context_length
    parameters = format_count(sum(count_parameters(case.config).values()), billion="B")
    runs = bench.plan(case)
    seconds = sum(bench.passes(case, mode) * bench.seconds(case, mode) for mode in runs)
    shown = [mode for modes in runs.values() for mode in modes]
    title = (
        f"{with_edition(size, settings.year)}: {parameters} parameters, batch {case.batch} x {seq}, {case.precision}"
    )
    rows = []
    for mode in set_modes(settings):
        predicted = bench.predicted(case, mode)
        need, parts = format_bytes(predicted["peak_memory_bytes"]), describe_parts(predicted["memory_by_part"])
        rows.append([mode, need, parts, time(predicted["mean_ms"]), "measured" if mode in shown else "does not fit"])
    show([Table(f"{title}; {format_bytes(bench.usable)} usable", PLAN, rows)])
    if runs:
        counts = ", ".join(f"{mode} {bench.passes(case, mode)} times" for mode in runs)
        console.console().print(
            f"{counts} ({settings.warmup} to warm up): about {format_seconds(seconds)} to measure\n"
        )
    return seconds


def gate(size: str, case: Case) -> None:
    """Check the case and say so. Raises WrongResultError."""
    error, tolerance = check(case)
    print(f"gate: one block of {size} equals plain float64 within {error:.1e} (tolerance {tolerance:.1e})")


def measure_size(bench: Bench, size: str, case: Case) -> Iterator[Record]:
    """Check, build, time and record one size, each mode as soon as it is known; modes that do not fit come last.

    Without a warm-up, the check comes after the timing, which it would warm up, and before the figures are shown.
    """
    queue, warmup, measured = list(bench.plan(case).items()), bench.settings.warmup, []
    if queue and warmup:
        gate(size, case)
    if queue:
        print(f"building {size}", file=sys.stderr)
        workload = Workload(case)
    while queue:
        timed, modes = queue.pop(0)
        passes = bench.passes(case, timed)
        try:
            with console.progress(f"{size} {timed}", passes, passes * bench.seconds(case, timed)) as advance:
                done = workload.run(timed, warmup, passes - warmup, advance)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            print(f"{size} {timed}: out of memory although it was counted to fit", file=sys.stderr)
            workload.release()
            queue += [("forward-backward", modes[:2])] if timed == "step" and len(modes) > 1 else []
            continue
        if not torch.isfinite(workload.loss):
            raise UserError(f"{size} {timed}: the loss is {workload.loss.item()}, so no speed is reported")
        for mode in modes:
            peak = peak_of(done, mode, case.compiled)
            measured.append(bench.record(size, case, mode, done.total(PHASES[mode]), peak))
            if warmup:
                yield measured[-1]
    if measured and not warmup:
        gate(size, case)
        yield from measured
    for mode in set_modes(bench.settings):
        if mode not in [record.config["mode"] for record in measured]:
            yield bench.missing(size, case, mode)


def set_modes(settings: PassSettings) -> tuple[Mode, ...]:
    """The modes that were asked for."""
    return (settings.mode,) if settings.mode else MODES


def show_records(records: list[Record], hardware: Hardware) -> None:
    """The table of what was measured, predictions beside it, and what did not fit."""
    rows = []
    for record in records:
        config, metrics, predicted = record.config, record.metrics, record.predicted
        start = [with_edition(config["size"], config["year"]), config["mode"]]
        expected = [time(predicted["mean_ms"]), format_bytes(predicted["peak_memory_bytes"])]
        if record.status != "ok":
            rows.append([*start, "does not fit", "", "", expected[0], "", "", "", "", expected[1]])
            continue
        times = [time(metrics[f"{key}_ms"]) for key in ("mean", "std", "median")]
        speeds = [format_count(metrics[key]) for key in ("tokens_per_s", "flops_per_s")]
        peak = "unknown" if metrics["peak_memory_bytes"] is None else format_bytes(metrics["peak_memory_bytes"])
        rows.append([*start, *times, expected[0], *speeds, f"{metrics['mfu']:.0%}", peak, expected[1]])
    peak, copy = format_count(hardware.matmul_flops), format_bytes(hardware.bandwidth)
    show([Table(f"{hardware.name}: {peak}FLOP/s and {copy}/s, {hardware.source}", COLUMNS, rows)])
    for record in records:
        for flag in record.flags:
            console.console().print(f"{record.config['size']} {record.config['mode']}: {flag}")


def run(settings: PassSettings) -> list[Record]:
    """Plan, measure, print and, unless it is a smoke run, record. Raises UserError for what cannot be run."""
    if settings.smoke:
        settings = replace(settings, size="tiny", all_sizes=False, batch_size=1, warmup=0, steps=1)
    device = choose_device(settings.device)
    usable = usable_memory(device)
    sizes = course_sizes(settings.year) if settings.all_sizes else (settings.size,)
    cases = {size: settings.case(size, device) for size in sizes}
    if settings.mode and not settings.all_sizes:
        case = cases[settings.size]
        seq = case.config.context_length
        require_fit(settings.size, case.config, case.batch, seq, settings.mode, case.needs, usable)
    recorder = settings.recorder("e2e", device)
    bench = make_bench(settings, device, usable)
    total = sum(show_plan(bench, size, case) for size, case in cases.items())
    if settings.all_sizes:
        print(f"all sizes: about {format_seconds(total)} to measure, building apart")
    for size, case in cases.items():
        for record in measure_size(bench, size, case):
            recorder.keep(record)
    show_records(recorder.records, bench.hardware)
    recorder.tell()
    return recorder.records


@click.command()
@console.options(PassSettings)
def main(**settings: Any) -> None:
    """Time forward, backward and optimizer of a transformer on random tokens, beside predictions."""
    run(PassSettings(**settings))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
