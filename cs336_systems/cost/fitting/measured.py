"""Measured times of any file that has some: logs of Megatron-LM, logs and records of this project, lists of runs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from cs336_systems.cost.fitting.logged_runs import Given, observe_log
from cs336_systems.cost.fitting.observations import Observation, observe_compute, observe_step, observe_timers
from cs336_systems.cost.fitting.timer_lines import read_log
from cs336_systems.cost.large.plan import Plan
from cs336_systems.cost.large.runs import Run, read_runs
from cs336_systems.cost.large.systems import System
from cs336_systems.cost.parallel import Link
from cs336_systems.errors import UserError
from cs336_systems.mixture import Mixture
from cs336_systems.presets import ModelConfig, preset


def read_measured(path: Path, given: Given) -> list[Observation]:
    """What a file measured: by its suffix a list of runs (.json), or records or a training log of this project
    (.jsonl); any other is a log of Megatron-LM.

    Raises UserError, in one line, for a file that cannot be read, has no timings, or does not say what ran.
    """
    if path.suffix == ".json":
        found = [each for run in read_runs(path) for each in observe_step(run)]
        if not found:
            raise UserError(f"{path} has no timings: none of its runs has t_iter_s, the seconds of a step")
        return found
    try:
        text = path.read_text("utf-8-sig", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if path.suffix != ".jsonl":
        return [each for logged in read_log(text, path.name) for each in observe_log(logged, given)]
    rows = [_json_line(line, f"{path.name}, line {number}") for number, line in enumerate(text.splitlines(), 1)]
    try:
        found = list(_of_training(rows, path.name, given) if rows and "recipe" in rows[0] else _of_records(rows, given))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is neither records nor a training log of this project: {error!r}") from None
    if not found:
        raise UserError(
            f"{path} has no timings that the model predicts: those of whole steps, of benchmarks.e2e (mode step or "
            "forward-backward) and benchmarks.scaling, or a log of cs336_systems.train"
        )
    return found


def _json_line(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} is no JSON object")
    return found


def _of_records(rows: list[dict[str, Any]], given: Given) -> Iterator[Observation]:
    for row in rows:
        config = row["config"]
        if not row["samples_ms"]:  # what did not fit, say
            continue
        if row["benchmark"] == "e2e" and config["mode"] in ("step", "forward-backward"):
            yield from _of_pass(row, given)
        elif row["benchmark"] == "scaling":
            yield from _of_layout(row, given)


def _of_pass(row: Mapping[str, Any], given: Given) -> Iterator[Observation]:
    """A record of benchmarks.e2e: one device, which its record has the two ceilings of."""
    about, metrics = row["config"], row["metrics"]
    model = preset(about["size"], about["year"]).model.override(
        **{name: about[name] for name in ("norm", "attention", "recompute", "recompute_every")},
        kernels=about.get("kernels"),
        context_length=about["context"],
    )
    batch, width = about["batch_size"], 4 if about["precision"] in ("fp32", "tf32") else 2
    system = _one_device(row["environment"], metrics["peak_flops_per_s"], metrics["bandwidth_bytes_per_s"])
    name = f"{about['size']} {batch} x {about['context']} {about['precision']} {about['mode']}"
    seconds = median(row["samples_ms"]) / 1e3
    run = Run(
        name,
        _as_predicted(model),
        Plan(micro_batch=batch, global_batch=batch, width=width),
        about["context"],
        system,
        seconds,
        ("the machine is the record's own, not the one asked for",) if given.system else (),
    )
    if about["mode"] == "step":
        yield from observe_step(run)
    else:
        yield observe_compute(run, seconds)


def _of_layout(row: Mapping[str, Any], given: Given) -> Iterator[Observation]:
    """A record of benchmarks.scaling: a layout of several ranks, whose machine it does not know."""
    about = row["config"]
    model = preset(about["size"]).model.override(
        **{name: about[name] for name in ("d_model", "d_ff", "num_layers", "vocab_size", "recompute")},
        context_length=about["context"],
        causal=about["objective"] != "bert",
    )
    plan = Plan(
        tp=about["tp"],
        pp=about["pp"],
        dp=about["dp"],
        chunks=about["chunks"],
        sequence=about["sequence_parallel"],
        zero=about["zero"],
        micro_batch=about["micro_batch_size"],
        global_batch=about["global_batch_size"],
        width=4 if about["precision"] in ("fp32", "tf32") else 2,
    )
    name = f"{about['size']} {about['layout']} {about['precision']}"
    run = Run(name, _as_predicted(model), plan, about["context"], _system(given, name), median(row["samples_ms"]) / 1e3)
    yield from observe_step(run)
    yield from observe_timers(run, _last_rank(row["metrics"]["timers_ms"]))


def _of_training(rows: list[dict[str, Any]], name: str, given: Given) -> Iterator[Observation]:
    """A log of `cs336_systems.train`: a line that says what is trained, then a line of every report."""
    header, reports = rows[0], [row for row in rows[1:] if "step_ms" in row]
    if not reports:
        raise UserError(f"{name} has no timings: train with --timers max, for longer than --log-every steps")
    mesh, recipe = header["mesh"], header["recipe"]
    model = ModelConfig(**header["model"] | {"mixture": Mixture(**header["model"]["mixture"])})
    plan = Plan(
        **{axis: mesh.get(axis, 1) for axis in ("tp", "pp", "dp", "ep")},
        chunks=recipe["chunks"],
        sequence=recipe["sequence_parallel"],
        zero=recipe["zero"],
        micro_batch=header["micro_batch_size"],
        global_batch=header["batch_size"],
        width=4 if recipe["precision"] in ("fp32", "tf32") else 2,
    )
    used = [each for each in reports if not each.get("skipped")] or reports
    used = used[1:] or used  # the first starts everything
    seconds = median(each["step_ms"] for each in used) / 1e3
    run = Run(name, _as_predicted(model), plan, header["seq"], _system(given, name), seconds)
    yield from observe_step(run)
    timed = [_last_rank(each.get("timers_ms", {})) for each in used]
    shared = set.intersection(*map(set, timed))
    yield from observe_timers(run, {timer: median(each[timer] for each in timed) for timer in shared})


def _last_rank(timers: Mapping[str, list[float | None]]) -> dict[str, float]:
    """Milliseconds by timer on the last rank, as Megatron-LM prints them."""
    last = {name: values[-1] for name, values in timers.items()}
    return {name: value for name, value in last.items() if value is not None}


def _as_predicted(model: ModelConfig) -> ModelConfig:
    """The model of time knows one way of running blocks again, where this project has two."""
    return replace(model, recompute="segments") if model.recompute == "nested" else model


def _system(given: Given, name: str) -> System:
    if given.system is None:
        raise UserError(f"{name}: this file does not say what its machine can do: give --system")
    return given.system


def _one_device(environment: Mapping[str, Any], flops: float, bandwidth: float) -> System:
    """A device whose ceilings were measured, so that all of them is attainable; it is alone."""
    alone = Link(0.0, bandwidth)
    cores = int(environment["cores"]) if environment["device_type"] == "cpu" else 1
    return System(str(environment["device"]), flops, flops, 1.0, bandwidth, 0.0, cores, 1, alone, alone)
