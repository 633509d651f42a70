"""`step`: how long one optimizer step takes, what the time is spent on, and whether it fits."""

import json
from typing import Any

import click
from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from cs336_systems import console
from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost.commands.request import (
    Request,
    request_options,
    take_request,
    tokens_option,
    training,
    training_words,
)
from cs336_systems.cost.commands.warned import print_warnings
from cs336_systems.cost.flops import recompute_flops
from cs336_systems.cost.large.domain import DOMAIN, warnings
from cs336_systems.cost.large.plan_memory import peak_bytes, room
from cs336_systems.cost.large.step_time import StepTime

BAR = 48  # characters of the whole step
NARROW = 100  # columns, below which there is no room for it
BESIDES = 63  # columns that the rest of its table may need
GLOSSARY = (
    "Words: MFU, the share of the accelerators' peak that the model's own FLOPs are; HFU, the same with what backward "
    "runs again; bubble, the time that stages wait for the pipeline to fill and to drain."
)
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "forward again, in backward",
    "host": "waiting for the host to give out kernels",
    "tensor-parallel": "sends of tensor parallelism",
    "context-parallel": "sends of context parallelism",
    "expert-parallel": "sends of expert parallelism",
    "pipeline": "messages between stages",
    "bubble": "waiting for the pipeline to fill and drain",
    "data-parallel": "sends of data parallelism, not hidden",
    "optimizer": "AdamW",
}


@click.command("step", epilog=f"{DOMAIN}\n\n{GLOSSARY}")
@request_options
@tokens_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(tokens: float | None, as_json: bool, **given: Any) -> None:
    """The time of one step, what it is spent on, tokens a second, MFU, and memory."""
    request = take_request(given)
    step = request.step()
    whole = training(tokens, request.tokens / step.total, request.plan.ranks) if tokens else None
    if as_json:
        click.echo(
            json.dumps(_record(request, step) | ({"training": whole} if whole else {}), indent=1, allow_nan=False)
        )
    else:
        _print(console.console(), request, step, whole)


def hfu(step: StepTime) -> float:
    """Hardware FLOPs utilisation: as MFU, with what backward runs again (arXiv:2205.05198, section 6.3)."""
    rows = step.plan.micro_batch
    again = recompute_flops(step.config, rows, step.seq) * (step.plan.global_batch // rows)
    return step.mfu * (1 + again / step.model_flops)


def _record(request: Request, step: StepTime) -> dict[str, Any]:
    stage, memory = peak_bytes(request.config, request.plan, request.seq)
    rate = request.tokens / step.total
    return {
        **request.record(),
        "seconds": step.total,
        "parts": step.parts,
        "busiest_stage": step.stage,
        "tokens_per_second": rate,
        "tokens_per_second_per_accelerator": rate / request.plan.ranks,
        "model_flops": step.model_flops,
        "mfu": step.mfu,
        "hfu": hfu(step),
        "losses": losses(step),
        "fullest_stage": stage,
        "memory_bytes": memory,
        "memory_room_bytes": room(request.system),
        "warnings": warnings(request.config, request.plan, request.seq, request.system, request.constants),
    }


def losses(step: StepTime) -> dict[str, float]:
    """The step as three summands: what the model's FLOPs take at the peak, what the busiest stage's kernels, forward
    and backward, take besides, and everything else."""
    peak = step.mfu * step.total
    kernels = step.parts["forward"] + step.parts["backward"]
    return {"at_peak": peak, "kernels": kernels - peak, "else": step.total - kernels}


def _print(screen: Console, request: Request, step: StepTime, whole: dict[str, float] | None) -> None:
    for line in request.lines():
        screen.print(line)
    screen.print()
    screen.print(_breakdown(step, screen.width))
    screen.print(_losses(step))
    screen.print()
    screen.print(_results(request, step, whole))
    print_warnings(screen, request.config, request.plan, request.seq, request.system, request.constants)


def _losses(step: StepTime) -> str:
    peak, kernels, rest = losses(step).values()
    # Counted in full, attention has FLOPs that a fused kernel leaves out: it may be faster than the peak.
    verb = "lose below it" if kernels >= 0 else "gain, as they skip what a causal mask hides"
    lost = f"{'+' if kernels >= 0 else '-'} {format_seconds(abs(kernels))} that kernels {verb}"
    total, least, others = map(format_seconds, (step.total, peak, rest))
    return f"{total} = {least} at the peak {lost} + {others} of everything else."


def _breakdown(step: StepTime, width: int) -> Table:
    """A row for each part, its bar where the one before it ends; on a narrow screen none has a bar."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(f"of stage {step.stage}, the slowest" if step.plan.pp > 1 else "spent on")
    table.add_column("time", justify="right", no_wrap=True, min_width=8)
    table.add_column("share", justify="right", no_wrap=True, min_width=6)
    room_for_bar = min(BAR, width - BESIDES) if width >= NARROW else 0
    if room_for_bar:
        table.add_column("", width=room_for_bar)
    begin = 0.0
    for name, seconds in step.parts.items():
        if seconds:
            cells = [WORDS[name], format_seconds(seconds), f"{seconds / step.total:.1%}"]
            bars = [Bar(step.total, begin, begin + seconds, width=room_for_bar)] if room_for_bar else []
            table.add_row(*cells, *bars)
        begin += seconds
    table.add_section()
    table.add_row("step", format_seconds(step.total), "100.0%", style="bold")
    return table


def _results(request: Request, step: StepTime, whole: dict[str, float] | None) -> Table:
    plan, system = request.plan, request.system
    rate = request.tokens / step.total
    peak = system.matmul_flops if plan.width == 2 else system.wide_flops
    stage, memory = peak_bytes(request.config, plan, request.seq)
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in memory.items() if count)
    need, there = sum(memory.values()), room(system)
    table = Table.grid(padding=(0, 2))
    for no_wrap in (True, True, False):
        table.add_column(no_wrap=no_wrap)
    table.add_row("tokens", f"{format_count(rate)}/s", f"{format_count(rate / plan.ranks)}/s an accelerator")
    if whole:
        table.add_row("training", *training_words(whole))
    table.add_row(
        "MFU", f"{step.mfu:.1%}", f"of {format_count(peak)}FLOP/s: forward and twice that, all of attention's scores"
    )
    table.add_row("HFU", f"{hfu(step):.1%}", "with what backward runs again")
    where = f"on stage {stage}, the fullest" if plan.pp > 1 else "on each rank"
    verdict = "fits in" if need <= there else "does NOT fit in"
    table.add_row("memory", format_bytes(need), f"{where}, {verdict} {format_bytes(there)} of {system.name}:")
    table.add_row("", "", parts)
    return table
