"""`plot`: the model's predictions as pictures. `plot all --out docs/` draws those of the documentation."""

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cs336_systems.cost.commands.request import ConstantOptions, Request, constants_for, request_options, take_request
from cs336_systems.cost.domain import DOMAIN
from cs336_systems.cost.machines import DEFAULT_SYSTEM, HERE, SECONDS, SYSTEMS, System, system_preset
from cs336_systems.cost.options import COUNT, MachineOptions, ModelOptions, take
from cs336_systems.cost.plan import Plan
from cs336_systems.cost.plots import breakdown, degrees, roofline, scaling
from cs336_systems.cost.plots.style import check_path, save
from cs336_systems.errors import UserError
from cs336_systems.host.console import options, setting
from cs336_systems.host.text import printable

# Options of the pictures that `plot all` draws, by command.
EXAMPLES = {
    "roofline": "--dropout 0.1 --tp 8 --sequence-parallel --pp 8 --attention naive --recompute selective",
    "breakdown": f"--published {breakdown.KORTHIKANTI}",
    "scaling": "--size llama-8b --attention flash --system H100",
    "degrees": "--size llama-8b --attention flash --system A100-80GB --system H100 --system B200 --most 512",
}

out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The picture, a file in .svg, .png or .pdf."
)


@dataclass(frozen=True)
class ScalingOptions:
    """Options of `plot scaling`: batches, numbers of accelerators, and the plans that are drawn besides the best."""

    batch_size: int = setting(512, "Sequences in a step, for strong scaling.", type=COUNT)
    per_gpu: int = setting(4, "Sequences for each accelerator, for weak scaling.", type=COUNT)
    least: int = setting(8, "Accelerators to begin with; doubled from there.", type=COUNT)
    most: int = setting(4096, "Accelerators to end with.", type=COUNT)
    fixed: tuple[str, ...] = setting(
        ("1x1", "2x1", "8x1", "1x8", "8x8"), "tp x pp that is drawn besides the best; may be repeated."
    )
    zero: int = setting(1, "ZeRO stage.", type=click.IntRange(0, 3))
    cp: int = setting(1, "Context-parallel ranks.", type=COUNT)
    ep: int = setting(1, "Expert-parallel ranks.", type=COUNT)


@dataclass(frozen=True)
class DegreesOptions:
    """Options of `plot degrees`: the highest degree, and the machines."""

    system: tuple[str, ...] = setting(
        (),
        f"Machine, a line each; may be repeated: {', '.join(each.name for each in SYSTEMS.values())}, or {HERE}: this "
        f"one, in {SECONDS:.0f} s.  [default: {DEFAULT_SYSTEM}]",
    )
    machine_file: tuple[Path, ...] = setting(
        (), "A machine that `probe --out` measured, a line each; may be repeated.", type=click.Path(path_type=Path)
    )
    most: int = setting(256, "Highest degree, a power of two.", type=click.IntRange(2))
    batch_size: int | None = setting(
        None, "Sequences that data and expert parallelism split.  [default: --most]", type=COUNT
    )

    def machines(self) -> list[System]:
        """Raises UserError for a machine that is not known, a file that has none, and two of one name."""
        files = [MachineOptions(machine_file=path).machine() for path in self.machine_file]
        names = self.system or (() if files else (DEFAULT_SYSTEM,))
        # A wrong name shows before a machine is measured.
        found = {name.lower(): system_preset(name) for name in names if name.lower() != HERE}
        found |= {HERE: MachineOptions(system=HERE).machine()} if HERE in map(str.lower, names) else {}
        every = [found[name] for name in dict.fromkeys(map(str.lower, names))] + files
        if twice := [name for name, count in Counter(each.name for each in every).items() if count > 1]:
            raise UserError(f"two machines are called {twice[0]!r}: their lines would be one; change name in a file")
        return every


@click.group(epilog=DOMAIN)
def command() -> None:
    """Pictures of predictions: a roofline, what steps are made of, scaling curves, and when communication takes over.

    They need matplotlib, of the extra `writeup`.
    """


@command.command("roofline")
@request_options
@out_option
def roofline_command(out: Path, **given: Any) -> None:
    """The operators of one block and of the head: FLOPs per byte, and FLOP/s, under the machine's roof."""
    check_path(out)
    request = take_request(given)
    _warn([request])
    figure = roofline.draw(request.config, request.plan, request.seq, request.system, request.constants)
    _write(figure, out)


@command.command("breakdown")
@request_options
@click.option(
    "--compare",
    multiple=True,
    help="A bar for another plan: the options in which it differs, as in --compare '--tp 4 --pp 16'. May be repeated.",
)
@click.option("--published", help="Draw the published runs whose names in `validate` begin so, instead of a plan.")
@out_option
def breakdown_command(out: Path, compare: tuple[str, ...], published: str | None, **given: Any) -> None:
    """Parts of a step, a bar for each plan. With --out alone: the runs of arXiv:2205.05198, table 5."""
    check_path(out)
    context = click.get_current_context()
    asked = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if published and set(asked) > {"out", "published"}:
        raise UserError("--published draws runs as they were: leave out the options of a plan")
    if published or asked == ["out"]:
        _write(breakdown.draw(breakdown.published(published or breakdown.KORTHIKANTI)), out)
        return
    requests = {"as asked": take_request(dict(given))}
    requests |= {" ".join(text.replace("--", "").split()): _variant(given, text) for text in compare}
    _warn(requests.values())
    _write(breakdown.draw([breakdown.Bar(name, request.step()) for name, request in requests.items()]), out)


@command.command("scaling")
@out_option
@options(ScalingOptions)
@options(MachineOptions)
@options(ConstantOptions)
@options(ModelOptions)
def scaling_command(out: Path, **given: Any) -> None:
    """MFU and tokens per second by number of accelerators: strong and weak, of the best plan and of fixed ones."""
    check_path(out)
    model, system, asked, file = (
        take(each, given) for each in (ModelOptions, MachineOptions, ScalingOptions, ConstantOptions)
    )
    counts = _doubled(asked.least, asked.most)
    config, machine = model.model_config(), system.machine()
    base = Plan(zero=asked.zero, cp=asked.cp, ep=asked.ep, global_batch=asked.ep, overlap=machine.overlap)
    constants = constants_for(machine, file.constants)
    study = scaling.Study(config, config.context_length, machine, base, constants)
    _write(scaling.draw(study, counts, asked.batch_size, asked.per_gpu, [_pair(text) for text in asked.fixed]), out)


@command.command("degrees")
@out_option
@options(DegreesOptions)
@options(ConstantOptions)
@options(ModelOptions)
def degrees_command(out: Path, **given: Any) -> None:
    """The share of time that tensor, context, data (ZeRO 3) and expert parallelism send, over the degree of each."""
    check_path(out)
    model, asked, file = (take(each, given) for each in (ModelOptions, DegreesOptions, ConstantOptions))
    if asked.most & (asked.most - 1):
        raise UserError(f"--most {asked.most} is not a power of two: take {1 << asked.most.bit_length() - 1}")
    config, systems = model.model_config(), asked.machines()
    constants = [constants_for(each, file.constants) for each in systems]
    batch = asked.batch_size or asked.most
    _write(degrees.draw(config, config.context_length, systems, asked.most, batch, constants), out)


@command.command("all")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False, exists=True), help="The pictures' folder."
)
def all_command(out: Path) -> None:
    """One example of each, as cost-NAME.svg in a folder, with the options that made it."""
    for name, text in EXAMPLES.items():
        path = out / f"cost-{name}.svg"
        check_path(path)
        click.echo(printable(f"plot {name} {text}".rstrip()))
        command.commands[name].main([*shlex.split(text), "--out", str(path)], standalone_mode=False)


def _write(figure: Any, out: Path) -> None:
    click.echo(printable(f"plot in {save(figure, out)}"))


def _warn(requests: Iterable[Request]) -> None:
    """Print on stderr each warning about the predictions once."""
    lines = [line for r in requests for line in r.warnings()]
    for line in dict.fromkeys(lines):
        click.echo(printable(f"note: {line}"), err=True)


def _variant(given: dict[str, Any], text: str) -> Request:
    """The request with some options changed. Raises UserError, naming them, for what cannot be read or does not
    divide."""
    reader = click.command("--compare")(request_options(lambda **_: None))
    try:
        changed = reader.make_context("--compare", shlex.split(text), default_map=given).params
        return take_request(changed)
    except (click.ClickException, ValueError, UserError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise UserError(f"--compare {text!r}: {message}") from error


def _pair(text: str) -> tuple[int, int]:
    tp, times, pp = text.partition("x")
    if not (times and tp.isdecimal() and pp.isdecimal() and int(tp) and int(pp)):
        raise UserError(f"--fixed {text!r} should be tp x pp, such as 8x1")
    return int(tp), int(pp)


def _doubled(least: int, most: int) -> list[int]:
    if least > most:
        raise UserError(f"--least {least} is more than --most {most}")
    return [least << k for k in range((most // least).bit_length())]
