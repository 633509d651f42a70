"""Records: one JSON line per measurement. Reports read only these, and measure nothing."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.load import busy, note_if_busy
from cs336_systems.host.machine import device_name
from cs336_systems.host.text import printable, regular, strict_json

SCHEMA = 1
RESULTS = Path(__file__).resolve().parent / "results"  # the committed records, by machine
Status = Literal["ok", "out-of-memory", "unsupported"]
KINDS = {"benchmark": str, "config": dict, "environment": dict, "samples_ms": list, "metrics": dict}
KINDS |= {"predicted": dict, "flags": list}
unwritten: dict[Path, list[str]] = {}  # reasons, by file, until `appended` tells them


@dataclass(frozen=True)
class Record:
    """One measurement, or the fact that there is none: `status` then says why and `samples_ms` is empty.

    All samples are kept, in milliseconds and in order. `predicted` has the analytic model's figures under the names of
    `metrics`; `flags` has what makes the figures suspect, in words.
    """

    benchmark: str
    config: dict[str, Any]
    environment: dict[str, Any]
    samples_ms: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    status: Status = "ok"
    schema: int = SCHEMA


def machine_name(device: torch.device, override: str | None = None) -> str:
    """The folder of this machine's records: the device's name in lower case, `amd-epyc` or `nvidia-h200`."""
    name = override or device_name(device)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def open_records(folder: Path, benchmark: str) -> Path:
    """The file `folder`/<benchmark>.jsonl, made if needed, before anything is measured. Says if the machine is
    too busy. Raises UserError where it cannot be written.
    """
    say_once()
    path = folder / f"{benchmark}.jsonl"
    with os_errors(f"write {path}", "name another folder with --results DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    return path


say_once = cache(note_if_busy)


def append_record(record: Record, path: Path) -> Record:
    """Append one line, whole or not at all: the record, which gets a flag if the machine was busy at the start. A full
    disk does not end the measurement: `appended`, which comes after the table, raises for it. Not-a-number is refused,
    since JSON has none."""
    record = replace(record, flags=[*record.flags, *filter(None, [busy()])])
    line, size = json.dumps(asdict(record), allow_nan=False), path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            print(line, file=file)
    except OSError as error:
        unwritten.setdefault(path, []).append(error.strerror or str(error))
        with suppress(OSError):  # half a line would spoil the file
            os.truncate(path, size)
    return record


def appended(count: int, path: Path) -> str:
    """Line to print about `count` new records, after the table. Raises UserError if some could not be written."""
    if lost := unwritten.pop(path, []):
        missing = f"{len(lost)} record{'s' * (len(lost) > 1)} could not be appended to {path}: {lost[0]}; the figures"
        raise UserError(f"{missing} are in the table alone; next time name another folder with --results DIR")

    return printable(f"{count} record{'s' * (count != 1)} appended to {path}")


def read_records(path: Path) -> list[Record]:
    """Newest record of each configuration in one file, oldest configuration first. Raises as `every_record` does."""
    newest = {json.dumps(each.config, sort_keys=True, allow_nan=False): each for each in every_record(path)}
    return list(newest.values())


def every_record(path: Path) -> list[Record]:
    """All records of one file, oldest first.

    Raises UserError for a file that cannot be read and a line that is no record of this schema.
    """
    found = []
    try:
        with os_errors(f"read {path}"):
            lines = regular(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} has no records: it is not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = _record(strict_json(line))
        except (ValueError, KeyError, TypeError) as error:
            what = f"misses {error}" if isinstance(error, KeyError) else f"is no record: {error}"
            raise UserError(f"{path}:{number} {what}") from None
        found.append(record)
    return found


@contextmanager
def shown(path: Path | str, wrong: str = "a record in {} lacks or garbles a field that is shown") -> Iterator[None]:
    """Raise UserError inside the block for records under a path whose fields are of other types than a table shows;
    `wrong` says so of other files."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{wrong.format(path)}: {error!r:.100}") from error


def _record(fields: Any) -> Record:
    if fields["schema"] != SCHEMA:
        raise ValueError(f"it has schema {fields['schema']}, this version reads {SCHEMA}")
    record = Record(**fields)
    for name, kind in KINDS.items():
        if not isinstance(getattr(record, name), kind):
            raise TypeError(f"its {name} is a {type(getattr(record, name)).__name__}, not a {kind.__name__}")
    if record.status not in get_args(Status):
        raise ValueError(f"its status is {record.status!r}, none of {', '.join(get_args(Status))}")
    if not all(type(each) in (int, float) for each in record.samples_ms):
        raise TypeError("its samples_ms are not all numbers")
    if "device" not in record.environment:
        raise KeyError("device")  # without it a figure cannot be attributed
    return record
