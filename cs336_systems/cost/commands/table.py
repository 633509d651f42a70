"""`table`: FLOPs, bytes and time of every operator of a model on one rank, what it sends, and what bounds it."""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any, NamedTuple

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from cs336_systems.cost.commands.notebook_page import notebook_records, print_notebook
from cs336_systems.cost.commands.output import json_option, new_table, print_json, print_warnings
from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.flops import least_forward_flops
from cs336_systems.cost.notebook.physics import Notebook
from cs336_systems.cost.operator_time import GROUPS, TimedOperator, Timing, model_groups, recomputed, timed_group
from cs336_systems.cost.operators import Collective, Group
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count

WIDE = 120  # columns that all of it needs; on a narrower screen these are left out:
HIDDEN = ("MiB", "FLOP/B", "weights", "sends", "FLOPs back", "host ms")
SEED = "seed"  # the preset of the notebook
MI = 1024**2
VERBS = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}
NOTEBOOK_OPTIONS = ("num_layers", "d_model", "d_ff", "num_heads", "context", "micro_batch_size", "tp")
NOTEBOOK_NAMES = {"context": "seq", "micro_batch_size": "batch"}  # where the notebook has its own


@click.command("table")
@request_options
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Every operator on one rank, for one microbatch: FLOPs, bytes, time, and what bounds it.

    `--preset seed` prints the roofline notebook that the model grew from, to the last digit, and what is wrong with it.
    """
    if given["size"].lower() == SEED:
        notebook = _notebook(click.get_current_context())
        if as_json:
            print_json(notebook_records(notebook))
        else:
            print_notebook(console.console(), notebook)
        return
    request = take_request(given)
    parts = [part_cost(request, group, times) for group, times in model_groups(request.config)]
    if as_json:
        listed = [
            {
                "group": each.name,
                "times": each.times,
                "operators": [one.record() for one in each.timed],
                "total": each.totals,
            }
            for each in parts
        ]
        print_json({**request.record(), "groups": listed, "total": _model_totals(request, parts)})
    else:
        _print(console.console(), request, parts)


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
    return Notebook(**{NOTEBOOK_NAMES.get(name, name): value for name, value in given.items()})


class PartCost(NamedTuple):
    """One part of the model, a kind of block or an end: its operators timed, their sums, and how often it occurs."""

    name: str
    times: int
    timed: list[TimedOperator]
    forward: Timing
    backward: Timing
    totals: dict[str, float]


def part_cost(request: Request, group: Group, times: int) -> PartCost:
    """The operators of one part on one rank, for one microbatch."""
    config, plan, system, constants = request.config, request.plan, request.system, request.constants
    timed = timed_group(config, plan, request.seq, group, system, constants)
    forward, backward = (
        reduce(add, (getattr(each, way) for each in timed), Timing()) for way in ("forward", "backward")
    )
    blocks = [each.operator for each in timed] if group in ("dense", "sparse") else []
    again = recomputed(config, blocks, plan, system, constants)
    totals = {
        "flops_forward": forward.flops,
        "flops_backward": backward.flops,
        "kept_bytes": sum(each.operator.kept for each in timed),
        "weights": sum(each.operator.weights for each in timed),
        "forward_seconds": forward.seconds,
        "backward_seconds": backward.seconds,
        "recompute_seconds": again.seconds,
        "host_seconds": sum(way.waits(constants.host) for way in (forward, backward, again)),
    }
    return PartCost(GROUPS[group], times, timed, forward, backward, totals)


def _model_totals(request: Request, parts: Sequence[PartCost]) -> dict[str, float]:
    """Sums over all layers and both ends, as if one rank had all stages. The tied head is the embedding's weight."""
    sums = {name: sum(each.times * each.totals[name] for each in parts) for name in parts[0].totals}
    if request.config.tied_head:
        every = [one.operator for each in parts for one in each.timed]
        sums["weights"] -= next(each.weights for each in every if each.name == "logits")
    return sums


def _print(screen: Console, request: Request, parts: Sequence[PartCost]) -> None:
    plan = request.plan
    for line in request.lines():
        screen.print(line)
    narrow = screen.width < WIDE
    moved = "FLOPs" if narrow else "FLOPs, MiB"
    screen.print(f"One rank, one microbatch: forward's {moved} and ms, what binds it; ms of backward; MiB kept for it.")
    screen.print()
    screen.print(_operator_table(request, parts, narrow))
    if narrow:
        screen.print(f"On {WIDE} columns, or in a pipe, there are also {', '.join(HIDDEN[:-1])} and {HIDDEN[-1]}.")
    elif plan.tp * plan.cp * plan.ep > 1:
        operators = [each.operator for part in parts for each in part.timed]
        used = {each.verb for one in operators for each in one.sent + one.returned}
        verbs = ", ".join(f"{short} {verb}" for verb, short in VERBS.items() if verb in used)
        screen.print(f"sends: axis, MiB of the whole tensor, forward / backward; {verbs}")
    screen.print()
    screen.print(_totals_table(request, parts, narrow))
    whole = least_forward_flops(request.config, plan.micro_batch, request.seq)
    token = whole / (plan.micro_batch * request.seq)
    screen.print("keeps: for backward, without recomputation. host: time that the device waits for kernel launches.")
    screen.print(
        f"All tp x cp = {plan.tp * plan.cp} ranks of a microbatch: {format_count(whole)}FLOP forward, "
        f"{format_count(token)}FLOP per token. `step` adds up a stage's part of it."
    )
    print_warnings(screen, request.warnings())


class _Columns:
    """A table of which a narrow screen leaves out the columns of `HIDDEN`."""

    def __init__(self, columns: Sequence[str], narrow: bool) -> None:
        self.shown = [not (narrow and name.lstrip("<") in HIDDEN) for name in columns]
        self.table = new_table(self._kept(columns))

    def _kept(self, cells: Iterable[str]) -> list[str]:
        return [cell for cell, shown in zip(cells, self.shown, strict=True) if shown]

    def add(self, *cells: str, **look: Any) -> None:
        """Add a row of all cells."""
        self.table.add_row(*self._kept(cells), **look)


def _operator_table(request: Request, parts: Sequence[PartCost], narrow: bool) -> Table:
    columns = ("operator", "FLOPs", "MiB", "FLOP/B", "ms", "<bound", "back", "<bound", "keeps", "weights", "<sends")
    found = _Columns(columns, narrow)
    for part in parts:
        for each in part.timed:
            one = each.operator
            cells = _cells(each.forward, each.backward, one.kept, one.weights)
            found.add(one.name, *cells, _sends(request, one.sent, one.returned))
        if len(part.timed) > 1:
            name = part.name + (f" x {part.times}" if part.times > 1 else "")
            sums = _cells(part.forward, part.backward, part.totals["kept_bytes"], part.totals["weights"])
            found.add(name, *sums, "", style="bold")
        found.table.add_section()
    return found.table


def _cells(forward: Timing, backward: Timing, kept: float, weights: float) -> list[str]:
    """Cells between an operator's name and what it sends."""
    return [
        format_count(forward.flops) if forward.flops else "",
        _mi(forward.nbytes),
        f"{forward.intensity:.0f}" if forward.flops else "",
        f"{1e3 * forward.seconds:.3f}",
        forward.bound,
        f"{1e3 * backward.seconds:.3f}",
        backward.bound,
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


def _totals_table(request: Request, parts: Sequence[PartCost], narrow: bool) -> Table:
    again = ["recompute"] * (request.config.recompute != "none")
    columns = ["all layers on one rank", "times", "FLOPs", "FLOPs back", "keeps", "weights", "ms", "ms back"]
    found = _Columns([*columns, *["ms again"] * len(again), "host ms"], narrow)

    def cells(sums: dict[str, float]) -> list[str]:
        seconds = [f"{1e3 * sums[f'{each}_seconds']:.2f}" for each in ("forward", "backward", *again, "host")]
        flops = [format_count(sums["flops_forward"]), format_count(sums["flops_backward"])]
        return [*flops, format_bytes(sums["kept_bytes"]), format_count(sums["weights"], "B"), *seconds]

    for each in parts:
        sums = {name: each.times * value for name, value in each.totals.items()}
        found.add(each.name, str(each.times), *cells(sums), end_section=each is parts[-1])
    found.add("together", "", *cells(_model_totals(request, parts)), style="bold")
    return found.table
