"""Memory and time of each ZeRO stage: `python -m benchmarks.zero`.

Stages 0 to 3, stage 1 in both layouts, and PyTorch's ZeroRedundancyOptimizer and FSDP2 take turns on the same ranks.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from rich.table import Table

from benchmarks.harness import noise, ratios, summarise
from benchmarks.lib.live_memory import Held, held_memory
from benchmarks.lib.peers import TORCH_FSDP, TORCH_ZERO, zero_candidates
from benchmarks.lib.turns import OF_GRADIENTS, Turns
from benchmarks.parallel_run import ParallelRun, ParallelSettings, start, worker_run
from benchmarks.parallel_tables import KINDS
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.cost.closed_forms import exposed_seconds, zero_memory
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_seconds

STAGE_OF = {"stage 0": 0, "stage 1": 1, "stage 1, whole": 1, "stage 2": 2, "stage 3": 3, TORCH_ZERO: 1, TORCH_FSDP: 3}
TIMES = ("candidate", "step", "± std", "predicted", "/ ZeroRedundancy", "/ FSDP2", "reductions", "gathers", "sent")
MEMORY = ("candidate", "parameters", "gradients", "optimizer", "in all", "by the formula", "activations")
TIME_CAPTION = (
    "reductions, gathers: the collectives of gradients and of parameters by themselves, and the share of the step that "
    "the latter would take; sent: bytes that leave a rank in a step. *: noisy (standard "
    "deviation above 5% of the mean): trust the ratios"
)
MEMORY_CAPTION = (
    "live storages of the fullest rank: after initialisation, what backward added before the step, what the first step "
    "added; activations: what forward keeps. PyTorch's DDP, and what is built on it, holds its buckets in C++, which "
    "this does not see: as much as the gradients once more"
)


@dataclass(frozen=True)
class ZeroSettings(ParallelSettings):
    """Options of the command line, one field each."""


def predicted_ms(run: ParallelRun, name: str) -> float:
    """The analytic model's step: computing, reductions that backward hides where it can, and gathers."""
    seconds, number, link, ranks = run.compute_seconds(), STAGE_OF[name], run.link, run.ranks
    buckets = run.gradient_buckets(25e6)
    total, verb = sum(buckets), "all-reduce" if number < 2 else "reduce-scatter"
    reductions = [link.seconds(nbytes, ranks, verb) for nbytes in buckets]
    exposed = exposed_seconds(buckets, reductions, seconds["backward"], overlap=True)
    gather = link.seconds(total, ranks, "all-gather") if number else 0.0
    if number == 3:  # once before forward and once before backward, both hidden but for what exceeds computing
        exposed += max(0.0, 2 * gather - seconds["forward"] - seconds["backward"])
        gather = 0.0
    if number:
        seconds["optimizer"] /= ranks
    return 1e3 * (sum(seconds.values()) + exposed + gather)


def make_record(memory: dict[str, Held], run: ParallelRun, name: str, turns: Turns) -> Record:
    """One candidate's record: times, traffic, and memory beside the formula's."""
    samples, held, arena = turns.steps[name], memory[name], run.arena
    metrics: dict[str, Any] = summarise(samples)
    for peer, key in ((TORCH_ZERO, "zero"), (TORCH_FSDP, "fsdp")):
        metrics |= {f"{key}_{what}": value for what, value in ratios(samples, turns.steps[peer]).items()}
    if name in turns.reductions:
        metrics["reductions_ms"] = summarise(turns.reductions[name])["median_ms"]
        metrics["gathers_ms"] = summarise(turns.gathers[name])["median_ms"] if name in turns.gathers else 0.0
        metrics["update_share"] = metrics["gathers_ms"] / metrics["median_ms"]
        sent = {"reductions": 0.0, "gathers": 0.0}
        for event in turns.events[name]:
            sent["reductions" if event.verb in OF_GRADIENTS else "gathers"] += event.bytes_sent
        metrics |= {f"{kind}_bytes_sent": value for kind, value in sent.items()}
    metrics |= {f"{kind}_bytes": value for kind, value in held.__dict__.items()}
    replicated = sum(p.numel() for p in arena.base.parameters() if p.dim() != 2)
    formula = zero_memory(arena.trainable, replicated, run.ranks, STAGE_OF[name])
    predicted = {"mean_ms": predicted_ms(run, name)} | {f"{kind}_bytes": value for kind, value in formula.items()}
    return run.record("zero", name, samples, metrics, predicted, noise(metrics))


def show(run: ParallelRun, records: list[Record]) -> None:
    """Two tables: times and memory."""
    times = Table(title=run.title(), title_justify="left", caption=TIME_CAPTION, caption_justify="left")
    memory = Table(title="memory of a rank", title_justify="left", caption=MEMORY_CAPTION, caption_justify="left")
    for table, heads in ((times, TIMES), (memory, MEMORY)):
        for head in heads:
            table.add_column(head, justify="left" if head == "candidate" else "right")
    for record in records:
        metrics, predicted, name = record.metrics, record.predicted, record.config["candidate"]
        cells = [format_seconds(metrics["median_ms"] / 1e3) + "*" * bool(record.flags)]
        cells += [format_seconds(value / 1e3) for value in (metrics["std_ms"], predicted["mean_ms"])]
        cells += [f"{metrics[f'{peer}_ratio_median']:.3f}" for peer in ("zero", "fsdp")]
        if "reductions_ms" in metrics:
            sent = metrics["reductions_bytes_sent"] + metrics["gathers_bytes_sent"]
            gathers = f"{format_seconds(metrics['gathers_ms'] / 1e3)}, {metrics['update_share']:.0%}" * bool(sent)
            cells += [format_seconds(metrics["reductions_ms"] / 1e3), gathers, format_bytes(sent)]
        times.add_row(name, *cells)
        held = [metrics[f"{kind}_bytes"] for kind in KINDS]
        formula = sum(predicted[f"{kind}_bytes"] for kind in KINDS)
        beside = f"{format_bytes(formula)} ({sum(held) / formula - 1:+.1%})"
        activations = format_bytes(metrics["activations_bytes"])
        memory.add_row(name, *map(format_bytes, held), format_bytes(sum(held)), beside, activations)
    out = console.console()
    out.print(times)
    out.print(memory)


def work(place: Place, settings: ZeroSettings) -> None:
    """One rank's part."""
    memory: dict[str, Held] = {}
    worker_run(
        place,
        settings,
        "zero",
        zero_candidates(),
        partial(make_record, memory),
        show,
        before=lambda arena: memory.update(held_memory(arena)),
    )


@click.command()
@console.options(ZeroSettings)
def main(**options: Any) -> None:
    """Time training steps of all ZeRO stages and PyTorch's in turn, and count the bytes that each keeps in memory."""
    start(work, ZeroSettings(**options), "zero")


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
