"""A request: a model on a plan on a machine, as options of the command line name them."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import click
from click.core import ParameterSource

from cs336_systems.cost.commands.settings import MachineOptions, ModelOptions, PlanOptions
from cs336_systems.cost.domain import warnings
from cs336_systems.cost.flops import count_parameters
from cs336_systems.cost.machines import System
from cs336_systems.cost.operator_time import TimedPart, timed_part
from cs336_systems.cost.plan import OPTIONS, RECOMPUTE_NAMES, Plan
from cs336_systems.cost.rank import Group
from cs336_systems.cost.shape import MOST
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import Case
from cs336_systems.cost.template import fill_file
from cs336_systems.errors import UserError
from cs336_systems.host.console import finite, flag, format_count, format_seconds, options


@dataclass(frozen=True)
class Request(Case):
    """A case that was checked to divide; `title` names the preset that the model began as."""

    title: str

    @property
    def parameters(self) -> int:
        return sum(count_parameters(self.config).values())

    def timed(self, groups: Iterable[tuple[Group, int]]) -> list[TimedPart]:
        """Parts of the model with their numbers, on one rank for one microbatch; blocks that recompute are separate."""
        config, plan, seq, system = self.args
        return [
            timed_part(config.override(recompute=recompute), plan, seq, group, system, times)
            for group, count in groups
            for recompute, times in plan.recomputed(config, group, count)
        ]

    def warnings(self) -> list[str]:
        """Ways in which a prediction lies outside the fitted domain."""
        return warnings(*self.args)

    def lines(self) -> str:
        """Model, plan and machine, two lines."""
        config, plan = self.config, self.plan
        degrees = ("tp", "pp", "dp", "cp", "ep", "chunks")
        shown = [f"{name} {getattr(plan, name)}" for name in degrees if getattr(plan, name) > 1]
        shown += [f"stages of {' '.join(map(str, plan.layers))} blocks"] * bool(plan.layers)
        shown += ["sequence parallel"] * plan.sequence + [f"ZeRO {plan.zero}"] * (plan.zero > 0)
        shown += [f"over {plan.shard} replicas each"] * (plan.shard > 0) + ["FP8"] * plan.fp8
        again = RECOMPUTE_NAMES.get(config.recompute, config.recompute)
        again += f" ({', '.join(plan.recompute_modules)})" if plan.recompute_modules else ""
        again += f" in one block of {plan.recompute_nth}" if plan.recompute_nth > 1 else ""
        experts = f", {config.num_experts} experts in {config.expert_layers} layers" if config.num_experts else ""
        words = {"again": again, "experts": experts, "shown": f": {', '.join(shown)}" if shown else ""}
        words["sequences"] = plural(plan.global_batch, "sequence")
        return "\n".join(fill_file("request", words | {"request": self}))

    def record(self) -> dict[str, Any]:
        model = {**asdict(self.config), "parameters": self.parameters}
        name = self.title.removesuffix(", changed")
        return {"preset": name, "model": model, "plan": asdict(self.plan), "system": self.system.name}


def take(settings: type, given: dict[str, Any]) -> Any:
    """Take the options of one class out of a command's arguments. Raises UserError for a size beyond any model's."""
    taken = {each.name: given.pop(each.name) for each in fields(settings)}
    if huge := [name for name, value in taken.items() if isinstance(value, int) and value > MOST]:
        raise UserError(f"{flag(huge[0])} has {len(str(taken[huge[0]]))} digits: give 10^15 at most")
    return settings(**taken)


def on_command_line(context: click.Context) -> set[str]:
    """Names of the options and arguments that were given."""
    return {name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a command the options of a request."""
    return options(ModelOptions, PlanOptions, MachineOptions)(function)


def take_request(given: dict[str, Any]) -> Request:
    """The request that a command was given, taken out of its arguments. Raises UserError for what does not divide."""
    model, plan, machine = (take(each, given) for each in (ModelOptions, PlanOptions, MachineOptions))
    if plan.recompute_modules and model.recompute is None:
        model = replace(model, recompute="selective")
    config, name = model.model_config(), model.stack(plan.stack, plan.zero)
    checked = plan.plan()
    checked.check(config, config.context_length)  # a mistake here shows before a machine is measured
    if plan.recompute_modules and config.recompute != "attention":
        raise UserError(
            f"--recompute-modules are those of --recompute selective, not {model.recompute}: drop one of them"
        )
    if plan.recompute_nth > 1 and config.recompute == "none":
        raise UserError(f"--recompute-nth {plan.recompute_nth} needs --recompute selective or full, which it thins out")
    system = machine.machine(name)
    system.check_fp8(checked.fp8)
    return Request(*STACKS[name].shape(config, plan.plan(system)), config.context_length, system, model.title)


def as_options(settings: Any) -> list[str]:
    """The command-line options of these settings, without defaults."""
    given = {each.name: value for each in fields(settings) if (value := getattr(settings, each.name)) != each.default}
    words = ([flag(name), *([] if value is True else [shlex.quote(str(value))])] for name, value in given.items())
    return [word for option in words for word in option]


def plan_options(plan: Plan, system: System, precision: Any = "bf16") -> PlanOptions:
    """The options' values that make a plan on a machine."""
    names = {OPTIONS.get(each.name, each.name): each.name for each in fields(Plan)}
    same = {each.name: getattr(plan, names[each.name]) for each in fields(PlanOptions) if each.name in names}
    renamed = {
        "overlap": None if plan.overlap == system.overlap else plan.overlap,
        "order": " ".join(plan.order),
        "stage_layers": ",".join(map(str, plan.layers)) if not STACKS[plan.stack].balanced else "",
        "stack": plan.stack,
        "precision": precision,
        "recompute_modules": ",".join(plan.recompute_modules),
    }
    return PlanOptions(**(same | renamed))


def plural(count: int, noun: str) -> str:
    """`1 sequence`, `2 sequences`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


tokens_option = click.option(
    "--tokens", type=click.FloatRange(1, 1e18), callback=finite, help="Tokens of a whole training, to predict its time."
)


def training(tokens: float, rate: float, ranks: int) -> dict[str, float]:
    """Seconds and accelerator-hours of a whole training on `tokens` at `rate` per second, without a pause."""
    return {"tokens": tokens, "seconds": tokens / rate, "accelerator_hours": tokens / rate * ranks / 3600}


def worded(whole: Mapping[str, float]) -> tuple[str, str]:
    """(its time, its tokens and accelerator-hours)."""
    hours = whole["accelerator_hours"]
    work = f"for {format_count(whole['tokens'])} tokens, {hours:,.{0 if hours > 10 else 2}f} accelerator-hours"
    return format_seconds(whole["seconds"]), work
