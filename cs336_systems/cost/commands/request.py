"""A model, a plan and a machine from the command line: the request that `step`, `table` and `explain` answer."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from cs336_systems.cost.domain import warnings
from cs336_systems.cost.machines import CONSTANTS, Constants, System, load_constants
from cs336_systems.cost.options import RECOMPUTE, MachineOptions, ModelOptions, PlanOptions, take
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_count, format_seconds, options, setting
from cs336_systems.presets import ModelConfig, preset

MOST_TOKENS = 1e18  # of a training, that anybody asks about
# Options of how a model runs, which leave its shape.
_RUN = ("attention", "kernels", "recompute", "dropout", "context_length")


@dataclass(frozen=True)
class ConstantOptions:
    """Constants of the cost model."""

    constants: Path | None = setting(
        None, "Constants in a file that `fit` wrote.  [default: those of this project]", type=click.Path(path_type=Path)
    )


@dataclass(frozen=True)
class Request:
    """A model on a plan on a machine, checked to divide; `name` is of the preset that the model began as."""

    name: str
    config: ModelConfig
    plan: Plan
    system: System
    constants: Constants = CONSTANTS
    changed: bool = False  # whether it still has the preset's shape

    @property
    def title(self) -> str:
        """The preset's name, and whether the model is another by now."""
        return f"{self.name}, changed" if self.changed else self.name

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.config.context_length

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(count_parameters(self.config).values())

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        return self.plan.global_batch * self.seq

    def step(self) -> StepTime:
        """The predicted time of a step."""
        return step_time(self.config, self.plan, self.seq, self.system, self.constants)

    def warnings(self) -> list[str]:
        """Ways in which a prediction lies outside the fitted domain."""
        return warnings(self.config, self.plan, self.seq, self.system, self.constants)

    def lines(self) -> list[str]:
        """Model, plan and machine, two lines."""
        config, plan = self.config, self.plan
        degrees = ("tp", "pp", "dp", "cp", "ep", "chunks")
        shown = [f"{name} {getattr(plan, name)}" for name in degrees if getattr(plan, name) > 1]
        shown += ["sequence parallel"] if plan.sequence else []
        shown += [f"ZeRO {plan.zero}"] if plan.zero else []
        experts = f", {config.num_experts} experts in {config.expert_layers} layers" if config.num_experts else ""
        recompute = next((word for word, ours in RECOMPUTE.items() if ours == config.recompute), config.recompute)
        return [
            f"{self.title}: {format_count(self.parameters, 'B')} parameters, {config.num_layers} layers, d_model "
            f"{config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads{experts}, {config.attention} attention",
            f"{plan.ranks} x {self.system.name}{': ' if shown else ''}{', '.join(shown)}; "
            f"{sequences(plan.global_batch)} of {self.seq} tokens in {plan.microbatches} x {plan.micro_batch} per "
            f"replica; recompute {recompute}, overlap {plan.overlap}",
        ]

    def record(self) -> dict[str, Any]:
        """For a program."""
        model = {**asdict(self.config), "parameters": self.parameters}
        return {"preset": self.name, "model": model, "plan": asdict(self.plan), "system": self.system.name}


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a command the options of a request."""
    for settings in (ConstantOptions, MachineOptions, PlanOptions, ModelOptions):
        function = options(settings)(function)
    return function


def take_request(given: dict[str, Any]) -> Request:
    """The request that a command was given, taken out of its arguments. Raises UserError for what does not divide."""
    model, plan, system = (take(each, given) for each in (ModelOptions, PlanOptions, MachineOptions))
    file = take(ConstantOptions, given).constants
    # A mistake in the rest shows before a machine is measured.
    name, config = model.size, model.model_config()
    plan.plan().check(config, config.context_length)
    machine = system.machine()
    return Request(name, config, plan.plan(machine), machine, constants_for(machine, file), is_changed(model))


def constants_for(system: System, file: Path | None) -> Constants:
    """The constants of a file; without one this project's, but for those that were measured on the machine itself."""
    return load_constants(file) if file else replace(CONSTANTS, **system.measured)


def is_changed(model: ModelOptions) -> bool:
    """True for a model of another shape than its preset; options of how it runs do not count."""
    began, now = asdict(preset(model.size, model.year).model), asdict(model.model_config())
    return any(began[name] != value for name, value in now.items() if name not in _RUN)


def as_options(settings: Any) -> list[str]:
    """The options that give a command these settings: those that are not the default."""
    found = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default:
            found += [f"--{each.name.replace('_', '-')}", *([] if value is True else [shlex.quote(str(value))])]
    return found


def plan_options(plan: Plan, system: System, precision: Any = "bf16") -> PlanOptions:
    """The options' values that make a plan on a machine."""
    same = {each.name: getattr(plan, each.name) for each in fields(PlanOptions) if hasattr(plan, each.name)}
    renamed = {
        "sequence_parallel": plan.sequence,
        "micro_batch_size": plan.micro_batch,
        "batch_size": plan.global_batch,
        "overlap": None if plan.overlap == system.overlap else plan.overlap,
        "order": " ".join(plan.order),
        "precision": precision,
    }
    return PlanOptions(**(same | renamed))


def sequences(count: int) -> str:
    """`1 sequence`, `2 sequences`."""
    return f"{count} sequence{'' if count == 1 else 's'}"


def tokens_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a command `--tokens`."""
    help = "Of a whole training, such as 1e12: how long that takes."
    return click.option("--tokens", type=float, callback=_tokens, help=help)(function)


def _tokens(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 1 <= value <= MOST_TOKENS:
        raise UserError(f"--tokens must be a number from 1 to {MOST_TOKENS:.0e}, not {value}")
    return value


def training(tokens: float, rate: float, ranks: int) -> dict[str, float]:
    """Seconds and accelerator-hours of training on so many tokens at `rate` per second, without a pause."""
    seconds = tokens / rate
    return {"tokens": tokens, "seconds": seconds, "accelerator_hours": seconds * ranks / 3600}


def describe_training(found: dict[str, float]) -> tuple[str, str]:
    """The same as text: time, and of how many tokens and how much work."""
    hours = found["accelerator_hours"]
    work = f"{hours:,.{0 if hours > 10 else 2}f} accelerator-hours"
    return format_seconds(found["seconds"]), f"for {format_count(found['tokens'])} tokens, {work}"
