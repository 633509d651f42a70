"""A model, a plan and a machine: their options on the command line, and the request that these make."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import click

from cs336_systems.cost import machines
from cs336_systems.cost.domain import warnings
from cs336_systems.cost.machines import DEFAULT_SYSTEM, HERE, SECONDS, SYSTEMS, System
from cs336_systems.cost.operator_time import TimedPart, timed_part
from cs336_systems.cost.operators import Group
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.cost.plan import ORDER, RECOMPUTE, RECOMPUTE_NAMES, Overlap, Plan
from cs336_systems.cost.stacks import STACKS, StackName, usual_stack
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.errors import UserError
from cs336_systems.host.console import flag, format_count, format_seconds, options, setting
from cs336_systems.presets import COURSE_YEARS, DEFAULT_YEAR, Attention, FeedForwardKind, Kernels, ModelConfig, preset

COUNT, FILE = click.IntRange(1), click.Path(path_type=Path)
MOST_TOKENS = 1e18  # of a training, that anybody asks about
STACK_HELP = "Implementation.  [default: fsdp with --zero 3, other with --kernels torch, else megatron]"
_RUN = ("attention", "kernels", "recompute", "dropout", "context_length")  # how a model runs, not its shape


@dataclass(frozen=True)
class ModelOptions:
    """A model: a preset, perhaps with some sizes changed."""

    size: str = setting("gpt3-175b", "Model preset.", also=("--preset",))
    year: int = setting(
        DEFAULT_YEAR, f"Edition of the course that the size is from, {COURSE_YEARS[0]} to {COURSE_YEARS[-1]}."
    )
    num_layers: int | None = setting(None, "Blocks.  [default: the preset's]", type=COUNT)
    d_model: int | None = setting(None, "Width of the stream.  [default: the preset's]", type=COUNT)
    num_heads: int | None = setting(None, "Heads of attention.  [default: the preset's]", type=COUNT)
    num_kv_heads: int | None = setting(None, "Heads of keys and values.  [default: the preset's]", type=COUNT)
    d_ff: int | None = setting(
        None, "Width of the feed-forward.  [default: the preset's, or 4 x --d-model]", type=COUNT
    )
    vocab_size: int | None = setting(None, "Tokens.  [default: the preset's]", type=COUNT)
    context: int | None = setting(None, "Tokens in a sequence.  [default: the preset's]", type=COUNT)
    feed_forward: FeedForwardKind | None = setting(None, "Feed-forward, gated or not.  [default: the preset's]")
    attention: Attention = setting("sdpa", "naive: scores in memory; the others: none.")
    dropout: float | None = setting(None, "Probability of dropping an activation.  [default: the preset's]")
    kernels: Kernels = setting(
        "triton", "Element-wise work next to each other in one kernel, or (torch) each operation in one."
    )
    num_experts: int | None = setting(None, "Experts of a layer.  [default: the preset's]", type=COUNT)
    expert_every: int | None = setting(None, "Every k-th layer has experts.  [default: the preset's]", type=COUNT)
    recompute: Literal["none", "selective", "full"] | None = setting(
        None, "What backward runs again: nothing, attention's core, or blocks.  [default: none; of `search`: all three]"
    )

    def model_config(self) -> ModelConfig:
        """The model, its context the sequence. Raises UserError for what does not exist or divide."""
        known = {each.name for each in fields(ModelConfig)}
        changes = {name: value for name, value in asdict(self).items() if name in known} | {
            "d_ff": self.d_ff if self.d_ff or not self.d_model else 4 * self.d_model,
            "num_kv_heads": self.num_kv_heads if self.num_kv_heads or not self.num_heads else 0,
            "context_length": self.context,
            "recompute": RECOMPUTE[self.recompute] if self.recompute else None,
        }
        return preset(self.size, self.year).model.override(**changes)

    @property
    def title(self) -> str:
        """The preset's name, and whether the model has another shape by now."""
        began, now = asdict(preset(self.size, self.year).model), asdict(self.model_config())
        changed = any(began[name] != value for name, value in now.items() if name not in _RUN)
        return f"{self.size}, changed" if changed else self.size


@dataclass(frozen=True)
class PlanOptions:
    """Degrees of parallelism, the batch, and the choices that go with them."""

    tp: int = setting(1, "Tensor-parallel ranks.", type=COUNT)
    pp: int = setting(1, "Pipeline stages.", type=COUNT)
    dp: int = setting(1, "Data-parallel replicas.", type=COUNT)
    cp: int = setting(1, "Context-parallel ranks: each sequence is split over so many.", type=COUNT)
    ep: int = setting(1, "Expert-parallel ranks; with --dp they see different rows.", type=COUNT)
    chunks: int = setting(1, "Groups of blocks of a stage, interleaved.", type=COUNT)
    sequence_parallel: bool = setting(False, "Split the stream between layers along the sequence, over the tp ranks.")
    zero: int = setting(0, "ZeRO stage.", type=click.IntRange(0, 3))
    micro_batch_size: int = setting(1, "Sequences that pass through the model at once.", type=COUNT)
    batch_size: int | None = setting(
        None, "Sequences in a step.  [default: a microbatch a replica, or four a stage]", type=COUNT
    )
    overlap: Overlap | None = setting(
        None,
        "What travels while layers compute: nothing, what data parallelism sends, or also what goes from layer to "
        "layer.  [default: all on H100 and newer, whose frameworks do, else data]",
    )
    order: str = setting(" ".join(ORDER), "Axes from neighbours in a node to ranks far apart.")
    precision: Literal["bf16", "fp16", "fp32"] = setting("bf16", "Of activations and products.")
    stage_layers: str = setting("", "Blocks of each stage, such as 9,9,8,6.  [default: as even as they divide]")
    stack: StackName | None = setting(None, STACK_HELP)

    def plan(self, system: System | None = None) -> Plan:
        """The plan on a machine, which may decide what overlaps. Raises UserError for what does not divide."""
        if self.sequence_parallel and self.tp == 1:
            raise UserError("--sequence-parallel splits the stream over the tp ranks, of which there is one: set --tp")
        together = self.micro_batch_size * self.dp * self.ep
        return Plan(
            **{name: getattr(self, name) for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "zero")},
            sequence=self.sequence_parallel,
            micro_batch=self.micro_batch_size,
            global_batch=self.batch_size or together * (4 * self.pp if self.pp > 1 else 1),
            overlap=self.overlap or (system.overlap if system else "data"),
            order=tuple(self.order.replace(",", " ").split()),
            width=4 if self.precision == "fp32" else 2,
            layers=parse_layers(self.stage_layers),
            stack=self.stack or usual_stack(self.zero, "triton"),
        )


@dataclass(frozen=True)
class MachineOptions:
    """The machine: a preset, this one, or a file; and the constants of the cost model."""

    system: str | None = setting(
        None,
        f"Machine: {', '.join(each.name for each in SYSTEMS.values())}, or {HERE}: this one, in {SECONDS:.0f} s.  "
        f"[default: {DEFAULT_SYSTEM}]",
    )
    machine_file: Path | None = setting(None, "A machine that `probe --out` measured, not --system.", type=FILE)
    constants: Path | None = setting(
        None, "Constants in a file that `fit` wrote.  [default: those of this project]", type=FILE
    )

    def machine(self, stack: str = "megatron") -> System:
        """The machine by the constants of the file; without one by those of the stack, but for what was measured on the
        machine itself. Raises UserError for a machine that is not known, or a file that has none."""
        name = self.system or DEFAULT_SYSTEM
        if self.machine_file and self.system:
            raise UserError(f"--machine-file {self.machine_file} and --system {self.system}: which of the two?")
        if self.machine_file:
            found = machines.read_machine(self.machine_file)
        else:
            found = machines.probe_here() if name.lower() == HERE else machines.system_preset(name)
        if self.constants:
            return STACKS[stack].on(found, machines.load_constants(self.constants))
        found = STACKS[stack].on(found)
        return replace(found, constants=replace(found.constants, **found.measured))


@dataclass(frozen=True)
class Request:
    """A model on a plan on a machine, checked to divide; `title` names the preset that the model began as."""

    title: str
    config: ModelConfig
    plan: Plan
    system: System

    @property
    def seq(self) -> int:
        return self.config.context_length

    @property
    def args(self) -> tuple[ModelConfig, Plan, int, System]:
        return self.config, self.plan, self.seq, self.system

    @property
    def parameters(self) -> int:
        return sum(count_parameters(self.config).values())

    def timed(self, groups: Iterable[tuple[Group, float]]) -> list[TimedPart]:
        """Some parts of the model, and how many of each, on one rank for one microbatch."""
        config, plan, seq, system = self.args
        return [timed_part(config, plan, seq, group, system, times) for group, times in groups]

    def step(self) -> StepTime:
        return step_time(*self.args)

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
        experts = f", {config.num_experts} experts in {config.expert_layers} layers" if config.num_experts else ""
        return (
            f"{self.title}: {format_count(self.parameters, 'B')} parameters, {config.num_layers} layers, d_model "
            f"{config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads{experts}, {config.attention} attention\n"
            f"{plan.ranks} x {self.system.name}{': ' if shown else ''}{', '.join(shown)}; "
            f"{plural(plan.global_batch, 'sequence')} of {self.seq} tokens in {plan.microbatches} x {plan.micro_batch} "
            f"per replica; recompute {RECOMPUTE_NAMES.get(config.recompute, config.recompute)}, "
            f"overlap {plan.overlap}, stack {plan.stack}"
        )

    def record(self) -> dict[str, Any]:
        model = {**asdict(self.config), "parameters": self.parameters}
        name = self.title.removesuffix(", changed")
        return {"preset": name, "model": model, "plan": asdict(self.plan), "system": self.system.name}


def parse_layers(text: str) -> tuple[int, ...]:
    """`9,9,8,6` -> (9, 9, 8, 6). Raises UserError for what is no count."""
    words = text.replace(",", " ").split()
    if bad := [word for word in words if not word.isdecimal()]:
        raise UserError(f"--stage-layers has {bad[0]!r}, which is no number of blocks: write 9,9,8,6 for four stages")
    return tuple(map(int, words))


def take(settings: type, given: dict[str, Any]) -> Any:
    """Take the options of one class out of a command's arguments."""
    return settings(**{each.name: given.pop(each.name) for each in fields(settings)})


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a command the options of a request."""
    return options(ModelOptions)(options(PlanOptions)(options(MachineOptions)(function)))


def take_request(given: dict[str, Any]) -> Request:
    """The request that a command was given, taken out of its arguments. Raises UserError for what does not divide."""
    model, plan, machine = (take(each, given) for each in (ModelOptions, PlanOptions, MachineOptions))
    config = model.model_config()
    plan.plan().check(config, config.context_length)  # a mistake here shows before a machine is measured
    name = plan.stack or usual_stack(plan.zero, model.kernels)
    system = machine.machine(name)
    return Request(model.title, *STACKS[name].shape(config, plan.plan(system)), system)


def as_options(settings: Any) -> list[str]:
    """The options that give a command these settings: those that are not the default."""
    found = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default:
            found += [flag(each.name), *([] if value is True else [shlex.quote(str(value))])]
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
        "stage_layers": ",".join(map(str, plan.layers)) if not STACKS[plan.stack].balanced else "",
        "stack": plan.stack,
        "precision": precision,
    }
    return PlanOptions(**(same | renamed))


def plural(count: int, noun: str) -> str:
    """`1 sequence`, `2 sequences`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _tokens(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 1 <= value <= MOST_TOKENS:
        raise UserError(f"--tokens must be a number from 1 to {MOST_TOKENS:.0e}, not {value}")
    return value


tokens_option = click.option(
    "--tokens", type=float, callback=_tokens, help="Of a whole training, such as 1e12: how long that takes."
)


def training(tokens: float, rate: float, ranks: int) -> dict[str, float]:
    """Seconds and accelerator-hours of training on so many tokens at `rate` per second, without a pause."""
    return {"tokens": tokens, "seconds": tokens / rate, "accelerator_hours": tokens / rate * ranks / 3600}


def describe_training(found: dict[str, float]) -> tuple[str, str]:
    """The same as text: time, and of how many tokens and how much work."""
    hours = found["accelerator_hours"]
    work = f"{hours:,.{0 if hours > 10 else 2}f} accelerator-hours"
    return format_seconds(found["seconds"]), f"for {format_count(found['tokens'])} tokens, {work}"
