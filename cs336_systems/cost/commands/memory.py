"""`memory`: what each rank of a plan needs, stage by stage, and which choices would make it fit."""

import json
from collections.abc import Iterator
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cs336_systems import console
from cs336_systems.console import format_bytes
from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.large.plan_memory import RESERVE, fullest_stages, peak_bytes, rank_bytes, room
from cs336_systems.cost.large.settings import RECOMPUTE

ZEROS = (0, 1, 2, 3)


@click.command("memory")
@request_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(as_json: bool, **given: Any) -> None:
    """What a rank of each kind of stage needs at the fullest moment of a step, by part, and what would fit."""
    request = take_request(given)
    if as_json:
        click.echo(json.dumps(_record(request), indent=1, allow_nan=False))
    else:
        _print(console.console(), request)


def stages(request: Request) -> dict[int, dict[str, float]]:
    """The parts of one stage of each kind, that which needs most of its kind."""
    config, plan = request.config, request.plan
    kinds = fullest_stages(config.num_layers, config.expert_every if config.num_experts else 0, plan.pp, plan.chunks)
    return {stage: rank_bytes(config, plan, request.seq, stage) for stage in sorted(kinds)}


def choices(request: Request) -> Iterator[tuple[str, int, float]]:
    """(what is recomputed, ZeRO stage, bytes of the fullest rank) for the same plan otherwise."""
    for word, ours in RECOMPUTE.items():
        for zero in ZEROS if request.plan.replicas > 1 else (0,):
            parts = peak_bytes(request.config.override(recompute=ours), request.plan.override(zero=zero), request.seq)[
                1
            ]
            yield word, zero, sum(parts.values())


def _record(request: Request) -> dict[str, Any]:
    peak, parts = peak_bytes(request.config, request.plan, request.seq)
    need = sum(parts.values())
    return {
        **request.record(),
        "stages": {str(stage): each for stage, each in stages(request).items()},
        "fullest_stage": peak,
        "peak_bytes": need,
        "room_bytes": room(request.system),
        "fits": need <= room(request.system),
        "choices": [
            {"recompute": word, "zero": zero, "peak_bytes": each, "fits": each <= room(request.system)}
            for word, zero, each in choices(request)
        ],
    }


def _print(screen: Console, request: Request) -> None:
    for line in request.lines():
        screen.print(line)
    found, most, system = stages(request), room(request.system), request.system
    screen.print()
    screen.print(_parts(request, found))
    peak = max(found, key=lambda stage: sum(found[stage].values()))
    need = sum(found[peak].values())
    fits, by = need <= most, format_bytes(abs(most - need))
    where = f"on stage {peak}, the fullest, " if request.plan.pp > 1 else ""
    counted = (
        f"\n{format_bytes(need)} {where}of {format_bytes(most)} ({system.name}'s {format_bytes(system.memory)} less "
        f"{RESERVE:.0%} for context, communication and fragmentation) "
    )
    verdict = ("fits", "green") if fits else ("does not fit", "red")
    screen.print(Text.assemble(counted, verdict, f": {by} {'left' if fits else 'too much'}\n"))
    screen.print("The peak by choice, in brackets what does not fit:")
    screen.print(_what_fits(request, most))


def _parts(request: Request, found: dict[int, dict[str, float]]) -> Table:
    """A column for each kind of stage."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("of a rank" if request.plan.pp > 1 else "of each rank", no_wrap=True)
    for stage in found:
        table.add_column(_title(stage, request.plan.pp), justify="right", no_wrap=True)
    for part in next(iter(found.values())):
        table.add_row(part, *(format_bytes(each[part]) for each in found.values()))
    table.add_section()
    table.add_row("peak", *(format_bytes(sum(each.values())) for each in found.values()), style="bold")
    return table


def _title(stage: int, pp: int) -> str:
    if pp == 1:
        return "bytes"
    place = "first" if stage == 0 else "last" if stage == pp - 1 else "between"
    return f"stage {stage} ({place})"


def _what_fits(request: Request, most: float) -> Table:
    """The peak for each recomputation and ZeRO stage; what does not fit is in brackets."""
    found = list(choices(request))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("recompute", no_wrap=True)
    for zero in sorted({zero for _, zero, _ in found}):
        table.add_column(f"ZeRO {zero}", justify="right", no_wrap=True)
    for word in RECOMPUTE:
        peaks = [peak for name, _, peak in found if name == word]
        table.add_row(word, *(format_bytes(peak) if peak <= most else f"({format_bytes(peak)})" for peak in peaks))
    return table
