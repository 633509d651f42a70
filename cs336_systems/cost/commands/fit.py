"""`python -m cs336_systems.cost fit FILE...`: the model's constants from measured times, and how far to trust them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from cs336_systems.cost.commands.request import on_command_line, take
from cs336_systems.cost.commands.settings import FILE, MachineOptions, count
from cs336_systems.cost.fitting.calibration import NOISE, TOLD, Calibration, fit
from cs336_systems.cost.fitting.observations import LogOptions, Observation, read_measured
from cs336_systems.cost.machines import NAMES, Constants, System, check_out, load_constants, write_json
from cs336_systems.cost.runs import summed_up
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.template import new_table, print_page
from cs336_systems.errors import UserError
from cs336_systems.host.console import console, flag, options, setting
from cs336_systems.presets import Attention

SHOWN = 5  # names in a line
FAR = 2.0  # factor, too long or too short, that no constants explain


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit`: constants to fit, where to write them, and what a log may lack."""

    only: str | None = setting(None, f"Constants to fit, of {', '.join(NAMES)}.  [default: all]")
    out: Path | None = setting(None, "File to write the constants to.", type=FILE)
    attention: Attention | None = setting(None, "How attention ran, where a log does not say.")
    vocab_size: int | None = count("Tokens of the vocabulary, where a log does not say.")


@click.command("fit")
@click.argument("files", nargs=-1, required=True, type=FILE)
@options(FitOptions, MachineOptions)
@click.pass_context
def command(context: click.Context, /, files: tuple[Path, ...], **kwargs: Any) -> None:
    """Fit the model's constants to FILES: logs of Megatron-LM, lists of runs (.json), logs of this project (.jsonl).

    No log names its machine: give --system. The fit starts from --constants, or from those of the runs' stack.
    """
    named, asked, machine = on_command_line(context), take(FitOptions, kwargs), take(MachineOptions, kwargs)
    check_out(asked.out)
    if (said := named & {"attention", "vocab_size"}) and all(file.suffix == ".json" for file in files):
        raise UserError(f"{flag(min(said))} is for logs: runs in {files[0]} say it themselves; change it there")
    system = machine.machine() if named & {"system", "machine_file"} else None
    given = LogOptions(system, asked.attention, asked.vocab_size)
    found = [each for file in files for each in read_measured(file, given)]
    if not found:
        raise UserError("there is nothing to fit to: no file has a time that the model predicts")
    result = fit(found, _prior(machine, system, found), (asked.only or "").replace(",", " ").split() or NAMES)
    screen = console()
    tables = {"constants": constants_table(result), "observations": observations_table(result, found)}
    print_page(screen, "fit", summary(result, found), {"notes": _notes(found), **tables})
    if asked.out:
        write_json(asked.out, _record(result, found))
        screen.print(f"{asked.out}: give it to the other commands with --constants", soft_wrap=True)


def _prior(machine: MachineOptions, system: System | None, found: Sequence[Observation]) -> Constants:
    """The constants that a fit starts from: those of a file, of a probe, or of the stack of most runs."""
    if machine.constants:
        return load_constants(machine.constants)
    if system and system.measured:
        return system.constants
    stacks = [each.run.plan.stack for each in found]
    return STACKS[max(stacks, key=stacks.count)].own()


def _notes(found: Sequence[Observation]) -> str:
    """Assumptions about runs, each listed once."""
    notes: dict[str, dict[str, None]] = {}
    for each in found:
        for note in each.run.notes:
            notes.setdefault(note, {})[each.run.id] = None
    return "\n".join(f"taken of {_names(list(ids))}: {note}" for note, ids in notes.items())


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def constants_table(result: Calibration) -> Table:
    """Table of each constant before and after the fit, its uncertainty, and the source that determined it."""

    def shown(value: float) -> str:
        return f"{value * 1e6:.3g} us" if 0 < value < 1e-3 else f"{value:.3g}"

    rows = list[list[Any]]()
    for name in NAMES:
        before, after = getattr(result.prior, name), getattr(result.constants, name)
        if name not in result.which:
            kept = "kept: zero, and a fit changes by factors" if name in result.zeros else "kept"
            rows.append([name, shown(before), "", "", "", kept])
            continue
        share = result.determined(name)
        source = "the data" if share > 1 - TOLD else "data and prior" if share > TOLD else "prior: the data do not say"
        rows.append([name, shown(before), shown(after), exp(result.deviation[name]) - 1, share, source])
    return new_table(["", "before", "after", "±:.0%", "from the data:.0%", "<source"], rows, "Constants")


def observations_table(result: Calibration, fitted: Sequence[Observation]) -> Table:
    """Table of each measured time, and the errors of its predictions."""
    logs = zip(result.before, result.after, result.left_out, strict=True)
    rows = [
        [each.run.id, each.what, each.seconds, *(exp(log) - 1 for log in some)]
        for each, some in zip(fitted, logs, strict=True)
    ]
    columns = ["~run", "<what", "measured:s", "before:+.1%", "after:+.1%", "if left out:+.1%"]
    return new_table(columns, rows, "Predicted against measured")


def summary(result: Calibration, fitted: Sequence[Observation]) -> dict[str, Any]:
    """Machines and stacks of the runs, mean and worst errors, and what is beyond the model."""
    ways = [("before", result.before), ("after", result.after), ("if each is left out", result.left_out)]
    summed = ((name, *summed_up(exp(log) - 1 for log in logs)) for name, logs in ways)
    texts = (f"{size:.1%} {name} (worst {abs(worst):.0%})" for name, size, _, worst in summed)
    stacks = dict.fromkeys(each.run.plan.stack for each in fitted)
    pairs = zip(fitted, result.after, strict=True)
    far = [f"{each.run.id} ({each.what})" for each, log in pairs if not 1 / FAR < exp(log) < FAR]
    return {
        "machines": ", ".join(dict.fromkeys(each.run.system.name for each in fitted)),
        "stacks": ", ".join(stacks) if len(stacks) > 1 else None,
        "count": len(fitted),
        "means": ", ".join(texts),
        "noise": result.noise if result.noise > NOISE and len(fitted) > 1 else None,
        "factor": FAR if far else None,
        "far": _names(far),
        "zeros": ", ".join(result.zeros) or None,
        "impossible": ", ".join(f"{name} {value:.3g}" for name, value in result.impossible().items()) or None,
    }


def _record(result: Calibration, fitted: Sequence[Observation]) -> dict[str, Any]:
    return {
        "constants": asdict(result.constants),
        "fitted": list(result.which),
        "prior": asdict(result.prior),
        "relative_uncertainty": {name: exp(each) - 1 for name, each in result.deviation.items()},
        "from_the_data": {name: result.determined(name) for name in result.which},
        "to": [
            {"id": each.run.id, "what": each.what, "measured_s": each.seconds, "predicted_s": each.seconds * exp(log)}
            for each, log in zip(fitted, result.after, strict=True)
        ],
    }
