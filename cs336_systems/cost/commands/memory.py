"""`memory` and `explain memory`: bytes of each rank of a plan, stage by stage, and which choices would make it fit."""

from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cs336_systems.cost.commands.output import json_option, new_table, print_json
from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.operator_time import GROUPS
from cs336_systems.cost.options import RECOMPUTE
from cs336_systems.cost.plan_memory import (
    RESERVE,
    fullest_stages,
    live_passes,
    peak_bytes,
    rank_bytes,
    unit,
    usable_memory,
)
from cs336_systems.cost.step_time import GRADIENT, stage_groups, stage_weights
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count


@click.command("memory")
@request_options
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Memory of a rank of each kind of stage at the fullest moment of a step, by part, and which choices would fit."""
    request = take_request(given)
    if as_json:
        print_json(_record(request))
    else:
        _print(console.console(), request)


def stages(request: Request) -> dict[int, dict[str, float]]:
    """Parts of memory by stage, of each kind of stage the one that needs most."""
    config, plan = request.config, request.plan
    kinds = fullest_stages(config.num_layers, config.expert_every if config.num_experts else 0, plan.pp, plan.chunks)
    return {stage: rank_bytes(config, plan, request.seq, stage) for stage in sorted(kinds)}


def choices(request: Request) -> Iterator[tuple[str, int, float]]:
    """(recomputation, ZeRO stage, bytes of the fullest rank) for the same plan otherwise."""
    for name, recompute in RECOMPUTE.items():
        for zero in range(4) if request.plan.replicas > 1 else (0,):
            config, plan = request.config.override(recompute=recompute), request.plan.override(zero=zero)
            yield name, zero, sum(peak_bytes(config, plan, request.seq)[1].values())


def _record(request: Request) -> dict[str, Any]:
    peak, parts = peak_bytes(request.config, request.plan, request.seq)
    need, available = sum(parts.values()), usable_memory(request.system)
    return {
        **request.record(),
        "stages": {str(stage): each for stage, each in stages(request).items()},
        "fullest_stage": peak,
        "peak_bytes": need,
        "room_bytes": available,
        "fits": need <= available,
        "choices": [
            {"recompute": name, "zero": zero, "peak_bytes": each, "fits": each <= available}
            for name, zero, each in choices(request)
        ],
    }


def _print(screen: Console, request: Request) -> None:
    for line in request.lines():
        screen.print(line)
    screen.print()
    found, available, system, pp = stages(request), usable_memory(request.system), request.system, request.plan.pp
    peaks = {stage: sum(parts.values()) for stage, parts in found.items()}
    places = {0: "first", pp - 1: "last"}
    titles = [f"stage {stage} ({places.get(stage, 'between')})" for stage in found] if pp > 1 else ["each rank"]
    table = new_table(["bytes of a rank", *titles])
    for part in next(iter(found.values())):
        table.add_row(part, *(format_bytes(each[part]) for each in found.values()))
    table.add_section()
    table.add_row("peak", *map(format_bytes, peaks.values()), style="bold")
    screen.print(table)

    fullest = max(peaks, key=lambda stage: peaks[stage])
    need = peaks[fullest]
    left = f"{format_bytes(abs(available - need))} {'left' if need <= available else 'too much'}"
    where = f"on stage {fullest}, the fullest, " if pp > 1 else ""
    kept = f"{system.name}'s {format_bytes(system.memory)} less {RESERVE:.0%} for context, communication, fragmentation"
    counted = f"\n{format_bytes(need)} {where}of {format_bytes(available)} ({kept}) "
    verdict = ("fits", "green") if need <= available else ("does not fit", "red")
    screen.print(Text.assemble(counted, verdict, f": {left}\n"))

    every = list(choices(request))
    screen.print("Peak by recomputation and ZeRO stage; in brackets: does not fit.")
    table = new_table(["recompute", *(f"ZeRO {zero}" for zero in sorted({zero for _, zero, _ in every}))])
    for name in RECOMPUTE:
        row = [peak for each, _, peak in every if each == name]
        table.add_row(name, *(format_bytes(peak) if peak <= available else f"({format_bytes(peak)})" for peak in row))
    screen.print(table)


def explain_memory(request: Request) -> tuple[dict[str, Any], dict[str, Table]]:
    """Numbers of `templates/memory.txt`, the derivation of `peak_bytes`, and its table. Raises UserError likewise."""
    config, plan, system = request.config, request.plan, request.system
    stage, parts = peak_bytes(config, plan, request.seq)
    shared, owned, _ = stage_weights(config, plan, request.seq, stage)
    weights = [f"{format_count(shared, 'B')} parameters shared by all replicas"] * bool(shared)
    weights += [f"{format_count(owned, 'B')} of its own experts"] * bool(owned)
    split = ("nothing", "optimizer state", "optimizer state, and gradients where a step is one pass,", "all of it")
    sharded = f"ZeRO {plan.zero} splits {split[plan.zero]} over {plan.replicas} replicas"
    alive = max(map(sum, live_passes(stage, plan.pp, plan.microbatches, plan.chunks)))
    need, available = sum(parts.values()), usable_memory(system)
    numbers = {
        "plan": plan,
        "system": system,
        "parts": parts,
        "stage": stage,
        "weights": " and ".join(weights),
        "gradient": GRADIENT,
        "moments": 12 if plan.width < 4 else 8,
        "master": plan.width < 4,
        "sharded": sharded if plan.zero else "Nothing is split over replicas",
        "alive": alive,
        "unit": "microbatch" if alive == 1 else "microbatches",
        "chunked": plan.chunks > 1,
        "sum": " + ".join(format_bytes(count) for count in parts.values() if count),
        "need": need,
        "reserve": RESERVE,
        "available": available,
        "fits": need <= available,
    }
    table = new_table(["one of", "on the stage", "keeps for backward", "made again in backward"])
    for group, times in stage_groups(config, plan, stage):
        one = unit(config, plan.alone(), request.seq, group)
        again = format_bytes(one.again) if one.again else ""
        table.add_row(GROUPS[group], f"{times:g}", format_bytes(one.kept), again)
    return numbers, {"activations": table}
