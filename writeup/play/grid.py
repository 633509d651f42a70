"""Grid of layouts, evaluated by the cost model while the page is built, and pipelines simulated by `schedule.simulate`.

The page looks numbers up and never interpolates: there is no second implementation that could differ from the first.
"""

import json
from functools import cache
from itertools import product
from typing import Any

from cs336_systems.cost.domain import outside, time_range
from cs336_systems.cost.machines import GIB, system_preset
from cs336_systems.cost.plan import RECOMPUTE, Plan
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.stacks import STACKS, usual_stack
from cs336_systems.cost.step_time import PARTS, StepTime, step_time
from cs336_systems.errors import UserError
from cs336_systems.presets import ModelConfig, model_preset
from cs336_systems.schedule import schedule, simulate
from cs336_systems.schedule.lists import NAMES
from cs336_systems.schedule.simulation import ORDER

# Axis: label, option of `cost step`, values, the one shown first. The order is that of the page's controls.
AXES: dict[str, tuple[str, str, tuple[Any, ...], Any]] = {
    "model": ("Model", "--preset", ("xl", "llama-8b", "llama-70b", "gpt3-175b"), "llama-8b"),
    "machine": ("Accelerator", "--system", ("A100-80GB", "H100"), "H100"),
    "tp": ("Tensor parallel (tp)", "--tp", (1, 2, 4, 8), 2),
    "pp": ("Pipeline stages (pp)", "--pp", (1, 2, 4, 8), 2),
    "dp": ("Data parallel (dp)", "--dp", (1, 8, 32, 128), 8),
    "zero": ("ZeRO stage", "--zero", (0, 1, 3), 1),
    "recompute": ("Recompute", "--recompute", ("none", "full"), "none"),
    "micro_batch": ("Microbatch", "--micro-batch-size", (1, 2, 4), 2),
}
SEQUENCE, BATCH = 2048, 256  # tokens; sequences of a step, all ranks together
TIMES = tuple(name for name in PARTS if name not in ("computing", "context-parallel", "expert-parallel"))
MEMORY = {  # in the colours of `figures.COLOURS`
    "weights": "#0072B2", "gradients": "#E69F00", "optimizer": "#D55E00", "activations": "#009E73",
    "workspace": "#CC79A7", "framework": "#999999",
}  # fmt: skip
VERDICTS = ("Refused, would run out of memory: ", "May run out of memory: ", "Fits: ")
LENGTHS = dict.fromkeys(NAMES, 1) | {"interleaved": 2, "zbv": 2}  # chunks of a stage
STAGES, MICROBATCHES = (2, 4, 8), (2, 4, 6, 8, 16)
FORWARD, BACKWARD = 2.0, 4.0  # time units of a stage's forward and backward, all chunks together


def cell(values: dict[str, Any]) -> tuple[list[float], list[tuple[list[float], list[str]]]]:
    """One layout. Of memory: ranks, microbatches, the fullest stage, and GiB on a rank of it, in all, at both ends of
    the range, and of each of `MEMORY`. Of each machine: milliseconds of each of `TIMES`, of the step, and at both ends
    of its range, MFU in percent, and the place of the verdict in `VERDICTS`; with how the prediction lies outside what
    was fitted. Raises UserError for a layout that cannot be."""
    stack, steps = STACKS[usual_stack(values["zero"])], list[StepTime]()
    degrees = {name: values[name] for name in ("tp", "pp", "dp", "zero", "micro_batch")}
    for machine in AXES["machine"][2]:
        system = stack.on(system_preset(machine))
        plan = Plan(**degrees, sequence=values["tp"] > 1, global_batch=BATCH, overlap=system.overlap)
        steps.append(step_time(*stack.shape(_model(values["model"], values["recompute"]), plan), SEQUENCE, system))
    stage, parts = peak_bytes(steps[0].config, steps[0].plan, SEQUENCE)
    needed, timed = sum(parts.values()), list[tuple[list[float], list[str]]]()
    low, high = stack.bytes(needed)
    for step in steps:
        notes = outside(step)
        seconds = [*(step.parts[name] for name in TIMES), step.total, *time_range(step, notes)]
        verdict = sum(each <= usable_memory(step.system) for each in (low, needed))
        numbers = [*(1e3 * each for each in seconds), 100 * step.mfu, verdict]
        timed.append(([*map(short, numbers)], notes))
    nbytes = [needed, low, high, *(parts.get(name, 0.0) for name in MEMORY)]
    return [plan.ranks, plan.microbatches, stage, *(short(each / GIB) for each in nbytes)], timed


@cache
def layouts() -> dict[str, Any]:
    """Tables of memory and time (`cell`) over all layouts, the last of a table's axes changing fastest; notes and
    refusals are numbers of `texts`, and a refused layout's cell is the number alone."""
    texts: dict[str, int] = {}
    apart = [name for name in AXES if name != "machine"]  # memory is the same on any of these machines
    memory, time = list[Any](), list[Any]()
    for choice in product(*(AXES[name][2] for name in apart)):
        try:
            held, timed = cell(dict(zip(apart, choice, strict=True)))
        except UserError as error:
            refused = texts.setdefault(str(error), len(texts))
            memory.append(refused)
            time += [refused] * len(AXES["machine"][2])
            continue
        memory.append(held)
        time += [[*numbers, *(texts.setdefault(note, len(texts)) for note in notes)] for numbers, notes in timed]
    tables = {"memory": {"axes": apart, "cells": memory}, "time": {"axes": [*apart, "machine"], "cells": time}}
    return tables | {"texts": list(texts)}


def pipelines() -> dict[str, Any]:
    """`schedule stages microbatches`: for each stage its actions as five numbers (place of the kind in `ORDER`,
    microbatch, chunk, start, end), idle share in percent, most forwards in flight on each stage, end; or why there is
    none."""
    found: dict[str, Any] = {}
    for name, stages, microbatches in product(NAMES, STAGES, MICROBATCHES):
        key = f"{name} {stages} {microbatches}"
        try:
            lists = schedule(name, stages, microbatches, LENGTHS[name])
        except UserError as error:
            found[key] = str(error)
            continue
        played = simulate(lists, FORWARD, BACKWARD, turn=name == "zbv")
        rows = [
            [(ORDER.index(a.kind), a.microbatch, a.chunk, short(start), short(end)) for _, a, start, end in row]
            for row in played.timeline
        ]
        found[key] = [rows, short(100 * played.bubble), played.peak_live, short(played.makespan)]
    return found


def grid() -> dict[str, Any]:
    """Everything about layouts and pipelines that the page shows."""
    axes = []
    for name, (label, option, values, first) in AXES.items():
        options = [f"{option} {value}" + " --sequence-parallel" * (name == "tp" and value > 1) for value in values]
        axes.append([name, label, values, options, values.index(first)])
    command = f"python -m cs336_systems.cost step --context {SEQUENCE} --batch-size {BATCH}"
    machines = [system_preset(name) for name in AXES["machine"][2]]
    stacks = [STACKS[usual_stack(zero)] for zero in AXES["zero"][2]]
    return {
        "axes": axes, "command": command, "held": list(MEMORY.items()), "verdicts": VERDICTS,
        "stacks": [[each.name, each.memory_basis] for each in stacks], **layouts(),
        "parts": [[PARTS[name]["label"], PARTS[name]["colour"]] for name in TIMES],
        "machines": [[short(each.memory / GIB), short(usable_memory(each) / GIB)] for each in machines],
        "pipelines": {
            "names": NAMES, "stages": STAGES, "microbatches": MICROBATCHES, "played": pipelines(),
            "first": [NAMES.index("1f1b"), STAGES.index(4), MICROBATCHES.index(8)],
        },
    }  # fmt: skip


def short(number: float) -> float:
    """Three significant digits, more than the model knows, and fewer bytes of page; all digits of whole numbers."""
    rounded = float(f"{number:.3g}") if number < 1000 else round(number)
    return int(rounded) if rounded == int(rounded) else rounded


@cache
def _model(name: str, recompute: str) -> ModelConfig:
    shape = {"attention": "sdpa", "kernels": "triton", "context_length": SEQUENCE}  # by default, those of `cost step`
    return model_preset(name).override(recompute=RECOMPUTE[recompute], **shape)


if __name__ == "__main__":
    print(json.dumps(grid(), allow_nan=False))
