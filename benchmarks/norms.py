"""Times of RMSNorm and LayerNorm beside that of a copy: `python -m benchmarks.norms`."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
import torch

from benchmarks.harness import ratios, summarise, suspicions
from benchmarks.lib.contest import OURS, Contest, Refusal, format_ms, refuse
from benchmarks.lib.kernel_run import (
    DtypeName,
    KernelSettings,
    Session,
    check_interpreted,
    hold_contests,
    open_session,
    show_table,
    time_cells,
)
from benchmarks.lib.norm_candidates import (
    BOTH,
    CANDIDATES,
    FORWARD,
    Inputs,
    Shape,
    bytes_moved,
    gate,
    memory_needed,
    ours,
    partial_rows,
    prepare,
    prepare_copy,
)
from benchmarks.lib.options import COUNT
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, setting
from cs336_systems.host.machine import choose_device

COPY = "copy"
ROUNDS = 15
COURSE_ROWS, COURSE_COLUMNS = 50_000, (1024, 2048, 4096, 8192)
LLM_SHAPES = (
    (4096, 1024), (4096, 4096), (4096, 8192), (8192, 8192), (16384, 4096), (32768, 1024), (32768, 2048), (32768, 4096),
    (32768, 8192), (32768, 16384), (32768, 32768), (32768, 65536), (16384, 131072), (8192, 262144),
)  # fmt: skip
CPU_ELEMENTS = 2**24  # of x on a CPU, unless --rows says otherwise
COLUMNS = ("rows x columns, pass", "median", "predicted", "GB/s", "of copy", "/ best other", "host")
CAPTION = (
    "GB/s: x and y counted once (backward: x, dy and dx), weights, 1 / rms and partial weight gradients, over the "
    "median. of copy: the time of a copy that moves as many bytes, in turn with the others, over the candidate's. "
    "/ best other: time over the fastest other's. predicted: bytes / the rate of a large copy. host: for how long one "
    "call on 16 x 1024 keeps it busy; on a CPU, how long it takes"
)


@dataclass(frozen=True)
class NormSettings(KernelSettings):
    """Options of the command line, one field each."""

    rows: int | None = setting(None, "Rows.  [default: each shape's, on a CPU fewer: 16 M elements]", type=COUNT)
    columns: tuple[int, ...] = setting((), "Columns; may be repeated.", type=COUNT)

    def shapes(self, device: torch.device) -> list[Shape]:
        """The shapes to measure: the write-up's and a language model's, or those that were asked for."""
        if self.rows or self.columns:
            names: tuple[DtypeName, ...] = (self.dtype or "fp32",)
            sizes = {names[0]: [(self.rows or COURSE_ROWS, columns) for columns in self.columns or COURSE_COLUMNS]}
        else:
            sizes = {"fp32": [(COURSE_ROWS, columns) for columns in COURSE_COLUMNS], "bf16": list(LLM_SHAPES)}
        found = []
        for dtype, pairs in sizes.items():
            for rows, columns in pairs if self.dtype in (None, dtype) else ():
                fewer = max(1, CPU_ELEMENTS // columns)
                kept = min(rows, fewer) if device.type == "cpu" and not self.rows else rows
                found += [Shape(kept, columns, dtype, what) for what in (FORWARD, BOTH) if self.wants(what)]
        return list(dict.fromkeys(found))


def predict(session: Session, shape: Shape) -> dict[str, Any]:
    """The memory-bound model's time, under the name of the metric, and what it is made of."""
    moved, rate = bytes_moved(shape, partial_rows(session.device)), session.hardware("fp32").bandwidth
    formula = "bytes / bandwidth_bytes_per_s"
    return {"median_ms": 1e3 * moved / rate, "bytes": moved, "bandwidth_bytes_per_s": rate, "formula": formula}


def hold(session: Session, shape: Shape) -> None:
    """Gate, time and record every candidate on one shape."""
    predicted = predict(session, shape)
    seconds, playing = predicted["median_ms"] / 1e3, []
    contest = Contest(session.clock)
    names = session.settings.timed(CANDIDATES, session.device)
    refusal: Refusal | None = None
    if (need := memory_needed(shape)) > session.usable:
        reason = f"needs {format_bytes(need)}, {format_bytes(session.usable)} usable"
        refusal = Refusal("out-of-memory", reason)
    else:
        try:
            inputs = Inputs(shape, session.device)
        except RuntimeError as error:
            refusal = refuse(COPY, error)
    if refusal:
        contest.refusals, names = dict.fromkeys(names, refusal), []
    for name in names:
        if objection := session.patience.objection(f"{name} {shape.dtype}", seconds):
            session.note(f"{name} left out, too slow for --patience", f"{shape}, {objection}")
            continue
        contest.enter(name, partial(prepare, session.clock, name, shape, inputs))
        playing.append(f"{name} {shape.dtype}")
    if contest.entries:
        contest.enter(COPY, partial(prepare_copy, session.clock, shape))
        contest.play(session.patience.rounds(playing, seconds, session.settings.rounds or ROUNDS))
    for name in (*CANDIDATES, COPY):
        config = {"candidate": name, "pass": shape.what, "rows": shape.rows, "columns": shape.columns}
        config |= {"dtype": shape.dtype}
        if name in contest.entries:
            session.recorder.keep(measured(session, contest, name, shape, config, predicted))
        elif name in contest.refusals:
            session.refused(name, contest.refusals[name], config, predicted)


def measured(
    session: Session, contest: Contest, name: str, shape: Shape, config: dict[str, Any], predicted: dict[str, Any]
) -> Record:
    """The record of a candidate that took its turns."""
    entry = contest.entries[name]
    samples, moved = entry.samples[shape.what], predicted["bytes"]
    metrics: dict[str, Any] = summarise(samples) | entry.metrics
    session.patience.learn(f"{name} {shape.dtype}", predicted["median_ms"] / 1e3, metrics["median_ms"] / 1e3)
    metrics |= {"bytes": moved, "bytes_per_s": 1e3 * moved / metrics["median_ms"], "calls": entry.calls}
    if name != COPY:
        metrics |= {"gate_error": entry.gate_error} | contest.against_others(name, shape.what, ignored=[COPY])
        if COPY in contest.entries:
            found = ratios(contest.entries[COPY].samples[shape.what], samples)
            metrics |= {key.replace("ratio", "copy_fraction"): value for key, value in found.items()}
    flags = suspicions(metrics, 0.0, moved, session.hardware("fp32"))
    return Record(session.benchmark, config, session.stamp, samples, metrics, predicted, flags)


def gate_ours(session: Session, shapes: list[Shape]) -> str:
    """Check our kernel on a few rows; returns the error and the shapes. Raises WrongResultError."""
    error, columns = 0.0, min(shape.columns for shape in shapes)
    for what, dtype in dict.fromkeys((shape.what, shape.dtype) for shape in shapes):
        few = Shape(8, columns, dtype, what)
        error = max(error, gate(OURS, ours, CANDIDATES[OURS], few, Inputs(few, session.device)))
    return f"within {error:.1e} on 8 x {columns}"


def cells(record: Record) -> list[str]:
    """One record as cells of the table."""
    metrics, times = record.metrics, time_cells(record)
    if record.status != "ok":
        return times
    copy = f"{metrics['copy_fraction_median']:.0%}" if "copy_fraction_median" in metrics else ""
    other = f"{metrics['ratio_median']:.2f}" if "ratio_median" in metrics else ""
    host = format_ms(metrics["host_us"] / 1e3) if "host_us" in metrics else ""
    return [*times, f"{metrics['bytes_per_s'] / 1e9:.4g}", copy, other, host]


def heading(record: Record) -> str:
    """The shape and the pass of a record."""
    config = record.config
    return f"{config['rows']} x {config['columns']} {config['dtype']}, {config['pass']}"


def show(session: Session) -> None:
    """The table of what was measured, predictions beside it, and below it what is suspect or missing."""
    copy = f"\nA large copy moves {session.hardware('fp32').bandwidth / 1e9:.4g} GB/s."
    if session.device.type == "cpu":
        copy += " On a CPU, all but the copy also wait for the system to hand out fresh memory."
    show_table(session, COLUMNS, CAPTION + copy, heading, cells)


def run(settings: NormSettings) -> list[Record]:
    """Measure, print and, unless it is a smoke run, record. Raises UserError for what cannot be run."""
    if settings.smoke:
        settings = replace(settings, rows=settings.rows or 64, columns=settings.columns or (128,), rounds=2)
    device = choose_device(settings.device)
    names = settings.timed(CANDIDATES, device)
    session = open_session("norms", settings, idle=settings.idle(CANDIDATES, device, present=CANDIDATES))
    shapes = settings.shapes(device)
    if device.type == "cpu":
        check_interpreted(session, CANDIDATES, partial(gate_ours, session, shapes))
        if fewer := [shape for shape in shapes if shape.rows != settings.rows]:
            print(f"on a CPU rows are scaled down to {CPU_ELEMENTS // 2**20} M elements a tensor ({fewer[0]}, ...)")
    calls = (settings.rounds or ROUNDS) + 4
    expected = sum(predict(session, shape)["median_ms"] for shape in shapes) / 1e3 * calls * 2 * len(names)
    hold_contests(session, shapes, expected, hold, show)
    return session.records


@click.command()
@console.options(NormSettings)
def main(**settings: Any) -> None:
    """Time normalisations forward and backward, each beside a copy of the same bytes and a prediction."""
    run(NormSettings(**settings))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
