"""Page of `search`: the best layouts, the command that predicts the first again, and why the others lose."""

from typing import Any

from rich.console import Console
from rich.table import Table

from cs336_systems.cost.commands.output import new_table
from cs336_systems.cost.commands.request import describe_training, plural
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.plan import ORDER, RECOMPUTE_NAMES
from cs336_systems.cost.plan_memory import usable_memory
from cs336_systems.cost.search import Candidate, Loss, Search
from cs336_systems.cost.search_space import AXES, placement
from cs336_systems.host.console import format_bytes, format_count, format_seconds

SHOWN = 6  # values of one choice, and reasons, that are printed
WIDE = 110  # columns, below which some are left out
_AXIS_NAMES = {"micro_batch": "microbatch", "sequence": "sequence par.", "placement": "in a node", "zero": "ZeRO"}
LAYOUTS = (
    "layout: ranks of each axis (pp4x5: 4 stages of 5 chunks), m sequences of a microbatch, z ZeRO stage, sp sequence "
    "parallelism"
)
LOSSES = (
    "Of the best with each value: the part of its step that is longest beyond the winner's, and the part that it saves "
    "most of. forced by memory: the winner with that value alone would not fit."
)


def choice_text(axis: str, value: Any) -> str:
    """The value of a choice, as it is printed."""
    if axis == "recompute":
        return RECOMPUTE_NAMES[value]
    return ("yes" if value else "no") if axis == "sequence" else str(value)


def print_search(screen: Console, found: Search, title: str, command: str, whole: dict[str, float] | None) -> None:
    """The whole answer, on a narrow screen without some columns: `command` predicts the best again, `whole` is a
    training by it."""
    space, narrow = found.space, screen.width < WIDE
    screen.print(
        f"{title}: {format_count(sum(count_parameters(space.config).values()), 'B')} parameters, on "
        f"{space.gpus} x {found.system.name}: {plural(space.global_batch, 'sequence')} of {space.seq} tokens per step, "
        f"overlap {space.overlap}, at most {format_bytes(usable_memory(found.system))} per rank\n"
    )
    screen.print(_best(found, narrow))
    screen.print(LAYOUTS)
    if narrow and any(_other_order(each) for each in found.best):
        screen.print("*: nodes are filled in another order of axes than Megatron's, tp cp ep dp pp")
    if whole:
        screen.print("The first takes {} {}.".format(*describe_training(whole)))
    screen.print("\nThe first in detail:")
    screen.print(f"{command}\n", soft_wrap=True)
    for line in _counts(found):
        screen.print(line, soft_wrap=True)
    screen.print()
    screen.print(_losses(found, narrow))
    screen.print(LOSSES)


def _best(found: Search, narrow: bool) -> Table:
    """The best configurations, a column for the layout, and one for others of the same time and memory if any has."""
    columns = ["", "step", "MFU", "tokens/s", "memory", "<layout", "<recompute", "?<in a node"]
    merged, rows = any(each.alike for each in found.best), []
    for number, each in enumerate(found.best, 1):
        layout = each.plan.short() + ("*" if _other_order(each) and narrow else "")
        cells = [format_seconds(each.step.total), f"{each.step.mfu:.1%}", format_count(each.rate)]
        cells += [format_bytes(each.memory), layout, RECOMPUTE_NAMES[each.step.config.recompute], each.placement]
        rows.append([f"{number:2}", *cells, *[_alike(each)] * merged])
    return new_table([*columns, *["~or"] * merged], rows, narrow=narrow)


def _other_order(each: Candidate) -> bool:
    """True where nodes are not filled in Megatron's order."""
    return each.placement != placement(each.plan.override(order=ORDER), each.step.system.node)


def _alike(each: Candidate) -> str:
    """Choices of others of the same time and memory: `z2`."""
    own = set(each.plan.short().split())
    found = {" ".join(one for one in other.plan.short().split() if one not in own): None for other in each.alike}
    listed = [one or "other order" for one in found]
    return ", ".join(listed[:2]) + (f", {len(listed) - 2} more" if len(listed) > 2 else "")


def _counts(found: Search) -> list[str]:
    """Counts of configurations: tried, running, too large, indivisible."""
    lines = [
        f"{found.tried} configurations tried: {found.running} run, {found.too_large} do not fit, "
        f"{found.indivisible.total()} do not divide."
    ]
    if nearest := found.nearest:
        lines.append(
            f"The nearest miss, {nearest.plan.short()} recompute {RECOMPUTE_NAMES[nearest.config.recompute]}, needs "
            f"{format_bytes(nearest.memory)} and lacks {format_bytes(nearest.lacks)}."
        )
    reasons = found.indivisible.most_common()
    lines += [f"  {plural(count, 'plan')}: {reason}" for reason, count in reasons[:SHOWN]]
    if more := reasons[SHOWN:]:
        lines.append(f"  {plural(sum(count for _, count in more), 'plan')}: {len(more)} more reasons")
    if found.left_out:
        cut = "; ".join(found.left_out)
        lines.append(f"The space is larger than --limit: left out, except around the best: {cut}.")
    return lines


def _losses(found: Search, narrow: bool) -> Table:
    """For each value of each choice how much slower its best is, and why."""
    rows: list[list[str] | None] = []
    for axis in AXES:
        losses = [each for each in found.losses if each.axis == axis]
        if len(losses) < 2:
            continue
        for place, each in enumerate(losses[:SHOWN]):
            factor = "-" if each.best is None else f"x {each.factor:.3f}"
            slower = format_seconds(each.net) if each.net else "-" if each.best is None else ""
            name = "" if place else _AXIS_NAMES.get(axis, axis)
            rows.append([name, choice_text(axis, each.value), factor, slower, _why(each)])
        if len(losses) > SHOWN:
            rows.append(["", f"{len(losses) - SHOWN} more", "", "", "slower than these, or too large"])
        rows.append(None)
    return new_table(["choice", "<value", "?factor", "slower by", "~why its best loses"], rows, narrow=narrow)


def _why(each: Loss) -> str:
    """The largest loss, the largest gain, and whether memory left no choice."""
    if each.best is None or not each.part:
        return each.why
    gain = f"; -{format_seconds(each.less)} {each.gain}" if each.gain else ""
    return f"+{format_seconds(each.more)} {each.part}: {each.why}{gain}{'; forced by memory' if each.forced else ''}"
