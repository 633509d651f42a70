"""Times of the course's two leaderboard tasks, measured by their rules: `python -m benchmarks.leaderboard`.

2025: attention forward and backward, 16 heads x 16,384 x 64, bf16, causal, on one H100. 2026: a training step of an 8B
model at a context of 32,768, batch 2, on two B200; here on one GPU, with as many of its layers as that holds.
"""

import gc
import importlib
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import click
import torch

from benchmarks.attention import LEADERBOARD
from benchmarks.harness import summarise, suspicions
from benchmarks.lib.attention_candidates import Inputs, flops, gate, load_ours
from benchmarks.lib.contest import OURS, UnavailableError, compiled, format_ms, ran_out
from benchmarks.lib.kernel import BOTH, Function
from benchmarks.lib.leaderboard_step import BATCH, FULL, LAPTOP, TINY, gate_step, largest_step, time_step
from benchmarks.lib.options import COUNT, RecordOptions
from benchmarks.lib.plan import measure_once
from benchmarks.records import Record
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, setting
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.host.text import printable
from cs336_systems.model.precision import set_matmul_precision
from kernels.launch import INTERPRETED

TASK = LEADERBOARD[0]
ATTENTION, STEP = "attention-2025", "step-2026"
# The best of cs336's boards in 2026-11: H. Brunborg, on an H100, and K. P. Keval, on two B200.
PUBLISHED = {ATTENTION: (5.364, "an H100"), STEP: (3837.0, "two B200")}
INTERPRETER = "on a CPU kernels run in Triton's interpreter: the time shows no more than that they do"
PLAIN = "on a CPU plain torch runs in the kernels' place"


@dataclass(frozen=True)
class LeaderboardSettings(RecordOptions):
    """Options of the command line, one field each."""

    task: Literal["attention-2025", "step-2026", "both"] = setting("both", "Edition of the leaderboard.")
    layers: int | None = setting(None, "Layers of the 8B model.  [default: as many as fit, 34 at most]", type=COUNT)
    batch_size: int | None = setting(None, "Sequences in a step.  [default: 2, or 1 if 2 do not fit]", type=COUNT)
    compile: bool = setting(False, "Compile the model with torch.compile.")
    seconds: float = setting(10.0, "Seconds of repetitions of the attention task.", type=click.FloatRange(0.1))
    steps: int = setting(3, "Timed training steps, after two untimed ones.", type=COUNT)
    device: Literal["cpu", "cuda"] | None = setting(None, "Device to run on.  [default: cuda if there is one]")


def published(task: str) -> dict[str, Any]:
    """The published best, as metrics."""
    best, where = PUBLISHED[task]
    return {"published_best_ms": best, "published_on": where}


def time_attention(flash: Function, seconds: float, device: torch.device) -> list[float]:
    """The rules' own loop: milliseconds of a forward and a backward, each on a cold cache."""
    shape = TASK.batch, TASK.seq, TASK.dim
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def forward_backward() -> None:
        flash(q, k, v).sum().backward()

    do_bench = importlib.import_module("triton.testing").do_bench
    return list(do_bench(forward_backward, rep=1e3 * seconds, warmup=1e2 * seconds, return_mode="all"))


def run_attention(settings: LeaderboardSettings, device: torch.device, hardware: Hardware) -> dict[str, Any]:
    """Gate and time the task of 2025: the fields of its record."""
    work = flops(TASK, BOTH)
    config = {"task": ATTENTION, "heads": TASK.batch, "seq": TASK.seq, "dim": TASK.dim, "dtype": TASK.dtype}
    fields = {
        "config": config | {"causal": TASK.causal},
        "predicted": {"median_ms": 1e3 * work / hardware.matmul_flops, "flops": work},
    }
    if device.type == "cpu":
        print(f"{ATTENTION}: not run on a CPU, where Triton has an interpreter only")
        return fields | {"status": "unsupported", "flags": ["needs a GPU"]}
    flash: Function = compiled(load_ours(TASK, device), device)
    error = gate(OURS, flash, TASK, Inputs(TASK, device))
    print(f"{ATTENTION}: gate: equals float64 within {error:.1e}")
    samples = time_attention(flash, 0.1 if settings.smoke else settings.seconds, device)
    return fields | {"samples_ms": samples, "metrics": {"gate_error": error} | published(ATTENTION)}


def run_step(settings: LeaderboardSettings, device: torch.device, hardware: Hardware) -> dict[str, Any]:
    """Gate and time the task of 2026, scaled to what fits: the fields of its record."""
    on_gpu = device.type == "cuda"
    full = TINY if settings.smoke else FULL if on_gpu else LAPTOP
    step = largest_step(full, settings.layers, settings.batch_size, settings.compile, usable_memory(device))
    model = step.config
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)}"
    shape = f"{layers} of width {model.d_model}, batch {step.batch} x {model.context_length}"
    if (model, step.batch) != (FULL, BATCH):
        shape += f" (the board's: {FULL.num_layers} of {FULL.d_model}, {BATCH} x {FULL.context_length})"
    print(f"{STEP}: {shape}; needs {format_bytes(step.bytes_needed)}")
    config = {"task": STEP, "layers": model.num_layers, "d_model": model.d_model, "batch_size": step.batch}
    config |= {"context": model.context_length, "compile": step.compiled, "dtype": "bf16"}
    fields = {"config": config, "predicted": step.predict(hardware)}
    try:
        error = gate_step(step, device)
        print(f"{STEP}: gate: one block equals float64 within {error:.1e} (tolerance {step.tolerance:.1e})")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        samples, peak = time_step(step, 1 if settings.smoke else settings.steps, device)
    except RuntimeError as failure:
        if not ran_out(failure):
            raise
        print(f"{STEP}: out of memory although it was counted to fit; --layers {max(1, model.num_layers - 2)} may fit")
        return fields | {"status": "out-of-memory", "flags": ["out of memory"]}
    flags = [] if on_gpu else [INTERPRETER if INTERPRETED else PLAIN]
    metrics: dict[str, Any] = {"gate_error": error, "peak_memory_bytes": peak}
    if replace(model, num_layers=FULL.num_layers) == FULL:
        metrics |= published(STEP)
    return fields | {"samples_ms": samples, "metrics": metrics, "flags": flags}


def finish(fields: dict[str, Any], hardware: Hardware, stamp: dict[str, Any]) -> Record:
    """The record, and one line that says what it shows."""
    config, predicted = fields["config"], fields["predicted"]
    if samples := fields.get("samples_ms"):
        metrics = summarise(samples) | fields["metrics"]
        metrics["flops_per_s"] = 1e3 * predicted["flops"] / metrics["median_ms"]
        metrics["mfu"] = metrics["flops_per_s"] / hardware.matmul_flops
        best = ""
        if "published_best_ms" in metrics:
            time, where = format_ms(metrics["published_best_ms"]), metrics["published_on"]
            best = f"; best published, the whole task on {where}: {time}"
        flags = suspicions(metrics, predicted["flops"], 0.0, hardware) + fields.get("flags", [])
        fields = fields | {"metrics": metrics, "flags": flags}
        print(
            f"{config['task']}: {format_ms(metrics['median_ms'])} (predicted {format_ms(predicted['median_ms'])}), "
            f"{format_count(metrics['flops_per_s'])}FLOP/s, MFU {metrics['mfu']:.0%}{best}"
        )
        for flag in flags:
            print(printable(f"{config['task']}: {flag}"))
    return Record("leaderboard", environment=stamp, **fields)


def run(settings: LeaderboardSettings) -> list[Record]:
    """Measure, print and, unless it is a smoke run, record each task. Raises UserError in the end if one was wrong or
    does not fit."""
    device = choose_device(settings.device)
    set_matmul_precision(device, "fp32")
    recorder = settings.recorder("leaderboard", device)
    hardware = measure_once(device, "bf16", 0.02 if settings.smoke else 0.5)
    stamp, faults = environment(device, settings.commit), []
    for name, run_task in ((ATTENTION, run_attention), (STEP, run_step)):
        if settings.task not in (name, "both"):
            continue
        torch.manual_seed(0)
        try:
            recorder.keep(finish(run_task(settings, device, hardware), hardware, stamp))
        except (UserError, UnavailableError) as fault:  # the other task is still to be measured
            faults.append(f"{name}: {fault}")
    if recorder.records:
        recorder.tell()
    if faults:
        raise UserError("; ".join(faults))
    return recorder.records


@click.command()
@console.options(LeaderboardSettings)
def main(**settings: Any) -> None:
    """Time the course's leaderboard tasks: attention (2025), a training step of an 8B model (2026)."""
    run(LeaderboardSettings(**settings))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
