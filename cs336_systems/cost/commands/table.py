"""`table`: what every operator of a model computes, moves, keeps and sends on one rank, and what holds it up."""

import json
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.table import Table

from cs336_systems import console
from cs336_systems.console import format_bytes, format_count
from cs336_systems.cost.commands.notebook_page import notebook_records, print_page
from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.commands.warned import print_warnings
from cs336_systems.cost.flops import least_forward_flops
from cs336_systems.cost.large.operator_time import GROUPS, Passed, Timed, model_groups, run_again, timed_group
from cs336_systems.cost.large.operators import Collective
from cs336_systems.cost.large.stage_parts import Group
from cs336_systems.cost.notebook.physics import Notebook
from cs336_systems.errors import UserError

WIDE = 120  # columns that all of it needs; on a narrower screen these are left out:
HIDDEN = ("MiB", "FLOP/B", "weights", "sends", "FLOPs back", "host ms")
SEED = "seed"  # the preset of the notebook
MI = 1024**2
VERBS = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}
# What the notebook has of the options: its own name of each.
NOTEBOOK_OPTIONS = {
    "num_layers": "num_layers",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "num_heads": "num_heads",
    "context": "seq",
    "micro_batch_size": "batch",
    "tp": "tp",
}


@click.command("table")
@request_options
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON, backward's FLOPs and bytes as well.")
def command(as_json: bool, **given: Any) -> None:
    """Every operator on one rank, for one microbatch: FLOPs, bytes, time, and what holds it up.

    `--preset seed` prints the roofline notebook that the model grew from, to the last digit, and what is wrong with it.
    """
    if given["size"].lower() == SEED:
        notebook = _notebook(click.get_current_context())
        if as_json:
            click.echo(json.dumps(notebook_records(notebook), indent=1, allow_nan=False))
        else:
            print_page(console.console(), notebook)
        return
    request = take_request(given)
    groups = [
        (group, times, timed_group(request.config, request.plan, request.seq, group, request.system, request.constants))
        for group, times in model_groups(request.config)
    ]
    if as_json:
        click.echo(json.dumps(_record(request, groups), indent=1, allow_nan=False))
    else:
        _print(console.console(), request, groups)


def _notebook(context: click.Context) -> Notebook:
    """The notebook with the sizes that were asked for. Raises UserError for options that it does not have."""
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE and name not in ("size", "as_json")
    }
    if strange := [name for name in given if name not in NOTEBOOK_OPTIONS]:
        known = ", ".join(f"--{name.replace('_', '-')}" for name in NOTEBOOK_OPTIONS)
        raise UserError(f"the notebook knows nothing of --{strange[0].replace('_', '-')}; it has {known}")
    if "d_model" in given:
        given.setdefault("d_ff", 4 * given["d_model"])
    return Notebook(**{NOTEBOOK_OPTIONS[name]: value for name, value in given.items()})


Groups = Sequence[tuple[Group, int, list[Timed]]]


def _sum(directions: Iterable[Passed]) -> Passed:
    return reduce(add, directions, Passed())


def _again(request: Request, group: Group, timed: list[Timed]) -> Passed:
    if group in ("embedding", "head"):
        return Passed()
    return run_again(request.config, [each.operator for each in timed], request.plan, request.system, request.constants)


def _total(request: Request, group: Group, timed: list[Timed]) -> dict[str, float]:
    """Sums over the operators of a group, once."""
    ahead, back = _sum(each.forward for each in timed), _sum(each.backward for each in timed)
    again = _again(request, group, timed)
    return {
        "flops_forward": ahead.flops,
        "flops_backward": back.flops,
        "kept_bytes": sum(each.operator.kept for each in timed),
        "weights": sum(each.operator.weights for each in timed),
        "forward_seconds": ahead.seconds,
        "backward_seconds": back.seconds,
        "recompute_seconds": again.seconds,
        "host_seconds": sum(way.waits(request.constants.host) for way in (ahead, back, again)),
    }


def _model_total(request: Request, groups: Groups) -> dict[str, float]:
    """Of all layers and both ends, as if one rank had all stages. The tied head is the embedding's weight."""
    sums: dict[str, float] = {}
    for group, times, timed in groups:
        for name, value in _total(request, group, timed).items():
            sums[name] = sums.get(name, 0) + times * value
    if request.config.tied_head:
        sums["weights"] -= next(one.weights for each in groups for one in _operators(each) if one.name == "logits")
    return sums


def _operators(group: tuple[Group, int, list[Timed]]) -> Iterable[Any]:
    return (each.operator for each in group[2])


def _record(request: Request, groups: Groups) -> dict[str, Any]:
    listed = [
        {
            "group": GROUPS[group],
            "times": times,
            "operators": [each.record() for each in timed],
            "total": _total(request, group, timed),
        }
        for group, times, timed in groups
    ]
    return {**request.record(), "groups": listed, "total": _model_total(request, groups)}


def _print(screen: Console, request: Request, groups: Groups) -> None:
    for line in request.lines():
        screen.print(line)
    narrow = screen.width < WIDE
    moved = "FLOPs" if narrow else "FLOPs, MiB"
    screen.print(f"One rank, one microbatch: forward's {moved} and ms, what binds it; ms of backward; MiB kept for it.")
    screen.print()
    screen.print(_shown(_operator_table(request, groups), narrow))
    used = {each.verb for _, _, timed in groups for one in timed for each in one.operator.sent + one.operator.returned}
    if narrow:
        screen.print(f"On {WIDE} columns, or in a pipe, there are also {', '.join(HIDDEN[:-1])} and {HIDDEN[-1]}.")
    elif request.plan.tp * request.plan.cp * request.plan.ep > 1:
        words = ", ".join(f"{short} {verb}" for verb, short in VERBS.items() if verb in used)
        screen.print(f"sends: axis, MiB of the whole tensor, forward / backward; {words}")
    screen.print()
    screen.print(_shown(_totals_table(request, groups), narrow))
    for line in _meaning(request):
        screen.print(line)
    print_warnings(screen, request.config, request.plan, request.seq, request.system, request.constants)


def _shown(table: Table, narrow: bool) -> Table:
    """The table, on a narrow screen without the columns that are hidden there."""
    if not narrow:
        return table
    kept = [column for column in table.columns if column.header not in HIDDEN]
    found = _grid(str(kept[0].header), *(str(column.header) for column in kept[1:]))
    for column, old in zip(found.columns, kept, strict=True):
        column.justify = old.justify
    for row, cells in zip(table.rows, zip(*(column.cells for column in kept), strict=True), strict=True):
        found.add_row(*cells, style=row.style, end_section=row.end_section)
    return found


def _operator_table(request: Request, groups: Groups) -> Table:
    columns = ("FLOPs", "MiB", "FLOP/B", "ms", "bound", "back", "bound", "keeps", "weights")
    table = _grid("operator", *columns)
    table.add_column("sends", no_wrap=True)
    table.columns[5].justify = table.columns[7].justify = "left"
    for group, times, timed in groups:
        for each in timed:
            one = each.operator
            cells = _cells(each.forward, each.backward, one.kept, one.weights)
            table.add_row(one.name, *cells, _sends(request, one.sent, one.returned))
        ahead, back = _sum(each.forward for each in timed), _sum(each.backward for each in timed)
        kept, weights = sum(each.operator.kept for each in timed), sum(each.operator.weights for each in timed)
        name = GROUPS[group] + (f" x {times}" if times > 1 else "")
        if len(timed) > 1:
            table.add_row(name, *_cells(ahead, back, kept, weights), style="bold")
        table.add_section()
    return table


def _cells(ahead: Passed, back: Passed, kept: float, weights: int) -> list[str]:
    """What stands between an operator's name and what it sends."""
    return [
        format_count(ahead.flops) if ahead.flops else "",
        _mi(ahead.nbytes),
        f"{ahead.intensity:.0f}" if ahead.flops else "",
        f"{1e3 * ahead.seconds:.3f}",
        ahead.bound,
        f"{1e3 * back.seconds:.3f}",
        back.bound,
        _mi(kept) if kept else "",
        format_count(weights, "B") if weights else "",
    ]


def _mi(nbytes: float) -> str:
    """MiB without the unit, five characters where it can be done."""
    count = nbytes / MI
    return "<0.1" if 0 < count < 0.05 else f"{count:.{1 if count < 999.95 else 0}f}"


def _sends(request: Request, sent: Sequence[Collective], returned: Sequence[Collective]) -> str:
    """`tp 48.0: AG / AG RS`, MiB of the whole tensor, by axis and size."""
    both = [
        (each.axis, _mi(each.nbytes), way, VERBS[each.verb])
        for way, many in enumerate((sent, returned))
        for each in many
        if getattr(request.plan, each.axis) > 1
    ]
    found = []
    for (axis, size), many in groupby(sorted(both), key=lambda each: each[:2]):
        verbs = list(many)
        ways = (" ".join(verb for *_, way, verb in verbs if way == wanted) or "-" for wanted in (0, 1))
        found.append(f"{axis} {size}: {' / '.join(ways)}")
    return ", ".join(found)


def _totals_table(request: Request, groups: Groups) -> Table:
    columns = ["times", "FLOPs", "FLOPs back", "keeps", "weights", "ms", "ms back"]
    columns += ["ms again"] * (request.config.recompute != "none")
    table = _grid("all layers on one rank", *columns, "host ms")
    for group, times, timed in groups:
        sums = {name: times * value for name, value in _total(request, group, timed).items()}
        table.add_row(GROUPS[group], str(times), *_total_cells(request, sums), end_section=group == "head")
    table.add_row("together", "", *_total_cells(request, _model_total(request, groups)), style="bold")
    return table


def _total_cells(request: Request, sums: dict[str, float]) -> list[str]:
    seconds = ["forward", "backward", *(["recompute"] if request.config.recompute != "none" else []), "host"]
    return [
        format_count(sums["flops_forward"]),
        format_count(sums["flops_backward"]),
        format_bytes(sums["kept_bytes"]),
        format_count(sums["weights"], "B"),
        *(f"{1e3 * sums[f'{each}_seconds']:.2f}" for each in seconds),
    ]


def _meaning(request: Request) -> list[str]:
    """What the totals are part of."""
    plan, whole = request.plan, least_forward_flops(request.config, request.plan.micro_batch, request.seq)
    token = whole / (plan.micro_batch * request.seq)
    return [
        "keeps: for backward, without recomputation. host: what the device waits for kernels to be given out.",
        f"All tp x cp = {plan.tp * plan.cp} ranks of a microbatch: {format_count(whole)}FLOP forward, "
        f"{format_count(token)}FLOP a token. `step` adds up what a stage has of it.",
    ]


def _grid(name: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(name, no_wrap=True)
    for each in numbers:
        table.add_column(each, justify="right", no_wrap=True)
    return table
