"""`memory`: bytes of each rank of a plan, stage by stage, and which choices would make it fit."""

from typing import Any

import click
from rich.text import Text

from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.commands.step import fit_verdict
from cs336_systems.cost.plan import RECOMPUTE
from cs336_systems.cost.plan_memory import peak_bytes, rank_bytes, usable_memory
from cs336_systems.cost.stacks import STACKS, usual_stack
from cs336_systems.cost.step_time import fullest_stages
from cs336_systems.cost.template import Total, fill_file, json_option, new_table, print_json, print_page
from cs336_systems.host.console import console, format_bytes


@click.command("memory")
@request_options
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Memory of a rank of each kind of stage at the fullest moment of a step, by part, and which choices would fit."""
    chosen, kernels = given["stack"], given["kernels"]
    request = take_request(given)
    config, plan, room = request.config, request.plan, usable_memory(request.system)
    kinds = fullest_stages(config, plan)
    stages = {stage: rank_bytes(config, plan, request.seq, stage) for stage in kinds}
    choices = []
    for name, recompute in RECOMPUTE.items():
        for zero in (
            range(1 if plan.shard else 0, 4) if plan.replicas > 1 else (0,)
        ):  # without ZeRO nothing is in shards
            stack = chosen or usual_stack(zero, kernels)
            again = config.override(recompute=recompute, kernels=kernels or "triton")
            other = STACKS[stack].shape(again, plan.override(zero=zero))
            need = sum(peak_bytes(*other, request.seq)[1].values())
            choices.append({"recompute": name, "zero": zero, "stack": stack, "peak_bytes": need, "fits": need <= room})
    fullest, parts = peak_bytes(config, plan, request.seq)
    need = sum(parts.values())
    low, high = STACKS[plan.stack].bytes(need)
    found = {
        "stages": {str(stage): each for stage, each in stages.items()},
        "fullest_stage": fullest,
        "peak_bytes": need,
        "low_bytes": low,
        "high_bytes": high,
        "room_bytes": room,
        "fits": need <= room,
        "choices": choices,
    }
    if as_json:
        print_json({**request.record(), **found})
    else:
        _print(request, stages, found)


def _print(request: Request, stages: dict[int, dict[str, float]], found: dict[str, Any]) -> None:
    screen, pp, need, room = console(), request.plan.pp, found["peak_bytes"], found["room_bytes"]
    places = {0: "first", pp - 1: "last"}
    titles = [f"stage {stage} ({places.get(stage, 'between')}):b" for stage in stages] if pp > 1 else ["each rank:b"]
    rows = [[part, *(each[part] for each in stages.values())] for part in next(iter(stages.values()))]
    peak = Total(["peak", *(sum(each.values()) for each in stages.values())])
    where = f"on stage {found['fullest_stage']}, the fullest, " if pp > 1 else ""
    counted, left = fill_file("room", found | {"system": request.system, "where": where, "left": abs(room - need)})
    words = fit_verdict(need, found["low_bytes"], found["high_bytes"], room).rstrip(",")
    verdict = words, "green" if words == "fits" else "yellow" if words != "does NOT fit" else "red"
    table: dict[str, list[str]] = {name: [name] for name in RECOMPUTE}
    for each in found["choices"]:
        needed = format_bytes(each["peak_bytes"])
        table[each["recompute"]].append(needed if each["fits"] else f"({needed})")
    columns = [f"ZeRO {each['zero']}, {each['stack']}" for each in found["choices"] if each["recompute"] == "none"]
    screen.print(request.lines())
    parts = {"stages": new_table(["bytes of a rank", *titles], [*rows, None, peak])}
    choices = new_table(["recompute", *columns], table.values())
    print_page(screen, "memory", {}, parts | {"room": Text.assemble(counted, verdict, left), "choices": choices})
