"""`step`: how long one optimizer step takes, what the time is spent on, and whether it fits."""

from typing import Any

import click
from rich.bar import Bar
from rich.table import Table

from cs336_systems.cost.capacity import describe_parts
from cs336_systems.cost.commands.request import Request, request_options, take_request, tokens_option, training, worded
from cs336_systems.cost.domain import DOMAIN, describe_range, time_range
from cs336_systems.cost.flops import repeated_flops
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import PARTS, StepTime
from cs336_systems.cost.template import Total, fill_file, json_option, new_table, print_json, print_page, print_warnings
from cs336_systems.host.console import console

BAR, NARROW, BESIDES = 48, 100, 63  # columns: of the whole step's bar; without room for one; of the table besides


@click.command("step", epilog="\n\n".join((DOMAIN, *fill_file("glossary", {}))))
@request_options
@tokens_option
@json_option
def command(tokens: float | None, as_json: bool, **given: Any) -> None:
    """Time of one step, by what it is spent on, tokens per second, MFU, and memory."""
    request = take_request(given)
    step = request.step
    found = step_record(request, step)
    if tokens:
        found["training"] = training(tokens, found["tokens_per_second"], request.plan.ranks)
    if as_json:
        print_json({**request.record(), **found})
        return
    # Counted in full, attention has FLOPs that a fused kernel leaves out: it may be faster than the peak.
    screen, kernels = console(), found["losses"]["kernels"]
    values = found | {"slower": kernels >= 0, "lost": abs(kernels), "expected": describe_range(step)}
    screen.print(request.lines())
    tables = {"breakdown": _breakdown(step, screen.width), "results": _results(request, found)}
    print_page(screen, "step", values, tables)
    print_warnings(screen, found["warnings"])


def hfu(step: StepTime) -> float:
    """Hardware FLOPs utilisation: as MFU, with recomputation (arXiv:2205.05198, section 6.3)."""
    rows = step.plan.micro_batch
    again = repeated_flops(step.config, step.plan, rows, step.seq) * (step.plan.global_batch // rows)
    return step.mfu * (1 + again / step.model_flops)


def step_record(request: Request, step: StepTime) -> dict[str, Any]:
    """All results. `losses` are three summands of the step: the model's FLOPs at the peak, time that kernels of the
    busiest stage, forward and backward, take besides, and everything else."""
    stage, memory = peak_bytes(request.config, request.plan, request.seq)
    rate, peak = request.plan.global_batch * request.seq / step.total, step.mfu * step.total
    kernels = step.parts["forward"] + step.parts["backward"]
    (low, high), least_and_most = time_range(step), STACKS[step.plan.stack].bytes(sum(memory.values()))
    return {
        "seconds": step.total,
        "low_seconds": low,
        "high_seconds": high,
        "parts": step.parts,
        "busiest_stage": step.stage,
        "tokens_per_second": rate,
        "tokens_per_second_per_accelerator": rate / request.plan.ranks,
        "model_flops": step.model_flops,
        "mfu": step.mfu,
        "hfu": hfu(step),
        "losses": {"at_peak": peak, "kernels": kernels - peak, "else": step.total - kernels},
        "fullest_stage": stage,
        "memory_bytes": memory,
        "memory_low_bytes": least_and_most[0],
        "memory_high_bytes": least_and_most[1],
        "memory_room_bytes": usable_memory(request.system),
        "warnings": request.warnings(),
    }


def _breakdown(step: StepTime, width: int) -> Table:
    """A row for each part, its bar where the one before it ends; on a narrow screen none has a bar."""
    room_for_bar = min(BAR, width - BESIDES)
    title = f"of stage {step.stage}, the slowest" if step.plan.pp > 1 else "spent on"
    rows, begin = list[Any](), 0.0
    for name, seconds in step.parts.items():
        if seconds:
            bar = Bar(step.total, begin, begin + seconds, width=max(1, room_for_bar))
            rows.append([PARTS[name]["label"], seconds, seconds / step.total, bar])
        begin += seconds
    total = Total(["step", step.total, 1.0, None])
    return new_table([title, "time:s", "share:.1%", "?<"], [*rows, None, total], narrow=width < NARROW)


def fit_verdict(need: float, low: float, high: float, room: float) -> str:
    """Words on a need of memory, with its range, beside the room."""
    if need <= room:
        return "fits" if high <= room else "fits, but may not,"
    return "nearly fits" if low <= room else "does NOT fit"


def _results(request: Request, found: dict[str, Any]) -> Table:
    plan, memory = request.plan, found["memory_bytes"]
    need = sum(memory.values())
    values = {
        "system": request.system,
        "attainable": request.system.peak(plan.number),
        "trained": worded(found["training"]) if "training" in found else (None, None),
        "need": need,
        "where": f"on stage {found['fullest_stage']}, the fullest" if plan.pp > 1 else "on each rank",
        "verdict": fit_verdict(need, found["memory_low_bytes"], found["memory_high_bytes"], found["memory_room_bytes"]),
        "parts": describe_parts(memory),
    }
    table = Table.grid(padding=(0, 2))
    for no_wrap in (True, True, False):
        table.add_column(no_wrap=no_wrap)
    for line in fill_file("step_results", found | values):
        table.add_row(*line.split("|", 2))
    return table
