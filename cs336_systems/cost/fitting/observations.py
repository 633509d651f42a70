"""Measured times beside the cost model's predictions: of whole steps, and of parts of a step with timers.

Times come from lists of runs and from training logs (`cost/logs.py`). Megatron-LM times a step's parts on the last
rank, or prints the largest over all ranks. Two of them have a prediction: computing, and the sum of gradients over
replicas.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path
from typing import Literal

from cs336_systems.cost.fitting.logged_runs import LogOptions, logged_run
from cs336_systems.cost.logs import LoggedRun, read_log, read_train_log
from cs336_systems.cost.machines import Constants
from cs336_systems.cost.operator_time import group_seconds
from cs336_systems.cost.plan import OPTIONS, Plan
from cs336_systems.cost.runs import TrainingRun, read_runs
from cs336_systems.cost.step_time import replica_groups, stage_kinds, stage_seconds, stage_weights
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular
from cs336_systems.presets import Mixture, ModelConfig

# Timers of gradient reduction in versions 2.0 to 2.7, in 3.0 to core 0.4, and since then.
_GRADIENTS = ("backward-params-all-reduce", "grads-all-reduce", "all-grads-sync")
_WIDTHS = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of an activation by precision


@dataclass(frozen=True)
class Observation:
    """Measured seconds of one thing in a run, and their prediction given the constants. Raises UserError for a time
    that is not positive and finite."""

    run: TrainingRun
    what: Literal["step", "compute", "gradients"]
    seconds: float
    predict: Callable[[Constants], float]

    def __post_init__(self) -> None:
        if not 0 < self.seconds < inf:
            raise UserError(f"{self.run.id}: {self.what} took {self.seconds:g} s: times are positive and finite")


def log_ratio(each: Observation, constants: Constants) -> float:
    """log(predicted / measured) with some constants."""
    return log(each.predict(constants) / each.seconds)


def read_measured(path: Path, given: LogOptions) -> list[Observation]:
    """Read a file's measurements: by suffix a list of runs (.json), a training log of this project (.jsonl), or else a
    log of Megatron-LM. Raises UserError for a file that cannot be read, has no timings, or does not say what ran."""
    if path.suffix == ".json":
        found = [each for run in read_runs(path) for each in observe_step(run)]
        if not found:
            raise UserError(f"{path} has no timings: none of its runs has t_iter_s, the seconds of a step")
        return found
    with os_errors(f"read {path}"):
        text = regular(path).read_text("utf-8-sig", errors="replace")
    if path.suffix != ".jsonl":
        return [each for logged in read_log(text, path.name) for each in observe_log(logged, given)]
    try:
        return list(_of_training(read_train_log(text, path.name), given))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is no training log of this project: {why}") from None


def observe_log(logged: LoggedRun, given: LogOptions) -> Iterator[Observation]:
    """The step of a run of Megatron-LM, and the parts of it that timers measured. Raises UserError as `logged_run`."""
    run = logged_run(logged, given)
    half = not logged.says("accumulate_allreduce_grads_in_fp32") and run.plan.width == 2
    yield from observe_step(run)
    yield from observe_timers(run, logged.timers(), logged.over_ranks, 2 if half else 4)


def observe_step(run: TrainingRun) -> Iterator[Observation]:
    """The step of a run, if it was measured."""
    if run.seconds:
        yield Observation(run, "step", run.seconds, lambda used: run.under(used).step.total)


def observe_timers(
    run: TrainingRun, milliseconds: Mapping[str, float], over_ranks: bool = False, gradient_width: int = 4
) -> Iterator[Observation]:
    """The parts of a step that timers of Megatron-LM measured and the model predicts.

    `over_ranks` timers are the slowest stage's, others the last one's. Gradients have `gradient_width` bytes; if
    they are sent during backward, in shards, or not at all, their timer measures something else and is left out.
    """
    plan = run.plan

    def computed(constants: Constants) -> float:
        """Forward and backward of all microbatches, without messages between stages."""
        stages = stage_kinds(run.config, plan) if over_ranks else [plan.pp - 1]
        system = run.under(constants).system
        each = [stage_seconds(run.config, plan, run.seq, stage, system) for stage in stages]
        return plan.microbatches * max(sum(spent) - spent.messages for spent in each)

    def reduced(constants: Constants) -> float:
        """One all-reduce after backward, of the gradients of the last stage, which has the head."""
        shared, owned, _ = stage_weights(run.config, plan, run.seq, plan.pp - 1)
        return sum(
            group_seconds("all-reduce", gradient_width * each.weights, *each.near, run.under(constants).system)
            for each in replica_groups(plan, shared, owned, run.system.node)
        )

    ahead, back = (milliseconds.get(f"{way}-compute", 0.0) for way in ("forward", "backward"))
    if ahead and back:
        yield Observation(run, "compute", (ahead + back) / 1e3, computed)
    summed = next((milliseconds[name] for name in _GRADIENTS if milliseconds.get(name)), None)
    if summed and plan.replicas > 1 and plan.overlap == "none" and not plan.zero:
        yield Observation(run, "gradients", summed / 1e3, reduced)


def _of_training(logged: LoggedRun, given: LogOptions) -> Iterator[Observation]:
    """A run of this project, whose log describes its layout, but not the machine that it ran on."""
    if given.system is None:
        raise UserError(f"{logged.name}: this file does not say what its machine can do: give --system")
    header = logged.header
    model = ModelConfig(**header["model"] | {"mixture": Mixture(**header["model"]["mixture"])})
    if model.recompute == "nested":  # of which the cost model has one kind
        model = replace(model, recompute="segments")
    row = header["recipe"] | header["mesh"] | header
    plan = Plan(
        **{axis: row.get(axis, 1) for axis in ("tp", "pp", "dp", "ep")},
        **{
            name: row[OPTIONS.get(name, name)] for name in ("chunks", "sequence", "zero", "micro_batch", "global_batch")
        },
        width=_WIDTHS[row["precision"]],
    )
    plan.check(model, row["seq"])
    run = TrainingRun(model, plan, row["seq"], given.system, logged.name, logged.seconds)
    yield from observe_step(run)
    yield from observe_timers(run, logged.timers())
