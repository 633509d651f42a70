"""Reads the log that `python -m cs336_systems.train` writes: a run's layout, batch, model, time and timers."""

import json
from statistics import median
from typing import Any

from benchmarks.scaling_run import RECOMPUTED, Run
from cs336_systems.errors import UserError

MEBIBYTE = 2**20
MEASURED = ("mesh", "model", "seq", "batch_size", "micro_batch_size")
HEADER = ("recipe", "mesh", "model", "seq", "batch_size", "micro_batch_size", "environment")


def parse_train_log(text: str, name: str) -> list[Run]:
    """The one run of a log file: a line of JSON that says what is trained, then a line of every report.

    A run that was resumed says so in a line of the same kind; if it went on in another layout, only what
    comes after counts.

    The time of an iteration and each timer are the median over the reports, leaving out those with a skipped step,
    which did no update, unless all have one. Timers are the last rank's, as Megatron-LM prints them. The peak memory is
    in the last line, which a run that was stopped does not have. Raises UserError for another file, and for a log
    without timers.
    """
    header, *lines = _objects(text, name)
    if missing := [each for each in HEADER if each not in header]:
        raise UserError(
            f"{name} is no log of python -m cs336_systems.train: its first line does not have {', '.join(missing)}"
        )
    reports: list[dict[str, Any]] = []
    for line in lines:
        if "resumed" in line and any(line.get(key) != header[key] for key in MEASURED):
            header, reports = line, []
        elif "step_ms" in line:
            reports.append(line)
    if not reports:
        if any("step" in line for line in lines):
            raise UserError(f"{name} has no timers: train with --timers max")
        raise UserError(f"{name} has no step yet: wait for the first line that train writes, after --log-every steps")
    used = [line for line in reports if not line.get("skipped")] or reports
    try:
        return [_run(header, used, lines[-1].get("peak_memory"), name)]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name} is not as python -m cs336_systems.train writes its log: {error!r}") from None


def _objects(text: str, name: str) -> list[dict[str, Any]]:
    """The lines as JSON objects, the last one left out if it was cut: a run that goes on is writing it."""
    lines = text.splitlines()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) > 1:
                break
            value = None
        if not isinstance(value, dict):
            raise UserError(
                f"{name}, line {number}: a log of python -m cs336_systems.train has a JSON object on every line"
            )
        found.append(value)
    if not found:
        raise UserError(f"{name} is empty")
    return found


def _run(header: dict[str, Any], reports: list[dict[str, Any]], memory: Any, file: str) -> Run:
    mesh, batch, recipe = header["mesh"], header["batch_size"], header["recipe"]
    if mesh.get("ep", 1) != 1:
        raise UserError(
            f"{file}: {mesh['ep']} expert-parallel ranks have no place in a table of tensor x pipeline x data"
        )
    last = [{name: values[-1] for name, values in line["timers_ms"].items()} for line in reports]
    taken = {name: [each[name] for each in last if each.get(name) is not None] for each in last for name in each}
    return Run(
        name=file, tp=mesh["tp"], pp=mesh["pp"], dp=mesh["dp"],
        micro_batch_size=header["micro_batch_size"], global_batch_size=batch,
        ms_per_sample=median(line["step_ms"] for line in reports) / batch,
        timers={name: median(values) for name, values in taken.items() if values},
        gpu_memory=(memory[0] / MEBIBYTE, memory[1] / MEBIBYTE) if memory and memory[1] else None,
        source=f"{file}, {recipe['precision']} on {header['environment']['device']}",
        **_shape(header["model"], header["seq"]),
    )  # fmt: skip


def _shape(model: dict[str, Any], seq: int) -> dict[str, Any]:
    """Fields of the model: without num_layers if its FLOPs are not those of the plain transformer."""
    other = model["d_ff"] != 4 * model["d_model"] or model["feed_forward"] == "swiglu" or model["num_experts"]
    grouped = model["num_kv_heads"] not in (0, model["num_heads"])
    # Nested segments repeat some of what they repeat; the formula has every block once more.
    plain = not (other or grouped or model["recompute"] == "nested")
    return {
        "num_layers": model["num_layers"] if plain else None, "hidden_size": model["d_model"], "seq_length": seq,
        "vocab_size": model["vocab_size"], "recompute": RECOMPUTED[model["recompute"]],
    }  # fmt: skip
