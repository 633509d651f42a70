"""Times of a forward pass, a backward pass and a training step: `python -m benchmarks.e2e --size xl`."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.lib.gate import check
from benchmarks.lib.options import command, refuse_ignored
from benchmarks.lib.sheets import median, remarks, show, time
from benchmarks.lib.workload import PHASES, Bench, Case, PassSettings, Workload, make_bench, peak_of
from benchmarks.records import Record
from cs336_systems.cost import MODES, Mode, count_parameters
from cs336_systems.cost.capacity import describe_parts
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.machine import out_of_memory, usable_memory
from cs336_systems.host.table import Table
from cs336_systems.presets import course_sizes, with_edition

PLAN = ("pass", "needs", "of which", "predicted", "is")
COLUMNS = ("size", "pass", "measured", "predicted", "tokens/s", "MFU", "peak memory", "predicted")


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
    runs, warmup, measured = bench.plan(case), bench.settings.warmup, list[Record]()
    if runs:
        if warmup:
            gate(size, case)
        print(f"building {size}", file=sys.stderr)
        workload = Workload(case)
    for timed, modes in runs.items():
        passes = bench.passes(case, timed)
        try:
            with console.progress(f"{size} {timed}", passes, passes * bench.seconds(case, timed)) as advance:
                done = workload.run(timed, warmup, passes - warmup, advance)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            print(f"{size} {timed}: out of memory although it was counted to fit", file=sys.stderr)
            break
        if not torch.isfinite(workload.loss):
            raise UserError(f"{size} {timed}: the loss is {workload.loss.item()}, so no speed is reported")
        for mode in modes:
            peak = peak_of(done, mode, case.compiled)
            measured.append(bench.record(size, case, mode, done.total(PHASES[mode]), peak))
        if warmup:
            yield from measured[-len(modes) :]
    if measured and not warmup:
        gate(size, case)
        yield from measured
    for mode in set_modes(bench.settings):
        if mode not in [record.config["mode"] for record in measured]:
            yield bench.missing(size, case, mode)


def set_modes(settings: PassSettings) -> tuple[Mode, ...]:
    """The modes that were asked for."""
    return (settings.mode,) if settings.mode else MODES


def label(record: Record) -> str:
    """The size, and what one pass takes."""
    config = record.config
    return f"{config['size']} {config['batch_size']} x {config['context']}"


def row(record: Record) -> list[str]:
    """One record as cells of `COLUMNS`; what did not fit shows what it would have needed."""
    metrics, predicted = record.metrics, record.predicted
    seconds, memory = time(predicted["mean_ms"]), format_bytes(predicted["peak_memory_bytes"])
    start = [label(record), str(record.config["mode"])]
    if record.status != "ok":
        return [*start, "does not fit", seconds, "", "", "", memory]
    peak = "unknown" if metrics["peak_memory_bytes"] is None else format_bytes(metrics["peak_memory_bytes"])
    speed = [format_count(metrics["tokens_per_s"]), f"{metrics['mfu']:.0%}"]
    return [*start, median(record), seconds, *speed, peak, memory]


@command(PassSettings)
def main(settings: PassSettings) -> None:
    """Time forward, backward and optimizer of a transformer on random tokens, beside predictions."""
    refuse_ignored({"all_sizes": ("measures all of them", ("size",))})
    if settings.smoke:
        settings = replace(settings, size="tiny", all_sizes=False, batch_size=1, context=32, warmup=0, steps=1)
    device = settings.on
    usable = usable_memory(device)
    sizes = course_sizes(settings.year) if settings.all_sizes else (settings.size,)
    cases = {size: settings.case(size, device) for size in sizes}
    if settings.mode and not settings.all_sizes:
        cases[settings.size].require_fit(settings.size, settings.mode, usable)
    recorder = settings.recorder("e2e", device)
    bench = make_bench(settings, device, usable)
    total = sum(show_plan(bench, size, case) for size, case in cases.items())
    if settings.all_sizes:
        print(f"all sizes: about {format_seconds(total)} to measure, building apart")
    for size, case in cases.items():
        for record in measure_size(bench, size, case):
            recorder.keep(record)
    peak, copy = format_count(bench.hardware.matmul_flops), format_bytes(bench.hardware.bandwidth)
    title = f"{bench.hardware.name}: {peak}FLOP/s and {copy}/s, {bench.hardware.source}"
    show([Table(title, COLUMNS, list(map(row, recorder.records)))])
    for line in remarks(recorder.records, lambda record: f"{label(record)} {record.config['mode']}"):
        console.console().print(line)
    recorder.tell()


if __name__ == "__main__":
    sys.exit(console.run_command(main))
