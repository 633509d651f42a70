"""Results of one layout's turns: the check of its losses, its record, and its row of the table."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.gate import STAGES, UNIT_ROUNDOFF
from benchmarks.harness import noise, ratios, summarise
from benchmarks.lib.scaling_measure import Answer
from benchmarks.lib.scaling_options import ScalingSettings
from benchmarks.lib.scaling_run import RECOMPUTED, ScalingRun
from benchmarks.rank_step import predict_step
from benchmarks.records import Record, Status
from cs336_systems.comm import Place
from cs336_systems.comm.startup import choose_backend
from cs336_systems.cost import Hardware, backward_flops, count_parameters, forward_flops
from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.flops import recompute_flops
from cs336_systems.host.machine import allowed_cores
from cs336_systems.layout import Observation
from cs336_systems.presets import ModelConfig
from cs336_systems.schedule.lists import bubble_fraction
from cs336_systems.train.observation import observe
from cs336_systems.train.recipe import Recipe

Timers = Mapping[str, Sequence[float | None]]  # milliseconds of a step by name and rank, None where it is not used

COMPUTE = ("forward-compute", "backward-compute")
BOUND = (
    "the process that starts them is bound, and every timer includes waiting for a core. "
    "Start it unbound (mpirun --bind-to none, srun --cpu-bind=none), or allow the container more cores."
)
CROWDED = "all that there are: every timer includes waiting for a core, so do not read speed from this."
MEBIBYTE = 2**20


def degrees(recipe: Recipe) -> str:
    """`2x1x4`: tp x pp x dp."""
    return f"{recipe.parallel.tp}x{recipe.parallel.pp}x{recipe.parallel.dp}"


@dataclass
class Layout:
    """A layout and a precision to measure, and the results of its turns so far. `recipe` has the degrees."""

    recipe: Recipe
    ranks: int
    config: ModelConfig
    gate: Answer = field(default_factory=dict)
    wrong: str = ""  # why there is no speed
    status: Status = "ok"
    turns: list[Answer] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The degrees, with the precision unless it is fp32."""
        precision = self.recipe.model.precision
        return degrees(self.recipe) + ("" if precision == "fp32" else f" {precision}")

    @property
    def batch(self) -> int:
        """Sequences in a step, of all replicas."""
        return self.recipe.layout(self.ranks).global_batch

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.recipe.seq(self.config)

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.recipe.layout(self.ranks).microbatches

    @cached_property
    def stages(self) -> list[Observation]:
        """A rank of each stage, observed: what it keeps, computes and sends. To be asked for before ranks start."""
        shape = self.recipe.layout(self.ranks)
        return [observe(self.recipe, self.config, shape, stage * shape.tp * shape.data) for stage in range(shape.pp)]

    def turn_ms(self) -> list[float]:
        """Milliseconds of a step, the mean of each turn."""
        return [fmean(turn["samples_ms"]) for turn in self.turns]

    def typical(self) -> Answer:
        """The turn of median speed, the slower of two: its time and its timers are of one window."""
        order = sorted(self.turns, key=lambda turn: fmean(turn["samples_ms"]))
        return order[len(order) // 2]


def gate_tolerance(config: ModelConfig, precision: str) -> float:
    """Relative tolerance of a loss or a gradient: as for one block in `benchmarks.gate`, times the blocks."""
    longest = max(config.d_ff, config.vocab_size, 2 * config.context_length)
    unit = UNIT_ROUNDOFF[precision] + longest**0.5 * UNIT_ROUNDOFF["fp32"]
    return STAGES * config.num_layers * unit


def gate(got: Answer, want: Answer, config: ModelConfig, recipe: Recipe) -> str:
    """Differences of a layout's first two steps from one rank's with the same global batch; empty if there are none.

    The first loss and the gradient's norm may be off by the tolerance t. The second loss comes after an update, and
    Adam's first is lr g / |g| for each weight: an error d in a gradient g changes it by lr min(2, 2 d / |g|) at most,
    and so the loss, to first order, by 2 lr d. Over all P weights that is at most 2 lr sqrt(P) |d|, with |d| = t |g|.
    """
    tolerance = gate_tolerance(config, recipe.model.precision)
    weights = sum(count_parameters(config).values())
    figures = [("first loss", got["losses"][0], want["losses"][0], 0.0)]
    figures += [("gradient norm", got["norms"][0], want["norms"][0], 0.0)]
    moved = 2 * recipe.optimizer.lr * math.sqrt(weights) * (want["norms"][0] or 0.0)
    figures += [("second loss", got["losses"][1], want["losses"][1], moved)]
    for name, mine, one, more in figures:
        if mine is None or one is None:
            return f"the {name} is not finite ({recipe.model.precision})"
        allowed = tolerance * (abs(one) + more)
        if not abs(mine - one) <= allowed:
            return (
                f"the {name} is {mine:.6g} and {one:.6g} on one rank: off by {abs(mine - one):.1e}, more than "
                f"{allowed:.1e} ({recipe.model.precision}); no speed reported"
            )
    return ""


def pipeline_bubble(timers: Timers, pp: int) -> float | None:
    """The share of the pipeline's time in which a rank computes nothing, mean over the ranks; None without timers.

    A pipeline's ranks are those that differ in their stage only: r, r + N / pp, ... of N. Its time is the largest sum
    over them of all timers of computing, sending and receiving: the first stage's, which begins and ends the schedule.
    What of it a rank does not spend in `forward-compute` and `backward-compute` is idle. So the last stage's wait after
    its last backward counts as well, which no timer of receiving has. Sending counts as idle; its closed form is
    `schedule.bubble_fraction`, of equal stages and free messages.
    """
    if pp == 1:
        return 0.0
    if not all(name in timers for name in COMPUTE):
        return None
    parts = {name: values for name, values in timers.items() if name.endswith(("-recv", "-send", *COMPUTE))}
    spent = [sum(value or 0.0 for value in rank) for rank in zip(*parts.values(), strict=True)]
    busy = [sum(value or 0.0 for value in rank) for rank in zip(*(timers[name] for name in COMPUTE), strict=True)]
    apart = len(spent) // pp
    spans = [max(spent[rank % apart :: apart]) for rank in range(len(spent))]
    return fmean(1 - mine / span for mine, span in zip(busy, spans, strict=True))


def peak_flops(peak: Answer, ranks: int, threads: int) -> float:
    """FLOP/s of all the cores, or GPUs, that `ranks` ranks have together, in the precision that `peak` was taken in."""
    each = float(peak["rank"]["matmul_flops"])
    if peak["gpus"]:
        return each * min(ranks, peak["gpus"])
    if peak["machine_flops"] is None:
        return each * min(1.0, allowed_cores() / (ranks * threads)) * ranks
    return min(ranks * each, float(peak["machine_flops"]))


def efficiencies(layout: Layout, base: Layout) -> dict[str, float]:
    """Throughput of a rank over that in the base, round by round: median and quartiles."""
    cost = [[ms * each.ranks / each.batch for ms in each.turn_ms()] for each in (base, layout)]
    found = ratios(cost[0], cost[1])
    return {name.replace("ratio", "efficiency"): value for name, value in found.items()}


def affinity(ranks: int, threads: int) -> dict[str, Any]:
    """Sharing of cores among ranks: counts, the bound that follows for efficiency, and a note if it is below 1. The
    cores allowed are those of the process that starts the ranks, which inherit them (os.sched_getaffinity)."""
    allowed, cores = allowed_cores(), os.cpu_count() or 1
    bound, note = min(1.0, allowed / (ranks * threads)), ""
    plural = "s" * (allowed > 1)
    if bound < 1.0:
        each = f"{ranks} ranks" + (f" of {threads} threads" if threads > 1 else "")
        note = f"{each} on {allowed} core{plural}: efficiency is bounded by {allowed}/{ranks * threads}"
    if allowed < ranks:
        why = f"{ranks} ranks share {allowed} core{plural}"
        note += f"; {why} of {cores}: {BOUND}" if allowed < cores else f"; {why}, {CROWDED}"
    return {"allowed": allowed, "cores": cores, "ranks": ranks, "threads": threads, "bound": bound, "note": note}


def make_record(layout: Layout, base: Layout | None, peak: Answer, settings: ScalingSettings) -> Record:
    """The record of a layout, without anomalies among its flags; `base` is what its efficiency is relative to."""
    parallel, config, threads = layout.recipe.parallel, layout.config, settings.threads
    device = torch.device("cuda" if peak["gpus"] else "cpu")
    backend = choose_backend(settings.backend, device, Place(0, 2, 0, 2))
    what = {
        "size": settings.size, "objective": settings.objective, "d_model": config.d_model, "d_ff": config.d_ff,
        "num_layers": config.num_layers, "vocab_size": config.vocab_size, "context": layout.seq,
        "micro_batch_size": settings.micro_batch_size, "recompute": settings.recompute,
        "scaling": "strong" if settings.global_batch_size else "weak", "data": " ".join(settings.data),
        "base": degrees(base.recipe) if base else None, "device": peak["environment"]["device_type"],
        "backend": backend, "layout": degrees(layout.recipe), "tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp,
        "ranks": layout.ranks, "global_batch_size": layout.batch, "precision": layout.recipe.model.precision,
        "schedule": parallel.schedule_name, "chunks": parallel.chunks,
        "sequence_parallel": parallel.sequence_parallel, "zero": parallel.zero, "threads": threads,
    }  # fmt: skip
    stamp = peak["environment"] | {"world_size": layout.ranks, "backend": backend, "threads": threads}
    predicted = predict(layout, peak, threads)
    if layout.wrong or base is None:
        return Record("scaling", what, stamp, flags=[layout.wrong], status=layout.status, predicted=predicted)
    samples = [sample for turn in layout.turns for sample in turn["samples_ms"]]
    typical = layout.typical()
    per_step, tokens = fmean(typical["samples_ms"]), layout.batch * layout.seq
    flops = sum(forward_flops(config, layout.batch, layout.seq).values())
    flops += backward_flops(config, layout.batch, layout.seq)
    spent = flops + recompute_flops(config, layout.batch, layout.seq)
    together = peak_flops(peak, layout.ranks, threads)
    metrics: dict[str, Any] = summarise(samples) | efficiencies(layout, base)
    metrics |= {
        "rounds": len(layout.turns),
        "ms_per_sample": per_step / layout.batch,
        "tokens_per_s": 1e3 * tokens / per_step,
        "mfu": 1e3 * flops / per_step / together,
        "hfu": 1e3 * spent / per_step / together,
        "peak_flops": together,
        "bubble": pipeline_bubble(typical["timers_ms"], parallel.pp),
        "affinity": affinity(layout.ranks, threads) if stamp["device_type"] == "cpu" else None,
        "losses": layout.gate["losses"],
    } | {name: typical[name] for name in ("timers_ms", "memory_bytes", "gpu_utilisation")}
    flags = noise(summarise(layout.turn_ms()))
    flags += [metrics["affinity"]["note"]] if metrics["affinity"] and metrics["affinity"]["note"] else []
    if skipped := sum(turn["skipped"] for turn in layout.turns):
        flags.append(f"{skipped} of {len(samples)} steps were skipped")
    return Record("scaling", what, stamp, samples, metrics, predicted, flags)


def predict(layout: Layout, peak: Answer, threads: int) -> dict[str, Any]:
    """Predictions of the cost model, under the names of the metrics: the bubble's closed form, and a step's time with
    what it is spent on, as if each rank had its share of the cores to itself at all times.

    No time for ZeRO stage 3, nor for a layout that did not run.
    """
    recipe, parallel = layout.recipe, layout.recipe.parallel
    predicted: dict[str, Any] = {
        "bubble": bubble_fraction(parallel.schedule_name, parallel.pp, layout.microbatches, parallel.chunks)
    }
    if layout.wrong or parallel.zero == 3:
        return predicted
    rank, link = Hardware(**peak["rank"]), layout.gate["link"]
    share = peak_flops(peak, layout.ranks, threads) / layout.ranks / rank.matmul_flops
    hardware = replace(rank, matmul_flops=share * rank.matmul_flops, bandwidth=share * rank.bandwidth)
    shape = replace(recipe.layout(layout.ranks), micro_batch=recipe.data.micro_batch_size or 1)
    # One rank sends nothing, whatever the link.
    found = predict_step(shape, layout.stages, hardware, Link(**link) if link else Link(0.0, 1.0))
    parts = {name: 1e3 * seconds for name, seconds in found.items()}
    return predicted | {"mean_ms": parts.pop("total"), "parts_ms": parts}


def study_run(record: Record) -> ScalingRun:
    """A record as a row of the study's tables: the timers of the last rank, whose line Megatron-LM prints."""
    config, metrics = record.config, record.metrics
    last = {name: values[-1] for name, values in metrics["timers_ms"].items() if values[-1] is not None}
    memory = [each / MEBIBYTE for each in metrics["memory_bytes"] if each is not None]
    busy = [each for each in metrics["gpu_utilisation"] if each is not None]
    # Nested segments repeat some of what they repeat; the study's formula has every block once more.
    plain = config["d_ff"] == 4 * config["d_model"] and config["recompute"] != "nested"
    device = record.environment["device"]
    return ScalingRun(
        name=config["layout"], tp=config["tp"], pp=config["pp"], dp=config["dp"],
        micro_batch_size=config["micro_batch_size"], global_batch_size=config["global_batch_size"],
        ms_per_sample=metrics["ms_per_sample"], timers=last,
        num_layers=config["num_layers"] if plain else None, hidden_size=config["d_model"],
        seq_length=config["context"], vocab_size=config["vocab_size"],
        recompute=RECOMPUTED[config["recompute"]],
        gpu_util=median(busy) if busy else None, gpu_memory=(min(memory), max(memory)) if memory else None,
        peak_flops=metrics["peak_flops"] / config["ranks"],
        source=f"{config['size']} {config['objective']} in {config['precision']}, {config['backend']} on {device}",
    )  # fmt: skip
