"""`memory`: bytes of each rank of a plan, stage by stage, and which choices would make it fit."""

from typing import Any

import click
from rich.console import Console
from rich.text import Text

from cs336_systems.cost.commands.output import Total, json_option, new_table, print_json
from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.plan import RECOMPUTE
from cs336_systems.cost.plan_memory import RESERVE, fullest_stages, peak_bytes, rank_bytes, usable_memory
from cs336_systems.cost.step_time import expert_every
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes


@click.command("memory")
@request_options
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Memory of a rank of each kind of stage at the fullest moment of a step, by part, and which choices would fit."""
    request = take_request(given)
    config, plan, available = request.config, request.plan, usable_memory(request.system)
    # Of each kind of stage the one that needs most.
    kinds = sorted(fullest_stages(config.num_layers, expert_every(config), plan.pp, plan.chunks))
    stages = {stage: rank_bytes(config, plan, request.seq, stage) for stage in kinds}
    choices = []
    for name, recompute in RECOMPUTE.items():
        for zero in range(4) if plan.replicas > 1 else (0,):
            other = config.override(recompute=recompute), plan.override(zero=zero)
            need = sum(peak_bytes(*other, request.seq)[1].values())
            choices.append({"recompute": name, "zero": zero, "peak_bytes": need, "fits": need <= available})
    if not as_json:
        _print(console.console(), request, stages, choices)
        return
    fullest, parts = peak_bytes(config, plan, request.seq)
    need = sum(parts.values())
    print_json(
        {
            **request.record(),
            "stages": {str(stage): each for stage, each in stages.items()},
            "fullest_stage": fullest,
            "peak_bytes": need,
            "room_bytes": available,
            "fits": need <= available,
            "choices": choices,
        }
    )


def _print(screen: Console, request: Request, stages: dict[int, dict[str, float]], choices: list[Any]) -> None:
    system, pp, available = request.system, request.plan.pp, usable_memory(request.system)
    peaks = {stage: sum(parts.values()) for stage, parts in stages.items()}
    places = {0: "first", pp - 1: "last"}
    titles = [f"stage {stage} ({places.get(stage, 'between')})" for stage in stages] if pp > 1 else ["each rank"]
    parts = next(iter(stages.values()))
    rows = [[part, *(format_bytes(each[part]) for each in stages.values())] for part in parts]
    peak = Total(["peak", *map(format_bytes, peaks.values())])
    screen.print(f"{request.lines()}\n")
    screen.print(new_table(["bytes of a rank", *titles], [*rows, None, peak]))

    fullest = max(peaks, key=lambda stage: peaks[stage])
    need = peaks[fullest]
    left = f"{format_bytes(abs(available - need))} {'left' if need <= available else 'too much'}"
    where = f"on stage {fullest}, the fullest, " if pp > 1 else ""
    kept = f"{system.name}'s {format_bytes(system.memory)} less {RESERVE:.0%} for context, communication, fragmentation"
    counted = f"\n{format_bytes(need)} {where}of {format_bytes(available)} ({kept}) "
    verdict = ("fits", "green") if need <= available else ("does not fit", "red")
    screen.print(Text.assemble(counted, verdict, f": {left}\n"))

    screen.print("Peak by recomputation and ZeRO stage; in brackets: does not fit.")
    found = {name: [each for each in choices if each["recompute"] == name] for name in RECOMPUTE}
    texts = {True: "{}", False: "({})"}
    rows = [
        [name, *(texts[each["fits"]].format(format_bytes(each["peak_bytes"])) for each in row)]
        for name, row in found.items()
    ]
    screen.print(new_table(["recompute", *(f"ZeRO {each['zero']}" for each in found["none"])], rows))
