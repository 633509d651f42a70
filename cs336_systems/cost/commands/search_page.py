"""Page of `search`: the best layouts, the command that predicts the first again, and why the others lose."""

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from cs336_systems.cost.commands.output import new_table
from cs336_systems.cost.commands.request import (
    ConstantOptions,
    as_options,
    describe_training,
    is_changed,
    plan_options,
    sequences,
    training,
)
from cs336_systems.cost.options import RECOMPUTE, MachineOptions, ModelOptions
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.plan import ORDER
from cs336_systems.cost.plan_memory import usable_memory
from cs336_systems.cost.search import Candidate, Loss, Search
from cs336_systems.cost.search_space import AXES, placement
from cs336_systems.host.console import format_bytes, format_count, format_seconds

SHOWN = 6  # values of one choice, and reasons, that are printed
WIDE = 110  # columns, below which some are left out
RECOMPUTE_NAMES: dict[str, Any] = {ours: name for name, ours in RECOMPUTE.items()}
_AXIS_NAMES = {"micro_batch": "microbatch", "sequence": "sequence par.", "placement": "in a node", "zero": "ZeRO"}
LAYOUTS = (
    "layout: ranks of each axis (pp4x5: 4 stages of 5 chunks), m sequences of a microbatch, z ZeRO stage, sp sequence "
    "parallelism"
)
LOSSES = (
    "Of the best with each value: the part of its step that is longest beyond the winner's, and the part that it saves "
    "most of. forced by memory: the winner with that value alone would not fit."
)


@dataclass(frozen=True)
class SearchRequest:
    """Options of the command line that the answer needs besides the search itself."""

    model: ModelOptions
    precision: str
    machine: MachineOptions
    file: ConstantOptions
    tokens: float | None = None

    def command(self, each: Candidate) -> str:
        """The command line that predicts a configuration again."""
        recompute = RECOMPUTE_NAMES[each.step.config.recompute]
        model = replace(self.model, recompute=None if recompute == "none" else recompute)
        settings = (model, self.machine, plan_options(each.plan, each.step.system, self.precision), self.file)
        given = [one for some in settings for one in as_options(some)]
        size = [] if "--size" in given else ["--size", self.model.size]
        return " ".join(["python -m cs336_systems.cost step", *size, *given])

    def training(self, each: Candidate) -> dict[str, float] | None:
        """Time of a training on --tokens, if that was given."""
        return training(self.tokens, each.rate, each.plan.ranks) if self.tokens else None


def choice_text(axis: str, value: Any) -> str:
    """The value of a choice, as it is printed."""
    if axis == "recompute":
        return str(RECOMPUTE_NAMES[value])
    return ("yes" if value else "no") if axis == "sequence" else str(value)


def print_search(screen: Console, found: Search, asked: SearchRequest) -> None:
    """The whole answer, on a narrow screen without some columns."""
    space, model = found.space, asked.model
    title = f"{model.size}, changed" if is_changed(model) else model.size
    screen.print(
        f"{title}: {format_count(sum(count_parameters(space.config).values()), 'B')} parameters, on "
        f"{space.gpus} x {found.system.name}: {sequences(space.global_batch)} of {space.seq} tokens per step, overlap "
        f"{space.overlap}, at most {format_bytes(usable_memory(found.system))} per rank\n"
    )
    wide = screen.width >= WIDE
    screen.print(_best(found, wide))
    screen.print(LAYOUTS)
    if any(_other_order(each) for each in found.best) and not wide:
        screen.print("*: nodes are filled in another order of axes than Megatron's, tp cp ep dp pp")
    if whole := asked.training(found.best[0]):
        screen.print("The first takes {} {}.".format(*describe_training(whole)))
    screen.print("\nThe first in detail:")
    screen.print(asked.command(found.best[0]), soft_wrap=True)
    screen.print()
    for line in _counts(found):
        screen.print(line, soft_wrap=True)
    screen.print()
    screen.print(_losses(found, wide))
    screen.print(LOSSES)


def _best(found: Search, wide: bool) -> Table:
    """The best configurations, a column for the layout."""
    merged = any(each.alike for each in found.best)
    columns = ["", "step", "MFU", "tokens/s", "memory", "<layout", "<recompute", *["<in a node"] * wide]
    table = new_table([*columns, *["~or"] * merged])
    for number, each in enumerate(found.best, 1):
        layout = each.plan.short() + ("*" if _other_order(each) and not wide else "")
        cells = [format_seconds(each.step.total), f"{each.step.mfu:.1%}", format_count(each.rate)]
        cells += [format_bytes(each.memory), layout, RECOMPUTE_NAMES[each.step.config.recompute]]
        table.add_row(f"{number:2}", *cells, *([each.placement] * wide), *([_alike(each)] * merged))
    return table


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
        recompute = RECOMPUTE_NAMES[nearest.config.recompute]
        lines.append(
            f"The nearest miss, {nearest.plan.short()} recompute {recompute}, needs {format_bytes(nearest.memory)} and "
            f"lacks {format_bytes(nearest.lacks)}."
        )
    reasons = found.indivisible.most_common()
    lines += [f"  {_plans(count)}: {reason}" for reason, count in reasons[:SHOWN]]
    if more := reasons[SHOWN:]:
        lines.append(f"  {_plans(sum(count for _, count in more))}: {len(more)} more reasons")
    if found.left_out:
        lines.append(
            f"The space is larger than --limit: left out, except around the best: {'; '.join(found.left_out)}."
        )
    return lines


def _plans(count: int) -> str:
    return f"{count} plan{'' if count == 1 else 's'}"


def _losses(found: Search, wide: bool) -> Table:
    """For each value of each choice how much slower its best is, and why."""
    table = new_table(["choice", "<value", *["factor"] * wide, "slower by", "~why its best loses"])
    for axis in AXES:
        losses = [each for each in found.losses if each.axis == axis]
        if len(losses) < 2:
            continue
        for place, each in enumerate(losses[:SHOWN]):
            factor = ["-" if each.best is None else f"x {each.factor:.3f}"] * wide
            slower = format_seconds(each.net) if each.net else "-" if each.best is None else ""
            name = "" if place else _AXIS_NAMES.get(axis, axis)
            table.add_row(name, choice_text(axis, each.value), *factor, slower, _why(each))
        if len(losses) > SHOWN:
            more = f"{len(losses) - SHOWN} more"
            table.add_row("", more, *[""] * (1 + wide), "slower than these, or too large")
        table.add_section()
    return table


def _why(each: Loss) -> str:
    """The largest loss, the largest gain, and whether memory left no choice."""
    if each.best is None or not each.part:
        return each.why
    gain = f"; -{format_seconds(each.less)} {each.gain}" if each.gain else ""
    return f"+{format_seconds(each.more)} {each.part}: {each.why}{gain}{'; forced by memory' if each.forced else ''}"
