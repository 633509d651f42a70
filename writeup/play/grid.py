"""Grid of layouts, evaluated by the cost model while the page is built, and pipelines played by `schedule.simulate`.

The page only looks numbers up and never interpolates, so that there is no second implementation of the cost model that
could differ from the first.
"""

from functools import cache
from itertools import product
from typing import Any

from cs336_systems.cost.domain import time_range
from cs336_systems.cost.machines import GIB, system_preset
from cs336_systems.cost.plan import RECOMPUTE, Plan
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.stacks import STACKS, usual_stack
from cs336_systems.cost.step_time import PARTS, step_time
from cs336_systems.errors import UserError
from cs336_systems.presets import model_preset
from cs336_systems.schedule import schedule, simulate
from cs336_systems.schedule.lists import CHUNKS

# Axis: label, values. The order is that of the page's controls, and of the index of a cell.
AXES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "model": ("Model", ("2.7B", "llama-8b", "gpt3-175b")),
    "machine": ("Machine", ("A100-80GB", "H100")),
    "tp": ("Tensor parallel (tp)", (1, 2, 4, 8)),
    "pp": ("Pipeline stages (pp)", (1, 2, 4, 8)),
    "dp": ("Data parallel (dp)", (1, 4, 16, 64)),
    "zero": ("ZeRO stage", (0, 1, 3)),
    "recompute": ("Recompute", ("none", "selective", "full")),
    "micro_batch": ("Microbatch (sequences)", (1, 2, 4)),
}
SEQUENCE, BATCH = 2048, 256  # tokens; sequences of a step, all ranks together
TIMES = tuple(name for name in PARTS if name != "computing")  # that is forward and backward together
MEMORY = ("weights", "gradients", "optimizer state", "activations", "workspace", "besides")
LENGTHS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}  # schedule: chunks of a stage
STAGES, MICROBATCHES = (2, 4, 8), (4, 8, 16)
FORWARD, BACKWARD = 2.0, 4.0  # time units of a stage's forward and backward, all chunks together


def cell(values: dict[str, Any]) -> list[Any]:
    """Of one layout [GiB of each of `MEMORY` on the fullest rank, seconds of each of `TIMES`, low and high of the step
    in seconds, the fullest stage], or [why it cannot be]."""
    try:
        stack = STACKS[usual_stack(values["zero"])]
        plan = Plan(
            values["tp"], values["pp"], values["dp"], sequence=values["tp"] > 1, zero=values["zero"],
            micro_batch=values["micro_batch"], global_batch=BATCH, overlap=system_preset(values["machine"]).overlap,
        )  # fmt: skip
        config, plan = stack.shape(_model(values["model"], RECOMPUTE[values["recompute"]]), plan)
        step = step_time(config, plan, SEQUENCE, stack.on(system_preset(values["machine"])))
        stage, nbytes = peak_bytes(config, plan, SEQUENCE)
    except UserError as error:
        return [str(error)]
    memory = [_short(nbytes.get(name, 0.0) / GIB) for name in MEMORY]
    return [memory, [_short(step.parts[name]) for name in TIMES], [_short(each) for each in time_range(step)], stage]


def cells() -> list[list[Any]]:
    """All cells of the grid; the last axis changes fastest."""
    return [cell(dict(zip(AXES, each, strict=True))) for each in product(*(values for _, values in AXES.values()))]


def pipelines() -> dict[str, dict[str, Any]]:
    """`schedule stages microbatches`: for each stage its actions as [kind, microbatch, chunk, start, end]; the idle
    share of all stages' time, and the most microbatches in flight on each stage."""
    found = {}
    for name, stages, microbatches in product(LENGTHS, STAGES, MICROBATCHES):
        if name == "interleaved" and microbatches % stages:
            continue
        lists = schedule(name, stages, microbatches, CHUNKS.get(name, LENGTHS[name]))
        played = simulate(lists, FORWARD, BACKWARD, turn=name == "zbv")
        rows = [
            [[t.action.kind[0], t.action.microbatch, t.action.chunk, t.start, t.end] for t in row]
            for row in played.timeline
        ]
        found[f"{name} {stages} {microbatches}"] = {
            "rows": rows, "bubble": played.bubble, "live": played.peak_live, "end": played.makespan,
        }  # fmt: skip
    return found


def grid() -> dict[str, Any]:
    """Everything about layouts and pipelines that the page shows."""
    machines = AXES["machine"][1]
    return {
        "axes": [[name, label, values] for name, (label, values) in AXES.items()],
        "memory": MEMORY, "parts": [[PARTS[name]["label"], PARTS[name]["colour"]] for name in TIMES],
        "usable": {name: usable_memory(system_preset(name)) / GIB for name in machines},
        "cells": cells(), "pipelines": pipelines(),
    }  # fmt: skip


@cache
def _model(name: str, recompute: Any) -> Any:
    return model_preset(name).override(recompute=recompute, attention="sdpa", context_length=SEQUENCE)


def _short(number: float) -> float:
    """Four significant digits, more than the model knows and fewer bytes of page."""
    return float(f"{number:.4g}")
