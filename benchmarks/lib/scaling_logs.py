"""Runs of a scaling study from files: logs of Megatron-LM or of cs336_systems.train, and runs kept as JSON."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.lib.scaling_run import MEBIBYTE, ScalingRun, own_shape
from benchmarks.records import shown
from cs336_systems.cost.logs import LoggedRun, megatron_runs, read_train_log
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import regular, strict_json

DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "world_size")
# Arguments of models that the formula for FLOPs does not describe.
OTHER_SHAPES = ("swiglu", "group_query_attention", "num_experts")


def read_runs(paths: Iterable[Path]) -> list[ScalingRun]:
    """Read the runs of some files, in order, each by its suffix: .json, .jsonl, or else a log of Megatron-LM.

    Raises UserError for a file that cannot be read or holds no run.
    """
    found: list[ScalingRun] = []
    for path in paths:
        with os_errors(f"read {path}"):
            text = regular(path).read_text(errors="replace")
        found += {".json": parse_published, ".jsonl": parse_train_log}.get(path.suffix, parse_log)(text, path.name)
    return found


def parse_published(text: str, name: str) -> list[ScalingRun]:
    """Read runs kept as JSON: `{"source": "...", "common": {fields that all share}, "runs": [{fields of a run}, ...]}`.

    Raises UserError if it is not that.
    """
    with shown(name, "{} does not hold runs as benchmarks/published/ does"):
        content = strict_json(text)
        shared = {"source": content["source"], **content.get("common", {})}
        if not content["runs"]:
            raise UserError(f"{name} has no run")
        return [ScalingRun(**shared | row) for row in content["runs"]]


def parse_log(text: str, name: str = "log") -> list[ScalingRun]:
    """Read a Megatron-LM log, or notes that quote such logs: one run per block of arguments.

    The time of an iteration and each timer are the median over the reports without a skipped iteration. Raises
    UserError if there are no timers, saying what was looked for, or if the arguments lack the layout or contradict
    themselves.
    """
    timed = [run for run in megatron_runs(text, name) if run.timers(first=True)]
    if not timed:
        raise UserError(
            f"{name} has no timers of a training step: looked for lines `time (ms) | forward-compute: 43.42 | ...`, "
            "and for `forward-backward ...: (41.07, 43.42)` below `time across ranks (ms):`; newer Megatron-LM "
            "prints them with --timing-log-level 2"
        )
    return [_megatron_run(logged, name) for logged in timed]


def _megatron_run(logged: LoggedRun, file: str) -> ScalingRun:
    tp, pp, dp, world = (_number(logged, each, file) for each in DEGREES)
    if tp * pp * dp != world:
        raise UserError(
            f"{file}: world_size {world} is not tensor {tp} x pipeline {pp} x data {dp} = {tp * pp * dp} parallel; "
            "other kinds of parallelism have no place in this table"
        )
    batch = logged.batch or _number(logged, "global_batch_size", file)
    iteration_ms = median([each.milliseconds for each in logged.steady(first=True)]) if logged.reports else None
    if iteration_ms is None and logged.sample_ms is None:
        raise UserError(
            f"{file} has timers, but not the time of an iteration: looked for `elapsed time per iteration (ms): ...` "
            "and `... ms per sample`"
        )
    counts: dict[str, int] = {}
    if same := logged.at_last_batch:
        first, last = same[0], same[-1]
        if last.iteration > first.iteration and first.consumed is not None and last.consumed is not None:
            counts = {"iterations": last.iteration - first.iteration, "samples": last.consumed - first.consumed}
    arguments, hidden = logged.arguments, logged.number("hidden_size")
    full = arguments.get("checkpoint_activations") == "True" or arguments.get("recompute_granularity") == "full"
    other = logged.number("ffn_hidden_size") not in (None, 4 * (hidden or 0)) or any(map(logged.says, OTHER_SHAPES))
    return ScalingRun(
        name=logged.name, tp=tp, pp=pp, dp=dp, micro_batch_size=_number(logged, "micro_batch_size", file),
        global_batch_size=batch, ms_per_sample=iteration_ms / batch if iteration_ms else logged.sample_ms or 0.0,
        timers=logged.timers(first=True), num_layers=None if other else logged.number("num_layers"), hidden_size=hidden,
        seq_length=logged.number("seq_length"), vocab_size=logged.vocabulary(), over_ranks=logged.over_ranks,
        recompute="full" if full else "selective" if logged.says("recompute_granularity") else "none", source=file,
        **logged.notes | counts,
    )  # fmt: skip


def _number(logged: LoggedRun, name: str, file: str) -> int:
    number, said = logged.number(name), logged.arguments
    if number is None:
        seen = f"says {said[name]!r}" if name in said else "is not there"
        # This project prints lines like Megatron-LM's, too, but the layout only into its log.
        ours = "" if said else "; of this project's own runs give the log file (--log-file), not what is printed"
        raise UserError(
            f"{file} has timers, but no layout for them: {name} {seen} in the block between `--- arguments ---` and "
            f"`--- end of arguments ---` that Megatron-LM prints first{ours}"
        )
    return number


def parse_train_log(text: str, file: str) -> list[ScalingRun]:
    """Read the one run of a log of cs336_systems.train. Raises UserError as `read_train_log` does."""
    with shown(file, "{} is not as python -m cs336_systems.train writes its log"):
        return [_own_run(read_train_log(text, file))]


def _own_run(logged: LoggedRun) -> ScalingRun:
    header, file = logged.header, logged.name
    mesh, batch, memory = header["mesh"], header["batch_size"], logged.notes["peak_memory"]
    if mesh.get("ep", 1) != 1:
        raise UserError(
            f"{file}: {mesh['ep']} expert-parallel ranks have no place in a table of tensor x pipeline x data"
        )
    return ScalingRun(
        name=file, tp=mesh["tp"], pp=mesh["pp"], dp=mesh["dp"], micro_batch_size=header["micro_batch_size"],
        global_batch_size=batch, ms_per_sample=median(each.milliseconds for each in logged.steady(first=True)) / batch,
        timers=logged.timers(first=True), seq_length=header["seq"],
        gpu_memory=(memory[0] / MEBIBYTE, memory[1] / MEBIBYTE) if memory and memory[1] else None,
        source=f"{file}, {header['recipe']['precision']} on {header['environment']['device']}",
        **own_shape(header["model"]),
    )  # fmt: skip
