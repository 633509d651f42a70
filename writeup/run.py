"""Measure all benchmarks that the chapters cite and this machine can run, before the write-up is made."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.all import measure_here
from benchmarks.lib.running import AllSettings
from benchmarks.records import machine_name
from cs336_systems.errors import UserError
from cs336_systems.host.machine import choose_device
from cs336_systems.host.text import printable


def run_all(only: Iterable[str], results: Path, machine: str | None) -> str:
    """Run the benchmarks, all or those named, and return the name of the folder that their records are in.

    Raises UserError for a name that no benchmark has, for another machine than this one, and if all failed.
    """
    folder = own_folder(machine)
    outcomes = measure_here(AllSettings(only=tuple(only), results=results / folder))
    if not any(done.status in ("ok", "measured before") for done in outcomes):
        raise UserError("no benchmark could be run, so there is nothing new; python -m writeup reports what was there")
    return folder


def own_folder(machine: str | None) -> str:
    """The name of this machine's records. Raises UserError if another machine is asked for."""
    own = machine_name(choose_device(None))
    if machine and machine.lower() not in own:
        raise UserError(f"--run measures this machine, whose records are in {own}, not {printable(machine)}")
    return own
