"""Records of layouts: bubble, efficiency, shared cores and predictions; and a record as a row of a scaling study."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from benchmarks.harness import noise, summarise
from benchmarks.lib.launcher import Answer
from benchmarks.lib.rank_step import predict_step
from benchmarks.lib.scaling_logs import MEBIBYTE, ScalingRun, own_shape
from benchmarks.lib.scaling_study import Layout, LayoutOptions
from benchmarks.records import Record
from cs336_systems.cost import Hardware
from cs336_systems.cost.closed_forms import Link
from cs336_systems.host.machine import allowed_cores
from cs336_systems.schedule.lists import bubble_fraction

Timers = Mapping[str, Sequence[float | None]]  # milliseconds of a step by name and rank, None where it is not used

COMPUTE = ("forward-compute", "backward-compute")
BOUND = (
    "the process that starts them is bound, and every timer includes waiting for a core. "
    "Start it unbound (mpirun --bind-to none, srun --cpu-bind=none), or allow the container more cores."
)
CROWDED = "all that there are: every timer includes waiting for a core, so do not read speed from this."


def pipeline_bubble(timers: Timers, pp: int) -> float | None:
    """The share of the pipeline's time in which a rank computes nothing, mean over the ranks; None without timers.

    A pipeline's ranks are those that differ in their stage only: r, r + N / pp, ... of N. Its time is the largest sum
    over them of all timers of computing, sending and receiving: the first stage's, which begins and ends the schedule.
    So the last stage's wait after its last backward counts as well, which no timer of receiving has.
    """
    if pp == 1:
        return 0.0
    if not all(name in timers for name in COMPUTE):
        return None

    def total(ends: tuple[str, ...]) -> list[float]:
        parts = (values for name, values in timers.items() if name.endswith(ends))
        return [sum(value or 0.0 for value in rank) for rank in zip(*parts, strict=True)]

    spent, busy = total(("-recv", "-send", *COMPUTE)), total(COMPUTE)
    apart = len(spent) // pp
    return fmean(1 - mine / max(spent[rank % apart :: apart]) for rank, mine in enumerate(busy))


def peak_flops(peak: Answer, ranks: int) -> float:
    """FLOP/s of all the cores, or GPUs, that `ranks` ranks have together, in the precision that `peak` was taken in."""
    each = float(peak["rank"]["matmul_flops"])
    if peak["gpus"]:
        return each * min(ranks, peak["gpus"])
    if peak["machine_flops"] is None:
        return each * min(ranks, allowed_cores())
    return min(ranks * each, float(peak["machine_flops"]))


def crowded(ranks: int) -> str:
    """A note where CPU ranks share cores, with the bound that follows for efficiency; else empty. The cores allowed are
    those of the process that starts the ranks, which inherit them (os.sched_getaffinity)."""
    allowed, cores = allowed_cores(), os.cpu_count() or 1
    if ranks <= allowed:
        return ""
    there = f"{allowed} core{'s' * (allowed > 1)}"
    why = f" of {cores}: {BOUND}" if allowed < cores else f", {CROWDED}"
    return f"{ranks} ranks on {there}: efficiency is bounded by {allowed}/{ranks}; {ranks} ranks share {there}{why}"


def make_record(
    benchmark: str, layout: Layout, base: Layout | None, peak: Answer, settings: LayoutOptions, what: dict[str, Any]
) -> Record:
    """The record of a layout, with `what` as its configuration: times of its steps, shared cores, and flags. One that
    is wrong, or has nothing right to be compared to, has a prediction alone."""
    what |= {"threads": 1}
    stamp = peak["environment"] | {"world_size": layout.ranks} | {key: what[key] for key in ("backend", "threads")}
    predicted = predict(layout, peak)
    if layout.wrong or base is None:
        return Record(benchmark, what, stamp, flags=[layout.wrong], status="unsupported", predicted=predicted)
    samples = [sample for turn in layout.turns for sample in turn["samples_ms"]]
    flags = noise(summarise(layout.turn_ms()))
    if settings.on.type == "cpu" and (note := crowded(layout.ranks)):
        flags.append(note)
    if skipped := sum(turn["skipped"] for turn in layout.turns):
        flags.append(f"{skipped} of {len(samples)} steps were skipped")
    return Record(benchmark, what, stamp, samples, dict[str, Any](summarise(samples)), predicted, flags)


def predict(layout: Layout, peak: Answer) -> dict[str, Any]:
    """Predictions of the cost model, under the names of the metrics: the bubble's closed form, and a step's time with
    what it is spent on, as if each rank had its share of the cores to itself at all times.

    No time for ZeRO stage 3, nor for a layout that did not run.
    """
    parallel = layout.recipe.parallel
    predicted: dict[str, Any] = {
        "bubble": bubble_fraction(parallel.schedule_name, parallel.pp, layout.shape.microbatches, parallel.chunks)
    }
    if layout.wrong or parallel.zero == 3:
        return predicted
    rank, link = Hardware(**peak["rank"]), layout.gate["link"]
    share = peak_flops(peak, layout.ranks) / layout.ranks / rank.matmul_flops
    hardware = replace(rank, matmul_flops=share * rank.matmul_flops, bandwidth=share * rank.bandwidth)
    # One rank sends nothing, whatever the link.
    found = predict_step(layout.shape, layout.stages, hardware, Link(**link) if link else Link(0.0, 1.0))
    parts = {name: 1e3 * seconds for name, seconds in found.items()}
    return predicted | {"mean_ms": parts.pop("total"), "parts_ms": parts}


def layout_name(record: Record) -> str:
    """`2x2x2`, and what is unusual: `1x1x2, zero 1`."""
    usual = {"zero": 0, "schedule": "1f1b", "chunks": 1, "sequence_parallel": False}
    unusual = {name: record.config[name] for name in usual if record.config.get(name, usual[name]) != usual[name]}
    return ", ".join([str(record.config["layout"]), *(f"{name} {value}" for name, value in unusual.items())])


def study_run(record: Record) -> ScalingRun:
    """A record as a row of the study's tables: the timers of the last rank, whose line Megatron-LM prints."""
    config, metrics = record.config, record.metrics
    memory = [each / MEBIBYTE for each in metrics["memory_bytes"] if each is not None]
    busy = [each for each in metrics["gpu_utilisation"] if each is not None]
    device = record.environment["device"]
    return ScalingRun(
        name=layout_name(record), tp=config["tp"], pp=config["pp"], dp=config["dp"],
        micro_batch_size=config["micro_batch_size"], global_batch_size=config["global_batch_size"],
        ms_per_sample=metrics["ms_per_sample"], seq_length=config["context"],
        timers={name: values[-1] for name, values in metrics["timers_ms"].items() if values[-1] is not None},
        gpu_util=median(busy) if busy else None, gpu_memory=(min(memory), max(memory)) if memory else None,
        peak_flops=metrics["peak_flops"] / config["ranks"],
        source=f"{config['size']} {config['objective']} in {config['precision']}, {config['backend']} on {device}",
        **own_shape(config),
    )  # fmt: skip
