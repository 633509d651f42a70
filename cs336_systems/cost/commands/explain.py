"""`explain`: derivations of a step, and of answers to the course's accounting questions; templates have the words."""

from collections import Counter
from typing import Any

import click
from rich.markdown import Markdown
from rich.table import Table

from cs336_systems.cost.commands.request import Request, request_options, take_request
from cs336_systems.cost.course import QUESTIONS, defaults, parse_numbers, question
from cs336_systems.cost.domain import describe_range
from cs336_systems.cost.flops import forward_flops
from cs336_systems.cost.operator_time import TILE, TimedPart, Timing, collective_seconds, product_rate, timing
from cs336_systems.cost.rank import Collective
from cs336_systems.cost.step_time import (
    bucket_size,
    data_parallel_seconds,
    gradient_bytes,
    optimizer_bytes,
    stage_groups,
    stage_seconds,
    stage_weights,
)
from cs336_systems.cost.template import new_table, print_page, print_warnings
from cs336_systems.errors import UserError
from cs336_systems.host.console import console, format_count, format_seconds

AXES = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
PASSES = ("forward", "backward", "recompute")
SCATTERED = "reduce-scattered, and weights gathered"


class Topics(click.Group):
    """A group with a command for each question of the course, besides its own."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if found := super().get_command(ctx, cmd_name):
            return found
        if cmd_name not in QUESTIONS:
            raise UserError(f"nothing is called {cmd_name!r}; choose from {', '.join([*self.commands, *QUESTIONS])}")
        about = f"A question of the course: {QUESTIONS[cmd_name].title}\n\nIts numbers: {defaults(cmd_name)}"
        given = click.Argument(["numbers"], nargs=-1, metavar="[NAME=VALUE]...")
        return click.Command(cmd_name, params=[given], help=about, callback=lambda numbers: _answer(cmd_name, numbers))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(100)) for name, each in self.commands.items()])
        with formatter.section("Questions of the course"):
            formatter.write_dl([(name, question.title) for name, question in QUESTIONS.items()])


@click.group("explain", cls=Topics, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Derive a prediction of a step, or the answer to a question of the course, in words and numbers.

    `explain step` takes the options of `step`; a question takes numbers, as in `explain rings N=16`. Without a
    command it lists what can be explained.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("step")
@request_options
def step_command(**given: Any) -> None:
    """The time of a step: from the model's FLOPs to each of its seconds."""
    request, screen = take_request(given), console()
    numbers, tables = explain_step(request)
    screen.print(request.lines())
    print_page(screen, "explain_step", numbers, tables, indent=3)
    print_warnings(screen, request.warnings())


def _answer(name: str, numbers: tuple[str, ...]) -> None:
    screen, text = console(), question(name, **parse_numbers(numbers)).markdown()
    if screen.is_terminal:
        screen.print(Markdown(text))
    else:
        click.echo(text)


class Derivation:
    """A predicted step with the numbers behind it: the slowest stage, and its groups of operators timed."""

    def __init__(self, request: Request) -> None:
        self.request, self.step = request, request.step
        self.plan, self.system = request.plan, request.system
        stage = request.config, request.plan, request.seq, self.step.stage
        self.stage = stage_seconds(*stage, request.system)
        self.parts = request.timed(stage_groups(request.config, request.plan, self.step.stage))
        self.peak = self.system.peak(self.plan.number)
        self.axes = [axis for axis, part in AXES.items() if self.step.parts[part]]

    def collectives(self, part: TimedPart, axis: str) -> dict[str, Counter[Collective]]:
        """Number of times that a part of the model launches each collective along an axis, by pass."""
        operators = [each.operator for each in part.operators]
        sent = {"forward": [each.sent for each in operators], "backward": [each.returned for each in operators]}
        sent["recompute"] = [part.sent_again]
        return {way: Counter(one for many in each for one in many if one.axis == axis) for way, each in sent.items()}


def explain_step(request: Request) -> tuple[dict[str, Any], dict[str, Table]]:
    """Numbers and tables of the derivation of `step_time`, from a model's FLOPs to the last second. The template
    uses the names of the variables here. Raises UserError as `step_time` does."""
    found = Derivation(request)
    tables = {"kernels": _kernels(found), "axes": _axes(found), "collectives": _collectives(found)}
    return _totals(found) | _product(found) | _between(found), tables


def _totals(found: Derivation) -> dict[str, Any]:
    """FLOPs, passes of a microbatch, AdamW, and the sum."""
    request, plan, system, constants = found.request, found.plan, found.system, found.system.constants
    step, stage, parts, peak = found.step, found.stage, found.step.parts, found.peak
    flops = forward_flops(request.config, 1, request.seq)
    sequence_flops, least = step.model_flops / plan.global_batch, step.model_flops / (plan.ranks * peak)
    terms = dict[str, str | None]()
    for way in PASSES:
        busy = [(part.times, getattr(part, way).busy) for part in found.parts]
        terms[way] = " + ".join(f"{times:g} x {format_seconds(one)}" for times, one in busy if one) or None
    modules = plan.recompute_modules or ("attention's core",)
    rerun = ", ".join(modules) if request.config.recompute == "attention" else "whole blocks"
    collectives = "" if found.axes else None
    cut = plan.tp if plan.overlap == "all" and plan.sequence and "tp" in found.axes else None
    shard, memory_rate, zero = plan.shards[0], system.memory_rate, plan.zero > 0
    adamw_bytes, adamw_moved = optimizer_bytes(plan), parts["optimizer"] * memory_rate
    expected = describe_range(step)
    return locals() | {
        "forward_flops": ", ".join(f"{name} {format_count(count)}" for name, count in flops.items()),
        "all": {way: plan.microbatches * getattr(stage, way) for way in PASSES},
        "sum": " + ".join(f"{seconds:.4g}" for seconds in parts.values() if seconds),
    }


def _product(found: Derivation) -> dict[str, Any]:
    """Both sides of the roofline of the largest product."""
    system, constants = found.system, found.system.constants
    # The product with the most FLOPs in a block; on a stage without blocks, in the embedding or head.
    blocks = [part for part in found.parts if part.group in ("dense", "sparse")]
    operators = [each.operator for part in blocks or found.parts for each in part.operators]
    products = [(one, each) for one in operators for each in one.forward if each.inner and not each.fused]
    operator, product = max(products, key=lambda each: each[1].flops)
    batched, rows, tile = product.number > 1, product.number * product.rows, TILE
    waves = product.number * product.rows * product.columns / (TILE * system.processors)
    full, long = waves / (waves + constants.wave), product.inner / (product.inner + constants.ramp)
    rate, kernel = product_rate(product, system), timing([product], [], found.plan, system)
    attainable = system.rate(product.width) / system.peak(product.width)
    rate_share, compute = rate / found.peak, product.flops / rate
    moving, compute_bound = product.nbytes / system.memory_rate, kernel.compute > 0
    return locals()


def _between(found: Derivation) -> dict[str, Any]:
    """Messages and the bubble of a pipeline, and collectives of data parallelism."""
    request, plan, step, constants = found.request, found.plan, found.step, found.system.constants
    config, seq, verbs = request.config, request.seq, {0: "all-reduced", 3: f"{SCATTERED} for each pass"}
    pipeline, messages, others, chunked = "" if plan.pp > 1 else None, 2 * plan.chunks, plan.pp - 1, plan.chunks > 1
    message = plan.width * plan.micro_batch * seq * config.d_model / (plan.cp * plan.tp)
    hides, work = plan.overlap == "all" and chunked, sum(found.stage) * plan.microbatches
    bubble_share, ideal = step.parts["bubble"] / work, others / (plan.microbatches * plan.chunks)
    sends = step.parts["data-parallel"] > 0
    replicas, tied = "" if sends else None, "" if sends and plan.pp > 1 and config.tied_head else None
    weights = sum(stage_weights(config, plan, seq, step.stage)[:2])
    width, alike = 8 * gradient_bytes(plan), plan.replicas // plan.shards[0]
    sharded = "" if sends and alike > 1 else None
    gradients, verb = gradient_bytes(plan) * weights, verbs.get(plan.zero, SCATTERED)
    unhidden = plan.override(overlap="none")
    alone = data_parallel_seconds(config, unhidden, seq, step.stage, found.stage, found.system)
    overlaps, bucket = plan.overlap != "none", bucket_size(plan.replicas)
    return locals()


def _kernels(found: Derivation) -> Table:
    """Kernels of one block or end of the model in each pass, and how long the host takes to launch them."""
    columns = ["one of", "<pass", "FLOPs:n", "bytes:b", "by compute:s", "by memory:s", "kernels", "start:s"]
    rows, host = [], found.system.constants.host
    for part in found.parts:
        for way in PASSES:
            one: Timing = getattr(part, way)
            if one.busy:
                bounds = one.compute, one.memory, one.kernels, one.launch
                rows.append(
                    [part.name, way, one.flops, one.nbytes, *bounds, one.busy, host * one.kernels, one.waits(host)]
                )
    return new_table([*columns, "together:s", "host:s", "wait:s"], rows)


def _axes(found: Derivation) -> Table:
    """Ranks of each axis, the bandwidth at which they send, and the seconds that they take on the stage."""
    system, m = found.system, found.plan.microbatches
    inside, between = system.link_rates
    rows = []
    for axis in found.axes:
        ranks, local = getattr(found.plan, axis), found.plan.local(axis, node=system.node)
        reached = f"{format_count(inside if local == ranks else min(inside, local * between))}B/s"
        if axis == "ep":
            reached = f"{format_count(inside)}B/s"
            reached += f", to other nodes {format_count(between)}B/s at the same time" if local < ranks else ""
        seconds: float = getattr(found.stage, axis)
        rows.append([axis, ranks, local, reached, seconds, m * seconds])
    return new_table(["axis", "ranks", "in a node", "<each sends at", f"stage {found.step.stage}:s", f"x {m}:s"], rows)


def _collectives(found: Derivation) -> Table:
    rows = []
    for axis in found.axes:
        for part in found.parts:
            for way, sent in found.collectives(part, axis).items():
                for each, count in sent.items():
                    seconds = collective_seconds(each, found.plan, found.system)
                    rows.append([axis, part.name, way, count, each.verb, each.nbytes, seconds])
    return new_table(["axis", "<one of", "<pass", "count", "<collective", "bytes:b", "each takes:s"], rows)
