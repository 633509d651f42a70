"""What was measured, beside what the model says of it: whole steps, and the parts of them that timers see.

Megatron-LM times a step's parts on the last rank, or prints the most over all ranks. Three of them have a prediction:
computing, the sum of gradients over replicas, and the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Literal, get_args

from cs336_systems.cost.large.data_parallel_time import optimizer_seconds, stage_weights
from cs336_systems.cost.large.efficiency import Constants, group_seconds
from cs336_systems.cost.large.runs import Run
from cs336_systems.cost.large.stage_parts import stage_kinds
from cs336_systems.cost.large.stage_time import stage_seconds
from cs336_systems.cost.large.step_time import step_time

What = Literal["step", "compute", "gradients", "optimizer"]
WHAT: tuple[What, ...] = get_args(What)

# In the order of versions: 2.0 to 2.7, 3.0 to core 0.4, since then.
_GRADIENTS = ("backward-params-all-reduce", "grads-all-reduce", "all-grads-sync")
# A check for infinities waits for the slowest rank, by version.
_CHECKS = ("optimizer-unscale-and-check-inf",)


@dataclass(frozen=True)
class Observation:
    """Seconds that something took, and what the model says, given its constants; on which machine, and what was
    assumed of the run."""

    id: str
    what: What
    seconds: float
    predict: Callable[[Constants], float]
    machine: str = ""
    notes: tuple[str, ...] = ()


def log_ratio(each: Observation, constants: Constants) -> float:
    """log(predicted / measured)."""
    return log(each.predict(constants) / each.seconds)


def observe_step(run: Run) -> Iterator[Observation]:
    """The step of a run, if it was measured."""
    if run.seconds:
        yield _observation(run, "step", run.seconds, partial(_step, run))


def observe_compute(run: Run, seconds: float, over_ranks: bool = False) -> Observation:
    """Forward and backward of all microbatches, on the last stage or, `over_ranks`, the slowest."""
    return _observation(run, "compute", seconds, partial(_compute, run, None if over_ranks else run.plan.pp - 1))


def observe_timers(
    run: Run, milliseconds: Mapping[str, float], over_ranks: bool = False, gradient_width: int = 4
) -> Iterator[Observation]:
    """The parts of a step that timers of Megatron-LM measured and the model predicts.

    `over_ranks` timers are the slowest stage's, others the last one's. Gradients have `gradient_width` bytes; where
    they travel behind backward, in shards, or not at all, their timer is of something else and left out.
    """
    ahead, back = (milliseconds.get(f"{way}-compute", 0.0) for way in ("forward", "backward"))
    if ahead and back:
        yield observe_compute(run, (ahead + back) / 1e3, over_ranks)
    summed = next((milliseconds[name] for name in _GRADIENTS if milliseconds.get(name)), None)
    if summed and run.plan.replicas > 1 and run.plan.overlap == "none" and not run.plan.zero:
        yield _observation(run, "gradients", summed / 1e3, partial(_gradients, run, gradient_width))
    stepped = milliseconds.get("optimizer", 0.0) - sum(milliseconds.get(name, 0.0) for name in _CHECKS)
    if stepped > 0:
        yield _observation(run, "optimizer", stepped / 1e3, partial(_optimizer, run))


def _observation(run: Run, what: What, seconds: float, predict: Callable[[Constants], float]) -> Observation:
    return Observation(run.id, what, seconds, predict, run.system.name, run.notes)


def _step(run: Run, constants: Constants) -> float:
    return step_time(run.config, run.plan, run.seq, run.system, constants).total


def _compute(run: Run, stage: int | None, constants: Constants) -> float:
    """All microbatches of a stage, or of the slowest: forward and backward without messages between stages."""
    stages = stage_kinds(run.config, run.plan) if stage is None else [stage]
    each = [stage_seconds(run.config, run.plan, run.seq, one, run.system, constants) for one in stages]
    return run.plan.microbatches * max(sum(spent) - spent.messages for spent in each)


def _gradients(run: Run, width: int, constants: Constants) -> float:
    """One all-reduce after backward of the last stage's weights, which has those of the head."""
    shared, owned, _ = stage_weights(run.config, run.plan, run.seq, run.plan.pp - 1)
    seconds = 0.0
    for weights, ranks, axes in (
        (shared, run.plan.replicas, ("cp", "ep", "dp")),
        (owned, run.plan.cp * run.plan.dp, ("cp", "dp")),
    ):
        if weights:
            local = run.plan.local(*axes, node=run.system.node)
            seconds += group_seconds("all-reduce", width * weights, ranks, local, run.system, constants)
    return seconds


def _optimizer(run: Run, constants: Constants) -> float:
    return optimizer_seconds(run.config, run.plan, run.seq, run.plan.pp - 1, run.system, constants)
