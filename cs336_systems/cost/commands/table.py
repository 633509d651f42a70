"""`table`: FLOPs, bytes and time of every operator of a model on one rank, what it sends, and what bounds it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import click
from rich.table import Table

from cs336_systems.cost.commands.notebook_page import printed_notebook
from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.flops import least_forward_flops
from cs336_systems.cost.operator_time import BOUNDS, TimedOperator, TimedPart, Timing
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.rank import Operator
from cs336_systems.cost.step_time import stage_groups
from cs336_systems.cost.template import Total, json_option, new_table, print_json, print_page, print_warnings
from cs336_systems.host.console import console

WIDE = 120  # characters of the whole table; a narrower screen leaves out the columns marked with `?`
HEADS = "FLOPs:n", "?MiB", "?FLOP/B:.0f", "ms:.3f", "<bound", "back:.3f", "<bound", "keeps", "?weights:p"
MI = 1024**2
VERBS = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}


@click.command("table")
@request_options
@json_option
@click.pass_context
def command(context: click.Context, /, as_json: bool, **given: Any) -> None:
    """Every operator on one rank, for one microbatch: FLOPs, bytes, time, and what bounds it.

    `--preset seed` prints the roofline notebook that the model grew from, to the last digit, and its mistakes.
    """
    if printed_notebook(context, as_json):
        return
    request = take_request(given)
    parts = request.timed(stage_groups(request.config, Plan(), 0))  # of the whole model, as on one stage
    if as_json:
        groups = []
        for each in parts:
            records, total = list(map(_record, each.operators)), part_totals(request, each)
            groups.append({"group": each.name, "times": each.times, "operators": records, "total": total})
        print_json({**request.record(), "groups": groups, "total": model_totals(request, parts)})
        return
    screen, plan, operators = console(), request.plan, [each.operator for part in parts for each in part.operators]
    narrow, used = screen.width < WIDE, {each.verb for one in operators for each in one.sent + one.returned}
    verbs = ", ".join(f"{short} {verb}" for verb, short in VERBS.items() if verb in used)
    whole = least_forward_flops(request.config, plan.micro_batch, request.seq)
    values = {
        "moved": "FLOPs" if narrow else "FLOPs, MiB",
        "wide": WIDE if narrow else None,
        "verbs": verbs if not narrow and plan.tp * plan.cp * plan.ep > 1 else None,
        "ranks": plan.tp * plan.cp,
        "whole": whole,
        "per_token": whole / (plan.micro_batch * request.seq),
    }
    screen.print(request.lines())
    tables = {"operators": _operator_table(request, parts, narrow), "totals": _totals_table(request, parts, narrow)}
    print_page(screen, "table", values, tables)
    print_warnings(screen, request.warnings())


def _record(timed: TimedOperator) -> dict[str, Any]:
    one, found = timed.operator, dict[str, Any]()
    for way, spent, sent in (("forward", timed.forward, one.sent), ("backward", timed.backward, one.returned)):
        counts = {"flops": spent.flops, "bytes": spent.nbytes, "intensity": spent.intensity, "seconds": spent.seconds}
        seconds = {f"{name}_seconds": getattr(spent, name) for name in BOUNDS}
        found[way] = {**counts, **seconds, "bound": spent.bound, "sent": [each._asdict() for each in sent]}
    return {"operator": one.name, "kept_bytes": one.kept, "weights": one.weights, **found}


def part_totals(request: Request, part: TimedPart) -> dict[str, float]:
    """Sums over the operators of one part of the model."""
    ways = {"forward": part.forward, "backward": part.backward, "recompute": part.recompute}
    return {
        "flops_forward": part.forward.flops,
        "flops_backward": part.backward.flops,
        "kept_bytes": sum(each.operator.kept for each in part.operators),
        "weights": sum(each.operator.weights for each in part.operators),
        **{f"{name}_seconds": way.seconds for name, way in ways.items()},
        "host_seconds": sum(way.waits(request.system.constants.host) for way in ways.values()),
    }


def model_totals(request: Request, parts: Sequence[TimedPart]) -> dict[str, float]:
    """Sums over all layers and both ends, as if one rank had all stages. The tied head is the embedding's weight."""
    each = [(part.times, part_totals(request, part)) for part in parts]
    sums = {name: sum(times * totals[name] for times, totals in each) for name in each[0][1]}
    if request.config.tied_head:
        every = [one.operator for part in parts for one in part.operators]
        sums["weights"] -= next(each.weights for each in every if each.name == "logits")
    return sums


def _operator_table(request: Request, parts: Sequence[TimedPart], narrow: bool) -> Table:
    rows: list[list[Any] | None] = []
    for part in parts:
        for each in part.operators:
            one = each.operator
            cells = _cells(each.forward, each.backward, one.kept, one.weights)
            rows.append([one.name, *cells, _sends(request, one)])
        if len(part.operators) > 1:
            name, sums = part.name + (f" x {part.times}" if part.times > 1 else ""), part_totals(request, part)
            rows.append(Total([name, *_cells(part.forward, part.backward, sums["kept_bytes"], sums["weights"]), ""]))
        rows.append(None)
    return new_table(("operator", *HEADS, "?<sends"), rows, narrow=narrow)


def _cells(forward: Timing, backward: Timing, kept: float, weights: float) -> list[Any]:
    """Cells between an operator's name and what it sends."""
    ahead = forward.flops or None, _mi(forward.nbytes), forward.intensity if forward.flops else None
    bounds = 1e3 * forward.seconds, forward.bound, 1e3 * backward.seconds, backward.bound
    return [*ahead, *bounds, _mi(kept) if kept else None, weights or None]


def _mi(nbytes: float) -> str:
    """MiB without the unit, five characters where it can be done."""
    count = nbytes / MI
    return "<0.1" if 0 < count < 0.05 else f"{count:.{1 if count < 999.95 else 0}f}"


def _sends(request: Request, operator: Operator) -> str:
    """`tp 48.0: AG / AG RS`, MiB of the whole tensor, by axis and size."""
    both = sorted(
        (each.axis, _mi(each.nbytes), way, VERBS[each.verb])
        for way, many in enumerate((operator.sent, operator.returned))
        for each in many
        if getattr(request.plan, each.axis) > 1
    )
    found = []
    for (axis, size), many in groupby(both, key=lambda each: each[:2]):
        verbs = list(many)
        ways = (" ".join(verb for *_, way, verb in verbs if way == wanted) or "-" for wanted in (0, 1))
        found.append(f"{axis} {size}: {' / '.join(ways)}")
    return ", ".join(found)


def _totals_table(request: Request, parts: Sequence[TimedPart], narrow: bool) -> Table:
    again = ["recompute"] * (request.config.recompute != "none")
    seconds = [f"{each}_seconds" for each in ("forward", "backward", *again, "host")]
    counts = ["FLOPs:n", "?FLOPs back:n", "keeps:b", "?weights:p"]
    ways = ["ms:.2f", "ms back:.2f", *["ms again:.2f"] * len(again), "?host ms:.2f"]

    def cells(sums: dict[str, float], times: float = 1) -> list[float]:
        counted = [times * sums[name] for name in ("flops_forward", "flops_backward", "kept_bytes", "weights")]
        return [*counted, *(1e3 * (times * sums[name]) for name in seconds)]

    rows = [[each.name, each.times, *cells(part_totals(request, each), each.times)] for each in parts]
    together = Total(["together", None, *cells(model_totals(request, parts))])
    return new_table(["all layers on one rank", "times", *counts, *ways], [*rows, None, together], narrow=narrow)
