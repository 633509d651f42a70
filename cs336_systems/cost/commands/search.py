"""`search`: the ten best layouts of a model on a number of accelerators, the first one's command, why the rest lose."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cs336_systems.cost.commands.request import as_options, plan_options, plural, take, tokens_option, training, worded
from cs336_systems.cost.commands.settings import MachineOptions, ModelOptions, SearchOptions
from cs336_systems.cost.domain import describe_range, time_range, warnings
from cs336_systems.cost.flops import count_parameters
from cs336_systems.cost.plan import ORDER, RECOMPUTE_NAMES, Plan
from cs336_systems.cost.plan_memory import usable_memory
from cs336_systems.cost.search import Candidate, Search, search
from cs336_systems.cost.search_space import AXES, Space, placement
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.template import json_option, new_table, print_json, print_page, print_warnings
from cs336_systems.host.console import console, format_seconds, options, progress

SECONDS = 400e-6  # estimate for a configuration, until the first ones are timed
SHOWN = 6  # values of one choice, and reasons, that are printed
WIDE = 110  # columns, below which some are left out
_AXIS_NAMES = {"micro_batch": "microbatch", "sequence": "sequence par.", "placement": "in a node", "zero": "ZeRO"}


@click.command("search")
@options(ModelOptions, SearchOptions, MachineOptions)
@tokens_option
@json_option
def command(tokens: float | None, as_json: bool, **given: Any) -> None:
    """The fastest layouts of a model on --gpus accelerators, and why the rest lose."""
    model, asked, machine = (take(each, given) for each in (ModelOptions, SearchOptions, MachineOptions))
    config, stack = model.model_config(), model.stack(asked.stack, asked.zero or 0)
    system, fp8 = machine.machine(stack), asked.precision == "fp8"
    system.check_fp8(fp8)
    config = config.override(kernels=STACKS[stack].kernels)
    fixed = asked.fixed() | ({"recompute": config.recompute} if model.recompute else {})
    seq, width = config.context_length, 4 if asked.precision == "fp32" else 2
    layouts = len(Space(config, seq, asked.gpus, Plan(global_batch=asked.batch_size), system.node, fixed).layouts())
    with progress("layouts", layouts, SECONDS * asked.limit, quiet=as_json) as advance:
        found = search(
            config, seq, system, asked.gpus, asked.batch_size, width=width, overlap=asked.overlap, fixed=fixed,
            limit=asked.limit, advance=advance, stack=stack, fp8=fp8,
        )  # fmt: skip

    def again(each: Candidate) -> str:
        return step_command(each, model, machine, asked.precision)

    if as_json:
        print_json(_record(found, again, tokens))
    else:
        screen, best = console(), found.best[0]
        print_search(screen, found, model.title, again(best), _training(best, tokens))
        print_warnings(screen, warnings(best.config, best.plan, seq, system))


def step_command(each: Candidate, model: ModelOptions, machine: MachineOptions, precision: str) -> str:
    """The command line that predicts a configuration again."""
    recompute = RECOMPUTE_NAMES[each.config.recompute]
    model = replace(model, recompute=None if recompute == "none" else recompute)
    given = [
        one for some in (model, machine, plan_options(each.plan, each.system, precision)) for one in as_options(some)
    ]
    size = [] if "--size" in given else ["--size", model.size]
    return " ".join(["python -m cs336_systems.cost step", *size, *given])


def _training(each: Candidate, tokens: float | None) -> dict[str, float] | None:
    """A training on --tokens, if that was given."""
    return training(tokens, each.rate, each.plan.ranks) if tokens else None


def _candidate(each: Candidate, again: Callable[[Candidate], str], tokens: float | None) -> dict[str, Any]:
    whole, alike = _training(each, tokens), [(other.config.recompute, other.plan) for other in each.alike]
    return {
        "seconds": each.step.total,
        **dict(zip(("low_seconds", "high_seconds"), time_range(each.step), strict=True)),
        "mfu": each.step.mfu,
        "tokens_per_second": each.rate,
        "memory_bytes": each.memory,
        "parts": each.step.parts,
        "recompute": RECOMPUTE_NAMES[each.config.recompute],
        "placement": each.placement,
        "plan": asdict(each.plan),
        "command": again(each),
        **({"training": whole} if whole else {}),
        "alike": [{"recompute": RECOMPUTE_NAMES[name], "plan": asdict(plan)} for name, plan in alike],
    }


def _record(found: Search, again: Callable[[Candidate], str], tokens: float | None) -> dict[str, Any]:
    missed = None
    if near := found.nearest:
        name = RECOMPUTE_NAMES[near.config.recompute]
        missed = {"plan": asdict(near.plan), "recompute": name, "lacks_bytes": near.lacks}
    return {
        **{name: getattr(found, name) for name in ("tried", "running", "too_large")},
        "indivisible": dict(found.indivisible.most_common()),
        "left_out": found.left_out,
        "nearest_miss": missed,
        "best": [_candidate(each, again, tokens) for each in found.best],
        "losses": [
            {
                "choice": each.axis,
                "value": choice_text(each.axis, each.value),
                "factor": each.factor if each.best else None,
                **{name: getattr(each, name) for name in ("net", "part", "more", "gain", "less")},
                "forced_by_memory": each.forced,
                "why": each.why,
                "best": each.best and _candidate(each.best, again, tokens),
            }
            for each in found.losses
        ],
    }


def choice_text(axis: str, value: Any) -> str:
    """The value of a choice as it is printed."""
    if axis == "recompute":
        return RECOMPUTE_NAMES[value]
    return ("yes" if value else "no") if axis == "sequence" else str(value)


def print_search(screen: Console, found: Search, title: str, command: str, whole: dict[str, float] | None) -> None:
    """Print the answer. `command` predicts the best layout again, `whole` is the time of a training with it."""
    space, system, narrow, nearest = found.space, found.system, screen.width < WIDE, found.nearest
    counts = found.indivisible.most_common()
    reasons = [f"  {plural(count, 'plan')}: {reason}" for reason, count in counts[:SHOWN]]
    if more := counts[SHOWN:]:
        reasons.append(f"  {plural(sum(count for _, count in more), 'plan')}: {len(more)} more reasons")
    values = {
        "parameters": sum(count_parameters(space.config).values()),
        "sequences": plural(space.base.global_batch, "sequence"),
        "room": usable_memory(system),
        "starred": "" if narrow and any(map(_other_order, found.best)) else None,
        "expected": describe_range(found.best[0].step),
        "training": " ".join(worded(whole)) if whole else None,
        "indivisible": found.indivisible.total(),
        "miss": nearest and f"{nearest.plan.short()} recompute {RECOMPUTE_NAMES[nearest.config.recompute]}",
        "cut": "; ".join(found.left_out) or None,
    }
    parts = {"best": _best(found, narrow), "reasons": "\n".join(reasons), "losses": _losses(found, narrow)}
    print_page(screen, "search", values | locals(), parts)


def _best(found: Search, narrow: bool) -> Table:
    """The best configurations, a column for the layout, and one for others of the same time and memory if any has."""
    columns = [":2", "step:s", "MFU:.1%", "tokens/s:n", "memory:b", "<layout", "<recompute", "?<in a node"]
    merged, rows = any(each.alike for each in found.best), []
    for number, each in enumerate(found.best, 1):
        layout, recompute = each.plan.short() + "*" * (_other_order(each) and narrow), each.config.recompute
        words = [layout, RECOMPUTE_NAMES[recompute], each.placement, *[_alike(each)] * merged]
        rows.append([number, each.step.total, each.step.mfu, each.rate, each.memory, *words])
    return new_table([*columns, *["~or"] * merged], rows, narrow=narrow)


def _other_order(each: Candidate) -> bool:
    """True where nodes are not filled in Megatron's order."""
    return each.placement != placement(each.plan.override(order=ORDER), each.system.node)


def _alike(each: Candidate) -> str:
    """Choices of other configurations with the same time and memory: `z2`."""
    own = set(each.plan.short().split())
    found = {" ".join(one for one in other.plan.short().split() if one not in own): None for other in each.alike}
    listed = [one or "other order" for one in found]
    return ", ".join(listed[:2]) + (f", {len(listed) - 2} more" if len(listed) > 2 else "")


def _losses(found: Search, narrow: bool) -> Table:
    """For each value of each choice how much slower its best is, and why: by the part that grows most."""
    rows: list[list[Any] | None] = []
    for axis in AXES:
        losses = [each for each in found.losses if each.axis == axis]
        if len(losses) < 2:
            continue
        for place, each in enumerate(losses[:SHOWN]):
            slower = [f"x {each.factor:.3f}", each.net or None] if each.best else ["-", "-"]
            name, why = "" if place else _AXIS_NAMES.get(axis, axis), each.why
            if each.best and each.part:
                gain = f"; -{format_seconds(each.less)} {each.gain}" if each.gain else ""
                why = f"+{format_seconds(each.more)} {each.part}: {why}{gain}{'; forced by memory' * each.forced}"
            rows.append([name, choice_text(axis, each.value), *slower, why])
        if len(losses) > SHOWN:
            rows.append(["", f"{len(losses) - SHOWN} more", "", "", "slower than these, or too large"])
        rows.append(None)
    return new_table(["choice", "<value", "?factor", "slower by:s", "~why its best loses"], rows, narrow=narrow)
