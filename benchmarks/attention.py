"""Time of attention, kernel by kernel, and bytes that it keeps: `python -m benchmarks.attention --grid flash`."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import click

from benchmarks.harness import summarise, suspicions
from benchmarks.lib.attention_candidates import (
    BACKWARD,
    BOTH,
    CANDIDATES,
    FORWARD,
    AttentionTask,
    Inputs,
    flops,
    gate,
    load_ours,
    peak_bytes,
    prepare,
)
from benchmarks.lib.contest import OURS, Contest, Refusal, refuse
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
from benchmarks.lib.options import COUNT
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, setting
from cs336_systems.host.machine import choose_device

Grid = Literal["course", "flash", "leaderboard"]
COURSE_SEQUENCES, FLASH_SEQUENCES = (256, 1024, 4096, 8192, 16384), tuple(2**power for power in range(7, 17))
DIMS = (16, 32, 64, 128)
GRID_CANDIDATES: dict[str, tuple[str, ...]] = {
    "course": (OURS, "eager", "compiled"),
    "flash": tuple(name for name in CANDIDATES if name != "compiled"),
    "leaderboard": tuple(name for name in CANDIDATES if name not in ("compiled", "tiled")),
}
ROUNDS = {"course": 100, "flash": 15, "leaderboard": 30}
LEADERBOARD = (
    AttentionTask("leaderboard", 16, 16384, 64, "bf16", causal=True),
    AttentionTask("leaderboard", 16, 16384, 128, "bf16", causal=False, backward=False),
)
# Spring 2025's leaderboard, on an H100; and what plain Triton reaches there for the second task (FlashAttention-3's
# figures, arXiv:2407.08608, and Triton's own benchmarks since).
PUBLISHED = {LEADERBOARD[0]: {"published_best_ms": 5.364}, LEADERBOARD[1]: {"goal_flops_per_s": 430e12}}
COLUMNS = (
    "batch x seq x dim", "pass", "median", "predicted", "FLOP/s", "MFU", "/ best other", "kept", "peak", "predicted",
)  # fmt: skip
LABELS = {FORWARD: "forward", BACKWARD: "backward", BOTH: "both"}
CAPTION = (
    "FLOPs: 4 batch seq^2 dim forward, half with a causal mask; backward 2.5 x. predicted: FLOPs / the rate of the "
    "largest matrix product measured, MFU the FLOP/s over that rate. / best other: time over the fastest other's, in "
    "turns. kept: memory in use before backward (CPU: what forward keeps for it). "
    "predicted peak: inputs, outputs, gradients, and naive attention's scores"
)


@dataclass(frozen=True)
class AttentionSettings(KernelSettings):
    """Options of the command line, one field each."""

    grid: Grid = setting("course", "Shapes of one of the write-up's tasks.")
    sequence: tuple[int, ...] = setting((), "Context instead of the grid's; may be repeated.", type=COUNT)
    dim: tuple[int, ...] = setting((), "Head dimension instead of the grid's; may be repeated.", type=COUNT)

    def tasks(self) -> list[AttentionTask]:
        """The shapes of the grid, short sequences first, from which the time of long ones is estimated."""
        if self.grid == "leaderboard":
            tasks = [
                replace(task, seq=seq, dim=dim, dtype=self.dtype or task.dtype)
                for task in LEADERBOARD
                for seq in self.sequence or (task.seq,)
                for dim in self.dim or (task.dim,)
            ]
        else:
            flash = self.grid == "flash"
            dtypes: tuple[DtypeName, ...] = ("bf16", "fp32") if flash else ("fp32",)
            tasks = [
                AttentionTask(self.grid, 1 if flash else 8, seq, dim, dtype, causal=flash)
                for dtype in ((self.dtype,) if self.dtype else dtypes)
                for dim in self.dim or DIMS
                for seq in self.sequence or (FLASH_SEQUENCES if flash else COURSE_SEQUENCES)
            ]
        if self.forward and not self.backward:
            tasks = [replace(task, backward=False) for task in tasks]
        return [task for task in tasks if task.backward or self.wants(FORWARD)]


def predict(session: Session, task: AttentionTask, name: str, what: str) -> dict[str, Any]:
    """The compute-bound model's time and the peak memory, under the names of the metrics."""
    rate = session.hardware(task.dtype).matmul_flops
    predicted = {"median_ms": 1e3 * flops(task, what) / rate, "flops": flops(task, what), "peak_flops_per_s": rate}
    return predicted | {"formula": "flops / peak_flops_per_s", "peak_memory_bytes": peak_bytes(name, task)}


def passes(session: Session, task: AttentionTask) -> list[str]:
    """The passes to record: a backward comes with the forward before it."""
    kinds = [FORWARD, BACKWARD, BOTH] if task.backward else [FORWARD]
    return [what for what in kinds if session.settings.wants(what)]


def seconds_of(session: Session, task: AttentionTask) -> float:
    """The predicted seconds of one call of all phases."""
    what = BOTH if task.backward else FORWARD
    return flops(task, what) / session.hardware(task.dtype).matmul_flops


def hold(session: Session, task: AttentionTask) -> None:
    """Gate, time and record every candidate on one shape."""
    contest, playing, seconds = Contest(session.clock), [], seconds_of(session, task)
    inputs = None
    for name in names_for(session, task.grid):
        if (need := peak_bytes(name, task)) > session.usable:
            reason = f"needs {format_bytes(need)}, {format_bytes(session.usable)} usable"
            contest.refusals[name] = Refusal("out-of-memory", reason)
        elif objection := session.patience.objection(f"{name} {task.dtype}", seconds):
            session.note(f"{name} left out, too slow for --patience", f"{task}, {objection}")
        else:
            try:
                inputs = inputs or Inputs(task, session.device)
            except RuntimeError as error:
                contest.refusals[name] = refuse(name, error)
                continue
            contest.enter(name, partial(prepare, name, task, inputs))
            playing.append(f"{name} {task.dtype}")
    if contest.entries:
        contest.play(session.patience.rounds(playing, seconds, session.settings.rounds or ROUNDS[task.grid]))
    for name in CANDIDATES:
        for what in passes(session, task):
            if name in contest.entries:
                session.recorder.keep(measured(session, contest, name, task, what))
            elif name in contest.refusals:
                config, predicted = configure(name, task, what), predict(session, task, name, what)
                session.refused(name, contest.refusals[name], config, predicted)


def configure(name: str, task: AttentionTask, what: str) -> dict[str, Any]:
    """Settings that identify a measurement."""
    shape = {"grid": task.grid, "batch": task.batch, "seq": task.seq, "dim": task.dim, "dtype": task.dtype}
    return {"candidate": name, "pass": what} | shape | {"causal": task.causal, "keeps": task.backward}


def measured(session: Session, contest: Contest, name: str, task: AttentionTask, what: str) -> Record:
    """The record of a candidate that took its turns."""
    entry, predicted = contest.entries[name], predict(session, task, name, what)
    samples, hardware = entry.samples[what], session.hardware(task.dtype)
    metrics: dict[str, Any] = summarise(samples) | entry.metrics
    if what == BOTH or not task.backward:
        session.patience.learn(f"{name} {task.dtype}", predicted["median_ms"] / 1e3, metrics["median_ms"] / 1e3)
    rate = 1e3 * predicted["flops"] / metrics["median_ms"]
    metrics |= {"flops": predicted["flops"], "flops_per_s": rate, "mfu": rate / hardware.matmul_flops}
    metrics |= {"calls": entry.calls, "gate_error": entry.gate_error} | contest.against_others(name, what)
    if what == BOTH or not task.backward:
        metrics |= PUBLISHED.get(task, {})
    flags = suspicions(metrics, predicted["flops"], 0.0, hardware)
    config = configure(name, task, what)
    return Record(session.benchmark, config, session.stamp, samples, metrics, predicted, flags)


def names_for(session: Session, grid: str) -> list[str]:
    """The grid's candidates that are wanted and that run on this device."""
    return [name for name in session.settings.timed(CANDIDATES, session.device) if name in GRID_CANDIDATES[grid]]


def gate_ours(session: Session, tasks: list[AttentionTask]) -> str:
    """Check our kernel on short sequences; returns the error and the shapes. Raises WrongResultError, and
    UnavailableError for a dim that the kernel cannot do."""
    kinds, dim = dict.fromkeys((task.dtype, task.causal) for task in tasks), min(task.dim for task in tasks)
    few, error = [AttentionTask("gate", 1, 32, dim, dtype, causal) for dtype, causal in kinds], 0.0
    for task in few:
        error = max(error, gate(OURS, load_ours(task, session.device), task, Inputs(task, session.device)))
    return f"within {error:.1e} ({', '.join(map(str, few))})"


def cells(record: Record) -> list[str]:
    """One record as cells of the table."""
    config, metrics, predicted = record.config, record.metrics, record.predicted
    times, memory = time_cells(record), format_bytes(predicted["peak_memory_bytes"])
    if record.status != "ok":
        return [LABELS[config["pass"]], *times, "", "", "", "", "", memory]
    other = f"{metrics['ratio_median']:.2f}" if "ratio_median" in metrics else ""
    held = [metrics[key] for key in ("before_backward_bytes", "peak_memory_bytes")]
    bytes_held = ["unknown" if each is None else format_bytes(each) for each in held]
    speed = [format_count(metrics["flops_per_s"]), f"{metrics['mfu']:.0%}"]
    return [LABELS[config["pass"]], *times, *speed, other, *bytes_held, memory]


def heading(record: Record) -> str:
    """The shape of a record."""
    config = record.config
    return f"{config['batch']} x {config['seq']} x {config['dim']} {config['dtype']}{' causal' * config['causal']}"


def show(session: Session) -> None:
    """Print the table, suspect or missing results, and the distance to the leaderboard."""
    dtypes = dict.fromkeys(record.config["dtype"] for record in session.records)
    rates = [f"{dtype} {format_count(session.hardware(dtype).matmul_flops)}FLOP/s" for dtype in dtypes]
    show_table(session, COLUMNS, f"{CAPTION}\nLargest matrix products: {', '.join(rates)}.", heading, cells)
    for record in session.records:
        metrics, name = record.metrics, record.config["candidate"]
        if best := metrics.get("published_best_ms"):
            print(f"{name}: {metrics['median_ms'] / best:.2f} x the best published time, {best} ms on an H100")
        if goal := metrics.get("goal_flops_per_s"):
            print(f"{name}: {metrics['flops_per_s'] / goal:.2f} x the goal of {format_count(goal)}FLOP/s")


def run(settings: AttentionSettings) -> list[Record]:
    """Measure, print and, unless it is a smoke run, record. Raises UserError for what cannot be run."""
    if settings.smoke:
        sequence, dim = settings.sequence or (64,), settings.dim or (16,)
        settings = replace(settings, sequence=sequence, dim=dim, rounds=2)
    device, tasks, present = choose_device(settings.device), settings.tasks(), GRID_CANDIDATES[settings.grid]
    idle = settings.idle(CANDIDATES, device, present, absent=f"not in the grid {settings.grid}")
    session = open_session("attention", settings, idle)
    if device.type == "cpu":
        check_interpreted(session, CANDIDATES, partial(gate_ours, session, tasks))
    calls = (settings.rounds or ROUNDS[settings.grid]) + 4
    names = names_for(session, settings.grid)
    each = [min(settings.patience, calls * len(names) * seconds_of(session, task)) for task in tasks]
    hold_contests(session, tasks, sum(each), hold, show)
    return session.records


@click.command()
@console.options(AttentionSettings)
def main(**settings: Any) -> None:
    """Time attention forward and backward on the shapes of one of the write-up's tasks, with predictions."""
    run(AttentionSettings(**settings))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
