"""Options that every benchmark has: the folder of its records, and --smoke, a short test run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import click
import torch
from click.core import ParameterSource

from benchmarks.records import Record, append_record, appended, machine_name, open_records
from cs336_systems.comm.startup import TIMEOUT, Backend
from cs336_systems.errors import UserError
from cs336_systems.host.console import PATIENCE, flag, options, setting
from cs336_systems.host.machine import choose_device

COUNT = click.IntRange(1)


def command(kind: type) -> Callable[[Callable[..., Any]], click.Command]:
    """Decorator that makes a click command of a function whose first argument are settings of a kind, a dataclass: it
    gets an option for each of their fields."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def main(**given: Any) -> None:
            settings = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
            function(settings, **given)

        return click.command()(options(kind)(main))

    return decorate


def refuse_ignored(clashes: Mapping[str, tuple[str, Sequence[str]]]) -> set[str]:
    """The names of the options that were given on the command line. Raises UserError if one of them would be ignored
    beside another; `clashes` are, by that other's name, why and which."""
    line = click.get_current_context()
    given = {name for name in line.params if line.get_parameter_source(name) != ParameterSource.DEFAULT}
    for name, (why, others) in clashes.items():
        for other in given.intersection(others) if name in given else ():
            raise UserError(f"{flag(name)} and {flag(other)} cannot be combined: {flag(name)} {why}; drop one")
    return given


@dataclass
class Recorder:
    """The records of one command so far; each is written at once, unless there is no file."""

    path: Path | None
    records: list[Record] = field(default_factory=list)

    def keep(self, *records: Record) -> None:
        """Append records to the file."""
        for record in records:
            self.records.append(append_record(record, self.path) if self.path else record)

    def tell(self) -> None:
        """Print the number of records and their file, after the table. Raises UserError if some were not written."""
        if self.path:
            print(appended(len(self.records), self.path))


@dataclass(frozen=True)
class RecordOptions:
    """Options of a benchmark that leaves records."""

    results: Path | None = setting(None, "Folder for the records.  [default: runs/results/<machine>]")
    machine: str | None = setting(None, "Name of this machine in the records.  [default: name of its device]")
    commit: str | None = setting(None, "Commit to record, if this copy has no .git folder.")
    smoke: bool = setting(False, "Test run: small and short, writes no record.")

    def records_folder(self, device: torch.device) -> Path:
        """Folder of the records: as chosen, or one of this machine in the current folder."""
        return self.results or Path("runs/results", machine_name(device, self.machine))

    def recorder(self, benchmark: str, device: torch.device) -> Recorder:
        """Make a command's recorder, in a smoke run without a file. Raises UserError if it cannot be written."""
        return Recorder(None if self.smoke else open_records(self.records_folder(device), benchmark))


@dataclass(frozen=True)
class DeviceOptions(RecordOptions):
    """Options of a benchmark that runs on a device."""

    device: Literal["cpu", "cuda"] | None = setting(None, "Device to run on.  [default: cuda if there is one]")

    @property
    def on(self) -> torch.device:
        """The device, of all ranks. Raises UserError for a missing GPU."""
        return choose_device(self.device)


@dataclass(frozen=True)
class RankOptions(DeviceOptions):
    """Options of a benchmark that runs on several ranks."""

    backend: Backend | None = setting(None, "Communication backend.  [default: nccl on cuda, shm or gloo on cpu]")
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
