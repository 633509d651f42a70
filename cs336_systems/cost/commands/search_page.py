"""What `search` prints: the best layouts, the command that predicts the first again, and why the others lose."""

from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.cost.commands.request import (
    ConstantSettings,
    as_options,
    is_changed,
    plan_settings,
    sequences,
    training,
    training_words,
)
from cs336_systems.cost.large.candidate import Candidate, Loss
from cs336_systems.cost.large.plan import ORDER
from cs336_systems.cost.large.plan_memory import room
from cs336_systems.cost.large.search import Search
from cs336_systems.cost.large.search_space import AXES, placement
from cs336_systems.cost.large.settings import RECOMPUTE, ModelSettings, SystemSettings
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.presets import ModelConfig

SHOWN = 6  # values of one choice, and reasons, that are printed
WIDE = 110  # columns, below which some are left out
_WORDS = {ours: said for said, ours in RECOMPUTE.items()}
_NAMES = {"micro_batch": "microbatch", "sequence": "sequence par.", "placement": "in a node", "zero": "ZeRO"}
LAYOUTS = (
    "layout: ranks of each axis (pp4x5: 4 stages of 5 chunks), m sequences of a microbatch, z ZeRO stage, sp sequence "
    "parallelism"
)


@dataclass(frozen=True)
class Asked:
    """What the command line said, for what is printed besides the search."""

    model: ModelSettings
    precision: str
    machine: SystemSettings
    file: ConstantSettings
    tokens: float | None = None

    def command(self, each: Candidate) -> str:
        """What to type for the prediction of a configuration."""
        recompute = recompute_word(each.step.config)
        model = replace(self.model, recompute=None if recompute == "none" else recompute)
        settings = (model, self.machine, plan_settings(each.plan, each.step.system, self.precision), self.file)
        words = [one for some in settings for one in as_options(some)]
        size = [] if "--size" in words else ["--size", self.model.size]
        return " ".join(["python -m cs336_systems.cost step", *size, *words])

    def training(self, each: Candidate) -> dict[str, float] | None:
        """How long it takes on --tokens, if that was given."""
        return training(self.tokens, each.rate, each.plan.ranks) if self.tokens else None


def recompute_word(config: ModelConfig) -> Any:
    """What backward runs again, as `--recompute` says it."""
    return _WORDS[config.recompute]


def word(axis: str, value: Any) -> str:
    """The value of a choice, as it is printed."""
    if axis == "recompute":
        return _WORDS[value]
    return ("yes" if value else "no") if axis == "sequence" else str(value)


def print_search(screen: Console, found: Search, asked: Asked) -> None:
    """All of it, on a narrow screen without some columns."""
    space, model = found.space, asked.model
    title = f"{model.size}, changed" if is_changed(model) else model.size
    screen.print(
        f"{title}: {format_count(sum(count_parameters(space.config).values()), 'B')} parameters, on "
        f"{space.gpus} x {found.system.name}: {sequences(space.global_batch)} of {space.seq} tokens a step, overlap "
        f"{space.overlap}, at most {format_bytes(room(found.system))} a rank\n"
    )
    wide = screen.width >= WIDE
    screen.print(_best(found, asked, wide))
    screen.print(LAYOUTS)
    if any(_order(each) for each in found.best) and not wide:
        screen.print("*: nodes are filled in another order of axes than Megatron's, tp cp ep dp pp")
    if whole := asked.training(found.best[0]):
        screen.print("The first takes {} {}.".format(*training_words(whole)))
    screen.print("\nThe first in detail:")
    screen.print(asked.command(found.best[0]), soft_wrap=True)
    screen.print()
    for line in _counts(found):
        screen.print(line, soft_wrap=True)
    screen.print()
    screen.print(_losses(found, wide))
    screen.print(
        "Of the best with each value: the part of its step that is longest beyond the winner's, and the part that it "
        "saves most of. forced by memory: the winner with that value alone would not fit."
    )


def _best(found: Search, asked: Asked, wide: bool) -> Table:
    """The best configurations, a column for the layout."""
    merged = any(each.alike for each in found.best)
    heads = ["", "step", "MFU", "tokens/s", "memory", "layout", "recompute"]
    heads += ["in a node"] * wide + ["or"] * merged
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for head in heads:
        left = head in ("layout", "recompute", "in a node", "or")
        table.add_column(head, justify="left" if left else "right", no_wrap=head != "or")
    for number, each in enumerate(found.best, 1):
        layout = each.plan.short() + ("*" if _order(each) and not wide else "")
        cells = [str(number), format_seconds(each.step.total), f"{each.step.mfu:.1%}", format_count(each.rate)]
        cells += [format_bytes(each.memory), layout, recompute_word(each.step.config)]
        table.add_row(*cells, *([each.placement] * wide), *([_alike(each)] * merged))
    return table


def _order(each: Candidate) -> bool:
    """Whether its nodes are not filled in Megatron's order."""
    return each.placement != placement(each.plan.override(order=ORDER), each.step.system.node)


def _alike(each: Candidate) -> str:
    """What others of the same time and memory have instead: `z2`."""
    own = set(each.plan.short().split())
    found = {" ".join(one for one in other.plan.short().split() if one not in own): None for other in each.alike}
    listed = [one or "other order" for one in found]
    return ", ".join(listed[:2]) + (f", {len(listed) - 2} more" if len(listed) > 2 else "")


def _counts(found: Search) -> list[str]:
    """How many were tried, and what became of them."""
    lines = [f"{found.tried} configurations tried: {found.running} run, {found.too_large} do not fit, "
             f"{found.indivisible.total()} do not divide."]  # fmt: skip
    if nearest := found.nearest:
        lines.append(
            f"The nearest miss, {nearest.plan.short()} recompute {recompute_word(nearest.config)}, needs "
            f"{format_bytes(nearest.memory)} and lacks {format_bytes(nearest.lacks)}."
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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    heads = ["choice", "value", *(["factor"] if wide else []), "slower by", "why its best loses"]
    for head in heads:
        right = head in ("factor", "slower by")
        table.add_column(head, justify="right" if right else "left", no_wrap=head != "why its best loses")
    for axis in AXES:
        losses = [each for each in found.losses if each.axis == axis]
        if len(losses) < 2:
            continue
        for place, each in enumerate(losses[:SHOWN]):
            factor = [("-" if each.best is None else f"x {each.factor:.3f}")] if wide else []
            net = f"{format_seconds(each.net)}" if each.net else "-" if each.best is None else ""
            name = _NAMES.get(axis, axis) if place == 0 else ""
            table.add_row(name, word(axis, each.value), *factor, net, _why(each))
        if len(losses) > SHOWN:
            blank = [""] * (len(heads) - 3)
            table.add_row("", f"{len(losses) - SHOWN} more", *blank, "slower than these, or too large")
        table.add_section()
    return table


def _why(each: Loss) -> str:
    """The largest loss, the largest gain, and whether memory left no choice."""
    if each.best is None or not each.part:
        return each.why
    words = f"+{format_seconds(each.more)} {each.part}: {each.why}"
    words += f"; -{format_seconds(each.less)} {each.gain}" if each.gain else ""
    return words + ("; forced by memory" if each.forced else "")
