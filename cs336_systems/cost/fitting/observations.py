"""Measured times beside the cost model's predictions: of whole steps, and of parts of a step with timers.

Times come from lists of runs, from training logs (`cost/logs.py`), and from records of benchmarks. Megatron-LM times a
step's parts on the last rank, or prints the largest over all ranks. Three of them have a prediction: computing, the sum
of gradients over replicas, and the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from cs336_systems.cost.closed_forms import Link
from cs336_systems.cost.fitting.logged_runs import LogOptions, logged_run
from cs336_systems.cost.logs import LoggedRun, json_lines, read_log, read_train_log
from cs336_systems.cost.machines import Constants, System
from cs336_systems.cost.operator_time import group_seconds
from cs336_systems.cost.plan import OPTIONS, Plan
from cs336_systems.cost.runs import TrainingRun, read_runs
from cs336_systems.cost.step_time import optimizer_seconds, replica_groups, stage_kinds, stage_seconds, stage_weights
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular
from cs336_systems.presets import Mixture, ModelConfig, preset

What = Literal["step", "compute", "gradients", "optimizer"]
WHAT: tuple[What, ...] = get_args(What)

# Timers of gradient reduction in versions 2.0 to 2.7, in 3.0 to core 0.4, and since then.
_GRADIENTS = ("backward-params-all-reduce", "grads-all-reduce", "all-grads-sync")
_WIDTHS = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of an activation by precision
_CHECK = "optimizer-unscale-and-check-inf"  # this timer includes the wait for the slowest rank


@dataclass(frozen=True)
class Observation:
    """Measured seconds of one thing in a run, and their prediction given the constants. Raises UserError for a time
    that is not positive and finite."""

    run: TrainingRun
    what: What
    seconds: float
    predict: Callable[[Constants], float]

    def __post_init__(self) -> None:
        if not 0 < self.seconds < inf:
            raise UserError(f"{self.run.id}: {self.what} took {self.seconds:g} s: times are positive and finite")


def log_ratio(each: Observation, constants: Constants) -> float:
    """log(predicted / measured) with some constants."""
    return log(each.predict(constants) / each.seconds)


def read_measured(path: Path, given: LogOptions) -> list[Observation]:
    """Read a file's measurements: by suffix a list of runs (.json), records or a training log of this project (.jsonl),
    or else a log of Megatron-LM.

    Raises UserError, in one line, for a file that cannot be read, has no timings, or does not say what ran.
    """
    if path.suffix == ".json":
        found = [each for run in read_runs(path) for each in observe_step(run)]
        if not found:
            raise UserError(f"{path} has no timings: none of its runs has t_iter_s, the seconds of a step")
        return found
    with os_errors(f"read {path}"):
        text = regular(path).read_text("utf-8-sig", errors="replace")
    if path.suffix != ".jsonl":
        return [each for logged in read_log(text, path.name) for each in observe_log(logged, given)]
    rows = json_lines(text, path.name)
    try:
        if "recipe" in rows[0]:
            return list(_of_training(read_train_log(text, path.name), given))
        found = list(_of_records(rows, given))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is neither records nor a training log of this project: {why}") from None
    if not found:
        raise UserError(
            f"{path} has no timings that the model predicts: those of whole steps, of benchmarks.e2e (mode step or "
            "forward-backward) and benchmarks.scaling, or a log of cs336_systems.train"
        )
    return found


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


def observe_compute(run: TrainingRun, seconds: float, over_ranks: bool = False) -> Observation:
    """Forward and backward of all microbatches, without messages between stages, on the last stage or, `over_ranks`,
    the slowest."""

    def predict(constants: Constants) -> float:
        stages = stage_kinds(run.config, run.plan) if over_ranks else [run.plan.pp - 1]
        system = run.under(constants).system
        each = [stage_seconds(run.config, run.plan, run.seq, one, system) for one in stages]
        return run.plan.microbatches * max(sum(spent) - spent.messages for spent in each)

    return Observation(run, "compute", seconds, predict)


def observe_timers(
    run: TrainingRun, milliseconds: Mapping[str, float], over_ranks: bool = False, gradient_width: int = 4
) -> Iterator[Observation]:
    """The parts of a step that timers of Megatron-LM measured and the model predicts.

    `over_ranks` timers are the slowest stage's, others the last one's. Gradients have `gradient_width` bytes; if
    they are sent during backward, in shards, or not at all, their timer measures something else and is left out.
    """
    plan, last = run.plan, (run.config, run.plan, run.seq, run.plan.pp - 1)

    def reduced(constants: Constants) -> float:
        """One all-reduce after backward, of the gradients of the last stage, which has the head."""
        shared, owned, _ = stage_weights(*last)
        return sum(
            group_seconds("all-reduce", gradient_width * each.weights, *each.near, run.under(constants).system)
            for each in replica_groups(plan, shared, owned, run.system.node)
        )

    ahead, back = (milliseconds.get(f"{way}-compute", 0.0) for way in ("forward", "backward"))
    if ahead and back:
        yield observe_compute(run, (ahead + back) / 1e3, over_ranks)
    summed = next((milliseconds[name] for name in _GRADIENTS if milliseconds.get(name)), None)
    if summed and plan.replicas > 1 and plan.overlap == "none" and not plan.zero:
        yield Observation(run, "gradients", summed / 1e3, reduced)
    stepped = milliseconds.get("optimizer", 0.0) - milliseconds.get(_CHECK, 0.0)
    if stepped > 0:
        yield Observation(
            run, "optimizer", stepped / 1e3, lambda used: optimizer_seconds(*last, run.under(used).system)
        )


def _of_records(rows: list[dict[str, Any]], given: LogOptions) -> Iterator[Observation]:
    for row in (each for each in rows if each["samples_ms"]):  # one that did not fit has none
        seconds = median(row["samples_ms"]) / 1e3
        if row["benchmark"] == "e2e" and row["config"]["mode"] in ("step", "forward-backward"):
            yield from _of_pass(row, seconds, given)
        elif row["benchmark"] == "scaling":
            yield from _of_layout(row, seconds, given)


def _of_pass(row: Mapping[str, Any], seconds: float, given: LogOptions) -> Iterator[Observation]:
    """A record of benchmarks.e2e: one device, whose two measured ceilings the record has."""
    about, metrics, batch = row["config"], row["metrics"], row["config"]["batch_size"]
    model = preset(about["size"], about["year"]).model.override(
        **{name: about[name] for name in ("norm", "attention", "recompute", "recompute_every")},
        kernels=about.get("kernels"),
        context_length=about["context"],
    )
    name = f"{about['size']} {batch} x {about['context']} {about['precision']} {about['mode']}"
    plan = Plan(micro_batch=batch, global_batch=batch, width=_WIDTHS[about["precision"]])
    flops, bandwidth, device = metrics["peak_flops_per_s"], metrics["bandwidth_bytes_per_s"], row["environment"]
    cores, alone = int(device["cores"]) if device["device_type"] == "cpu" else 1, Link(0.0, bandwidth)
    if min(flops, bandwidth, cores) <= 0:
        raise UserError(f"{name}: FLOP/s, bytes/s and cores of the machine must be above zero")
    system = System(str(device["device"]), flops, flops, 1.0, bandwidth, 0.0, cores, 1, alone, alone)
    notes = ("the machine is the record's own, not the one asked for",) if given.system else ()
    run = TrainingRun(_as_predicted(model), plan, about["context"], system, name, seconds, notes)
    yield from observe_step(run) if about["mode"] == "step" else [observe_compute(run, seconds)]


def _of_layout(row: Mapping[str, Any], seconds: float, given: LogOptions) -> Iterator[Observation]:
    """A record of benchmarks.scaling: a layout of several ranks, on a machine that the record does not describe."""
    about = row["config"]
    model = preset(about["size"]).model.override(
        **{name: about[name] for name in ("d_model", "d_ff", "num_layers", "vocab_size", "recompute")},
        context_length=about["context"],
        causal=about["objective"] != "bert",
    )
    name = f"{about['size']} {about['layout']} {about['precision']}"
    last = {timer: values[-1] for timer, values in row["metrics"]["timers_ms"].items() if values[-1] is not None}
    return _laid_out(given, name, model, about, seconds, last)


def _of_training(logged: LoggedRun, given: LogOptions) -> Iterator[Observation]:
    header = logged.header
    model = ModelConfig(**header["model"] | {"mixture": Mixture(**header["model"]["mixture"])})
    sizes = {"micro_batch_size": "micro_batch_size", "global_batch_size": "batch_size", "context": "seq"}
    about = header["recipe"] | header["mesh"] | {name: header[theirs] for name, theirs in sizes.items()}
    return _laid_out(given, logged.name, model, about, logged.seconds, logged.timers())


def _laid_out(
    given: LogOptions, name: str, model: ModelConfig, row: dict[str, Any], took: float | None, timers: dict[str, float]
) -> Iterator[Observation]:
    """A layout of several ranks of this project, which a row describes, but not the machine that it ran on."""
    if given.system is None:
        raise UserError(f"{name}: this file does not say what its machine can do: give --system")
    plan = Plan(
        **{axis: row.get(axis, 1) for axis in ("tp", "pp", "dp", "ep")},
        **{name: row[OPTIONS.get(name, name)] for name in ("chunks", "sequence", "zero", "micro_batch")},
        global_batch=row["global_batch_size"],
        width=_WIDTHS[row["precision"]],
    )
    run = TrainingRun(_as_predicted(model), plan, row["context"], given.system, name, took)
    plan.check(run.config, run.seq)
    yield from observe_step(run)
    yield from observe_timers(run, timers)


def _as_predicted(model: ModelConfig) -> ModelConfig:
    """Recomputation in the cost model's terms: it has one kind for blocks, where this project has two."""
    return replace(model, recompute="segments") if model.recompute == "nested" else model
