"""`python -m cs336_systems.cost fit FILE...`: the model's constants from measured times, and how far to trust them."""

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from cs336_systems.cost.commands.output import new_table
from cs336_systems.cost.fitting.calibration import NOISE, TOLD, WIDTH, Calibration, fit, mean_error, worst_error
from cs336_systems.cost.fitting.logged_runs import LogOptions
from cs336_systems.cost.fitting.observations import WHAT, Observation, What, log_ratio, read_measured
from cs336_systems.cost.machines import CONSTANTS, NAMES, check_out, load_constants, save_constants
from cs336_systems.cost.options import MachineOptions, ModelOptions, PlanOptions, take
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds, options, setting

SHOWN = 5  # names in a line
FAR = 2.0  # times too long or too short: beyond what constants explain


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit`: constants to fit, runs to fit to, and the prior."""

    only: str | None = setting(None, f"Constants to fit, of {', '.join(NAMES)}.  [default: all]")
    use: tuple[What, ...] = setting(
        (), "What to fit to; may be repeated.  [default: all but optimizer]", type=click.Choice(WHAT)
    )
    leave_out: tuple[str, ...] = setting(
        (), "Runs of this name, in which * is anything, are predicted, not fitted to; may be repeated."
    )
    width: float = setting(
        WIDTH, "Prior: standard deviation of the logarithm of a constant.", type=click.FloatRange(0, min_open=True)
    )
    noise: float = setting(
        NOISE, "Relative error that is expected even of good constants.", type=click.FloatRange(0, min_open=True)
    )
    constants: Path | None = setting(None, "Start from the constants in this file.", type=click.Path(path_type=Path))
    out: Path | None = setting(None, "File to write the constants to.", type=click.Path(path_type=Path))


@click.command("fit")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@options(FitOptions)
@options(MachineOptions)
@options(ModelOptions)
@options(PlanOptions)
@click.pass_context
def command(context: click.Context, /, files: tuple[Path, ...], **kwargs: Any) -> None:
    """Fit the model's constants to FILES: logs of Megatron-LM, lists of runs (.json), this project's records (.jsonl).

    No log names its machine: give --system. Options of model and plan say what a log does not, and count for more.
    """
    asked: FitOptions = take(FitOptions, kwargs)
    check_out(asked.out)
    given = _given(context, kwargs)
    measured = given.system.measured if given.system else {}
    prior = load_constants(asked.constants) if asked.constants else replace(CONSTANTS, **measured)
    use = asked.use or tuple(what for what in WHAT if what != "optimizer")
    found = [each for file in files for each in read_measured(file, given) if each.what in use]
    names = dict.fromkeys(each.id for each in found)
    if missing := [pattern for pattern in asked.leave_out if not fnmatch.filter(names, pattern)]:
        raise UserError(f"--leave-out {missing[0]!r} is no run's name: {', '.join(names)}")
    apart = [each for each in found if any(fnmatch.fnmatch(each.id, pattern) for pattern in asked.leave_out)]
    which = (asked.only or "").replace(",", " ").split() or NAMES
    fitted = [each for each in found if each not in apart]
    result = fit(fitted, prior, which, asked.width, asked.noise)
    screen = console.console()
    for line in described(found):
        screen.print(line, soft_wrap=True)
    screen.print(constants_table(result))
    screen.print(observations_table(result, fitted, apart))
    for line in summary(result, fitted, apart):
        screen.print(line, soft_wrap=True)
    if asked.out:
        save_constants(asked.out, result.constants, _about(result, fitted))
        screen.print(f"{asked.out}: give it to the other commands with --constants", soft_wrap=True)


def _given(context: click.Context, kwargs: dict[str, Any]) -> LogOptions:
    """Options given on the command line, without defaults."""
    named = {name for name in kwargs if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    system, model, plan = (take(each, kwargs) for each in (MachineOptions, ModelOptions, PlanOptions))
    said = {name: value for part in (model, plan) for name, value in asdict(part).items() if name in named}
    known = bool(named & {"size", "d_model"})
    return LogOptions(
        system.machine() if named & {each.name for each in fields(MachineOptions)} else None,
        model.vocab_size,
        model.model_config() if known else None,
        plan.plan() if known else None,
        said,
    )


def described(found: Sequence[Observation]) -> list[str]:
    """Machines of the runs, and assumptions made of them, equal ones together."""
    machines = dict.fromkeys(each.machine for each in found)
    notes: dict[str, dict[str, None]] = {}
    for each in found:
        for note in each.notes:
            notes.setdefault(note, {})[each.id] = None
    lines = [f"machine: {', '.join(machines)}"]
    return [*lines, *(f"taken of {_names(list(ids))}: {note}" for note, ids in notes.items())]


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def constants_table(result: Calibration) -> Table:
    """Each constant before and after, how sure it is, and what made it so."""
    table = new_table(["", "before", "after", "±", "from the data", "<source"], title="Constants")
    for name in NAMES:
        before, after = getattr(result.prior, name), getattr(result.constants, name)
        if name not in result.which:
            kept = "kept: zero, and a fit changes by factors" if name in result.zeros else "kept"
            table.add_row(name, _value(before), "", "", "", kept)
            continue
        share = result.determined(name)
        source = "the data" if share > 1 - TOLD else "data and prior" if share > TOLD else "prior: the data do not say"
        sure = f"{exp(result.deviation[name]) - 1:.0%}"
        table.add_row(name, _value(before), _value(after), sure, f"{share:.0%}", source)
    return table


def observations_table(result: Calibration, fitted: Sequence[Observation], apart: Sequence[Observation]) -> Table:
    """Each measured time, and how far the predictions are off."""
    columns = ["~run", "<what", "measured", "before", "after", "if left out"]
    table = new_table(columns, title="Predicted against measured")
    rows = zip(fitted, result.before, result.after, result.left_out, strict=True)
    for each, *logs in rows:
        table.add_row(each.id, each.what, format_seconds(each.seconds), *map(_error, logs))
    for each in apart:
        before, after = (log_ratio(each, constants) for constants in (result.prior, result.constants))
        table.add_row(each.id, each.what, format_seconds(each.seconds), _error(before), "", _error(after))
    return table


def summary(result: Calibration, fitted: Sequence[Observation], apart: Sequence[Observation]) -> list[str]:
    """Mean and worst errors, and what is beyond the model."""
    ways = [("before", result.before), ("after", result.after), ("if each is left out", result.left_out)]
    if apart:
        ways.append((f"of the {len(apart)} left out", [log_ratio(each, result.constants) for each in apart]))
    errors = (f"{mean_error(logs):.1%} {name} (worst {worst_error(logs):.0%})" for name, logs in ways)
    lines = [f"mean error over {len(fitted)}: {', '.join(errors)}"]
    if result.noise > NOISE and len(fitted) > 1:
        lines.append(f"the data scatter about the fit by {result.noise:.0%}, from which the uncertainties follow")
    far = [each for each, log in zip(fitted, result.after, strict=True) if not 1 / FAR < exp(log) < FAR]
    if far:
        names = _names([f"{each.id} ({each.what})" for each in far])
        lines.append(
            f"off by more than a factor of {FAR:g}, which no constant explains: {names}; "
            "leave out with --leave-out what the model does not describe"
        )
    if result.zeros:
        lines.append(f"kept at zero, since a fit changes constants by factors: {', '.join(result.zeros)}")
    if above := result.impossible():
        values = ", ".join(f"{name} {value:.3g}" for name, value in above.items())
        lines.append(
            f"warning: {values}: a share above 1 is more than the machine can do, so the machine is another one, the "
            "file is misread, or the model counts work that was not done; do not predict with these constants"
        )
    return lines


def _value(value: float) -> str:
    return f"{value * 1e6:.3g} us" if 0 < value < 1e-3 else f"{value:.3g}"


def _error(log: float) -> str:
    return f"{exp(log) - 1:+.1%}"


def _about(result: Calibration, fitted: Sequence[Observation]) -> dict[str, Any]:
    rows = zip(fitted, result.after, strict=True)
    return {
        "fitted": list(result.which),
        "prior": asdict(result.prior),
        "relative_uncertainty": {name: exp(each) - 1 for name, each in result.deviation.items()},
        "from_the_data": {name: result.determined(name) for name in result.which},
        "to": [
            {"id": each.id, "what": each.what, "measured_s": each.seconds, "predicted_s": each.seconds * exp(log)}
            for each, log in rows
        ],
    }
