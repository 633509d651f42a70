"""Memory and time of each ZeRO stage: `python -m benchmarks.zero`.

Stages 0 to 3, stage 1 in both layouts, and PyTorch's ZeroRedundancyOptimizer and FSDP2 take turns on the same ranks.
What a rank holds is counted from live storages, independently of the library's own counts.
"""

import gc
import sys
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import gather_times, ratios, saved_storages
from benchmarks.lib.options import command
from benchmarks.lib.parallel_run import ParallelRun, StepSettings, start, worker_run
from benchmarks.lib.turns import OF_GRADIENTS, TORCH_FSDP, TORCH_ZERO, Arena, Turn, zero_candidates
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.cost.closed_forms import exposed_seconds, zero_memory
from cs336_systems.model.transformer import lm_loss

STAGE_OF = {"stage 0": 0, "stage 1": 1, "stage 1, whole": 1, "stage 2": 2, "stage 3": 3, TORCH_ZERO: 1, TORCH_FSDP: 3}
PARTS = ("parameters", "gradients", "optimizer", "activations")


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a tensor known to Python holds, gradients included, by address."""
    from torch.distributed.tensor import DTensor  # here, because the import takes seconds

    found: dict[int, torch.UntypedStorage] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor) or issubclass(type(each), DTensor):
            continue  # a DTensor's local tensor is found by itself
        for tensor in (each, each.grad if each.is_leaf else None):
            if tensor is not None and not isinstance(tensor, DTensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
    return found


def live_bytes(ignored: dict[int, torch.UntypedStorage]) -> int:
    """Bytes alive, except in some storages, which are kept alive so that no new one takes the address of theirs."""
    time.sleep(0.05)  # gloo's threads let go of a tensor a little after they are done with it
    gc.collect()
    return sum(storage.nbytes() for address, storage in storages().items() if address not in ignored)


def held_by(arena: Arena, name: str) -> list[int]:
    """Bytes of one candidate's `PARTS` on this rank, from a first step: there after initialisation, added by backward,
    added by the step; and the storages that forward keeps for backward and that were not there before."""
    gc.collect()
    others = storages()
    trained = arena.build(name)
    start, known = live_bytes(others), storages()
    with saved_storages() as saved:
        loss = lm_loss(trained.model, arena.tokens, arena.targets)
    activations = sum(storage.nbytes() for address, storage in saved.items() if address not in known)
    saved.clear()
    del known
    loss.backward()
    trained.finish()
    del loss
    before = live_bytes(others)
    trained.optimizer.step()
    return [start, before - start, live_bytes(others) - before, activations]


def held_memory(arena: Arena) -> dict[str, dict[str, int]]:
    """Every candidate's bytes by part on the rank where the sum of all but the activations is the largest."""
    found = {}
    for name in arena.candidates:
        figures = gather_times(held_by(arena, name), arena.group, arena.device)
        fullest = figures[figures[:, :3].sum(dim=1).argmax()]
        found[name] = dict(zip(PARTS, map(int, fullest.tolist()), strict=True))
    return found


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


def make_record(run: ParallelRun, name: str, turns: dict[str, Turn]) -> Record:
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
    metrics |= {f"{kind}_bytes": value for kind, value in run.held[name].items()}
    replicated = sum(p.numel() for p in arena.base.parameters() if p.dim() != 2)
    formula = zero_memory(arena.trainable, replicated, run.ranks, STAGE_OF[name])
    predicted = {"mean_ms": predicted_ms(run, name)} | {f"{kind}_bytes": value for kind, value in formula.items()}
    return run.record("zero", name, turn, metrics, predicted)


def work(place: Place, settings: StepSettings) -> None:
    """One rank's part."""
    worker_run(place, settings, "zero", zero_candidates(), make_record, held_memory)


@command(StepSettings)
def main(settings: StepSettings) -> None:
    """Time training steps of all ZeRO stages and PyTorch's in turn, and count the bytes that each keeps in memory."""
    start(work, settings, "zero")


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
