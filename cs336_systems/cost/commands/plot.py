"""`plot`: the model's predictions as pictures. `plot all --out docs/` draws those of the documentation."""

import shlex
from pathlib import Path
from typing import Any

import click

from cs336_systems.cost.commands.request import Request, on_command_line, request_options, take, take_request
from cs336_systems.cost.commands.settings import COUNT, FILE, STACK_HELP, MachineOptions, ModelOptions
from cs336_systems.cost.domain import DOMAIN
from cs336_systems.cost.plan import Plan, StackName
from cs336_systems.cost.plots import breakdown, roofline, scaling
from cs336_systems.cost.plots.style import check_path, save
from cs336_systems.cost.runs import TrainingRun
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.step_time import Case
from cs336_systems.errors import UserError
from cs336_systems.host.console import options
from cs336_systems.host.text import printable

# Options of the pictures that `plot all` draws, by command.
EXAMPLES = {
    "roofline": "--dropout 0.1 --tp 8 --sequence-parallel --pp 8 --attention naive --recompute selective",
    "breakdown": "",
    "scaling": "--size llama-8b --attention flash --system H100",
}

out_option = click.option(
    "--out", required=True, type=FILE, callback=lambda context, option, out: check_path(out),
    help="The picture, a file in .svg, .png or .pdf.",
)  # fmt: skip


@click.group(no_args_is_help=False, epilog=DOMAIN)
def command() -> None:
    """Pictures of predictions: a roofline, what steps are made of, and scaling curves.

    They need matplotlib, of the extra `writeup`.
    """


@command.command("roofline")
@request_options
@out_option
def roofline_command(out: Path, **given: Any) -> None:
    """The operators of one block and of the head: FLOPs per byte, and FLOP/s, under the machine's roof."""
    _write(roofline.draw(*_warned(take_request(given)).args), out)


@command.command("breakdown")
@request_options
@out_option
@click.pass_context
def breakdown_command(context: click.Context, /, out: Path, **given: Any) -> None:
    """Parts of a step of a plan. With --out alone: of the runs of arXiv:2205.05198, table 5."""
    asked = on_command_line(context) - {"out"}
    bars = [TrainingRun(*_warned(take_request(given)).args, "as asked", None)] if asked else breakdown.published()
    _write(breakdown.draw(bars), out)


@command.command("scaling")
@out_option
@click.option("--batch-size", default=512, show_default=True, type=COUNT, help="Sequences in a step: strong scaling.")
@click.option("--per-gpu", default=4, show_default=True, type=COUNT, help="Sequences for each GPU: weak scaling.")
@click.option("--least", default=8, show_default=True, type=COUNT, help="Accelerators to begin with, then doubled.")
@click.option("--most", default=4096, show_default=True, type=COUNT, help="Accelerators to end with.")
@click.option("--zero", default=1, show_default=True, type=click.IntRange(0, 3), help="ZeRO stage.")
@click.option("--stack", type=click.Choice(list(STACKS)), help=STACK_HELP)
@options(MachineOptions, ModelOptions)
def scaling_command(
    out: Path, batch_size: int, per_gpu: int, least: int, most: int, zero: int, stack: StackName | None, **given: Any
) -> None:
    """MFU and tokens per second by number of accelerators: strong and weak, of the best plan and of fixed ones."""
    model = take(ModelOptions, given)
    config, name = model.model_config(), model.stack(stack, zero)
    if least > most:
        raise UserError(f"--least {least} is more than --most {most}")
    system = take(MachineOptions, given).machine(name)
    base = Plan(zero=zero, overlap=system.overlap, stack=name)
    study = Case(config, base, config.context_length, system)
    counts = [least << k for k in range((most // least).bit_length())]
    _write(scaling.draw(study, counts, batch_size, per_gpu), out)


@command.command("all")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False, exists=True), help="The pictures' folder."
)
def all_command(out: Path) -> None:
    """One example of each, as cost-NAME.svg in a folder, with the options that made it."""
    for name, text in EXAMPLES.items():
        path = check_path(out / f"cost-{name}.svg")
        click.echo(printable(f"plot {name} {text}".rstrip()))
        command.commands[name].main([*shlex.split(text), "--out", str(path)], standalone_mode=False)


def _write(figure: Any, out: Path) -> None:
    click.echo(printable(f"plot in {save(figure, out)}"))


def _warned(request: Request) -> Request:
    for line in request.warnings():
        click.echo(printable(f"note: {line}"), err=True)
    return request
