"""Memory and time of each ZeRO stage: `python -m benchmarks.zero`.

Stages 0 to 3, stage 1 in both layouts, and PyTorch's ZeroRedundancyOptimizer and FSDP2 take turns on the same ranks.
"""

import sys
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import ratios
from benchmarks.lib.live_memory import held_memory
from benchmarks.lib.options import command
from benchmarks.lib.peers import TORCH_FSDP, TORCH_ZERO, zero_candidates
from benchmarks.lib.turns import OF_GRADIENTS, Turn
from benchmarks.parallel_run import ParallelRun, ParallelSettings, start, worker_run
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.cost.closed_forms import exposed_seconds, zero_memory

STAGE_OF = {"stage 0": 0, "stage 1": 1, "stage 1, whole": 1, "stage 2": 2, "stage 3": 3, TORCH_ZERO: 1, TORCH_FSDP: 3}


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


def make_record(memory: dict[str, dict[str, int]], run: ParallelRun, name: str, turns: dict[str, Turn]) -> Record:
    """One candidate's record: times, traffic, and memory beside the formula's."""
    turn, arena = turns[name], run.arena
    metrics: dict[str, Any] = {}
    for peer, key in ((TORCH_ZERO, "zero"), (TORCH_FSDP, "fsdp")):
        metrics |= {f"{key}_{what}": value for what, value in ratios(turn.steps, turns[peer].steps).items()}
    if turn.reductions:
        metrics["reductions_ms"], metrics["gathers_ms"] = median(turn.reductions), median(turn.gathers or [0.0])
        metrics["update_share"] = metrics["gathers_ms"] / median(turn.steps)
        sent = {"reductions": 0.0, "gathers": 0.0}
        for event in turn.events:
            sent["reductions" if event.verb in OF_GRADIENTS else "gathers"] += event.bytes_sent
        metrics |= {f"{kind}_bytes_sent": value for kind, value in sent.items()}
    metrics |= {f"{kind}_bytes": value for kind, value in memory[name].items()}
    replicated = sum(p.numel() for p in arena.base.parameters() if p.dim() != 2)
    formula = zero_memory(arena.trainable, replicated, run.ranks, STAGE_OF[name])
    predicted = {"mean_ms": predicted_ms(run, name)} | {f"{kind}_bytes": value for kind, value in formula.items()}
    return run.record("zero", name, turn, metrics, predicted)


def work(place: Place, settings: ParallelSettings) -> None:
    """One rank's part."""
    memory: dict[str, dict[str, int]] = {}
    make, look = partial(make_record, memory), lambda arena: memory.update(held_memory(arena))
    worker_run(place, settings, "zero", zero_candidates(), make, before=look)


@command(ParallelSettings)
def main(settings: ParallelSettings) -> None:
    """Time training steps of all ZeRO stages and PyTorch's in turn, and count the bytes that each keeps in memory."""
    start(work, settings, "zero")


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
