"""A measured machine in a file, as `probe` writes it: the System, and the constants of the law that its products obey.

Measuring is another process's work (`cs336_systems.probe_system`): a prediction itself loads no torch.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any, get_args

from cs336_systems.cost.large.efficiency import Constants
from cs336_systems.cost.large.plan import Overlap
from cs336_systems.cost.large.systems import System
from cs336_systems.cost.parallel import Link
from cs336_systems.errors import UserError

HERE = "here"  # the name of this machine where presets have theirs
SECONDS = 20.0  # of a probe
MAY_BE_ZERO = ("start", "host", "call", "wave", "ramp", "hidden", "latency", "touch")


def check_out(path: Path | None) -> None:
    """Raise UserError where a file could not be written, which is better known before minutes of work than after."""
    if path is None:
        return
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "permission denied"
    else:
        return
    raise UserError(f"cannot write {path}: {problem}; name another file with --out")


def write_machine(path: Path, system: System) -> None:
    """Write a machine as JSON. Raises UserError for a file that cannot be written."""
    try:
        path.write_text(json.dumps(asdict(system), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with --out") from None


def read_machine(path: Path) -> System:
    """The machine of a file. Raises UserError for a file that cannot be read, and for a figure that is none."""
    try:
        found = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; `python -m cs336_systems.cost probe --out {path}` makes it"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no machine, which is JSON: {error}") from None
    names = {each.name for each in fields(System)}
    # Files of before machines had it do not say.
    found = {"overlap": System.overlap} | found if isinstance(found, dict) else found
    if not isinstance(found, dict) or set(found) != names:
        raise UserError(f"{path} is no machine: it needs {', '.join(sorted(names))}, as `probe --out` writes them")
    links = {}
    for tier in ("inside", "between"):
        if not isinstance(found[tier], dict) or set(found[tier]) != {"latency", "bandwidth"}:
            raise UserError(f"{path}: {tier} needs latency and bandwidth, not {found[tier]!r}")
        links[tier] = Link(**{name: _figure(path, name, value) for name, value in found[tier].items()})
    if found["overlap"] not in get_args(Overlap):
        raise UserError(f"{path}: overlap must be one of {', '.join(get_args(Overlap))}, not {found['overlap']!r}")
    if not isinstance(found["name"], str):
        raise UserError(f"{path}: name must be text, not {found['name']!r}")
    for name in ("sources", "measured"):
        if not isinstance(found[name], dict):
            raise UserError(f"{path}: {name} must be an object of names and values, not {found[name]!r}")
    whole, words = ("processors", "node"), {"name", "sources", "measured", "overlap"}
    figures = {name: _figure(path, name, found[name]) for name in names - words - set(links)}
    if unknown := set(found["measured"]) - {each.name for each in fields(Constants)}:
        raise UserError(f"{path} measured {', '.join(sorted(unknown))}, which the law does not know")
    measured = {name: _figure(path, name, value) for name, value in found["measured"].items()}
    for name in whole:
        if figures[name] != int(figures[name]):
            raise UserError(f"{path}: {name} must be a whole number above zero, not {found[name]!r}")
    counted: Any = figures | {name: int(figures[name]) for name in whole} | links
    return System(name=found["name"], sources=found["sources"], measured=measured, overlap=found["overlap"], **counted)


def _figure(path: Path, name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        raise UserError(f"{path}: {name} must be a number above zero, not {value!r}")
    return float(value)


def probe_here(budget: float = SECONDS, device: str | None = None) -> System:
    """Measure this machine in about `budget` seconds, with progress on stderr. Raises UserError if it cannot be."""
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        out, errors = Path(folder, "machine.json"), Path(folder, "error.txt")
        command = [sys.executable, "-m", "cs336_systems.probe_system", "--out", str(out), "--budget", f"{budget}"]
        command += ["--errors", str(errors), *(["--device", device] if device else [])]
        done = subprocess.run(command, check=False)
        if errors.exists():
            raise UserError(errors.read_text())
        if done.returncode or not out.exists():
            raise UserError(f"this machine could not be measured: the probe ended with exit code {done.returncode}")
        return read_machine(out)
