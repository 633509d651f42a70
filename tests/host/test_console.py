"""Readable numbers, options from a dataclass, progress, and the exit status."""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import click
import pytest

from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds, progress, run_command, setting

ROOT = Path(__file__).resolve().parents[2]


def test_numbers_are_readable():
    for n, shown in ((0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (3 * 2**40, "3.0 TiB")):
        assert format_bytes(n) == shown
    for n, shown in ((7, "7"), (92_700_000, "92.7 M"), (1.49e9, "1.49 G"), (2e15, "2 P")):
        assert format_count(n) == shown
    assert [format_count(n, billion="B") for n in (1.49e9, 999_600)] == ["1.49 B", "1 M"]
    hour, day = 3600, 24 * 3600
    for seconds, shown in (
        *((0.0012, "1.2 ms"), (0.9996, "1.0 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (75, "1 min 15 s")),
        *((119.6, "2 min 0 s"), (3599.7, "1 h 0 min"), (7260, "2 h 1 min"), (47 * hour, "47 h 0 min")),
        *((49 * hour, "2.0 days"), (600 * day, "600.0 days"), (800 * day, "2.2 years")),
        *((18_371_493 * hour, "2,095.8 years"), (float("inf"), "inf years"), (float("nan"), "nan years")),
    ):
        assert format_seconds(seconds) == shown


@dataclass(frozen=True)
class Settings:
    count: int = setting(3, "A number.")
    kind: Literal["a", "b"] | None = setting(None, "A choice.")
    loud: bool = setting(False, "A flag.")
    rate: float | None = setting(None, "A rate.", click.FloatRange(min=0))
    names: tuple[str, ...] = setting((), "May be repeated.")
    internal: int = 0


@click.command()
@console.options(Settings)
def command(**values):
    if values["count"] == 13:
        raise UserError("thirteen is refused")
    if values["count"] == 14:
        raise ValueError("a defect")
    if values["count"] == 15:
        raise KeyboardInterrupt
    print(Settings(**values))


def test_options_come_from_the_dataclass(capsys):
    for words, wanted in (
        (["--kind", "b", "--loud", "--rate", "1e30", "--names", "x", "--names", "y"],
         Settings(3, "b", True, 1e30, ("x", "y"))),
        ([], Settings()),
    ):  # fmt: skip
        assert run_command(command, words) == 0
        assert capsys.readouterr().out == f"{wanted}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["--count", "13"], 2, "error: thirteen is refused\n"),
        (["--count", "x"], 2, "error: Invalid value for '--count': 'x' is not a valid integer.\n"),
        (["--kind", "c"], 2, "error: Invalid value for '--kind': 'c' is not one of 'a', 'b'.\n"),
        (["--rate", "1e999"], 2, "error: Invalid value for '--rate': inf is not a finite number.\n"),
        (["--count", "15"], 130, "interrupted\n"),
    ],
)
def test_a_users_error_is_one_line(arguments, status, error, capsys):
    assert run_command(command, arguments) == status
    assert capsys.readouterr().err.lstrip("\n") == error
    with pytest.raises(ValueError, match="a defect"):  # which keeps its traceback
        run_command(command, ["--count", "14"])


def test_an_error_of_the_system_may_have_no_number():
    with pytest.raises(UserError, match="cannot copy x: the same file"), console.os_errors("copy x"):
        raise shutil.SameFileError("the same file")


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    with progress("measuring", 4, expected_seconds=9.0) as advance:
        for i in range(4):
            advance(f"note {i}")
    shown = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"measuring [12]/4, [\d.]+ s left  note [01]", shown[0])
    assert shown[-1] == "measuring 4/4  note 3"


def test_progress_on_a_terminal_counts_down_from_what_is_expected(monkeypatch):
    counter = console._TimeLeft(steps=4, expected_seconds=40.0)
    shown, start = [], counter.start
    for seconds in (10, 10, 15, 500):
        monkeypatch.setattr(console.time, "monotonic", lambda seconds=seconds: start + seconds)
        shown.append(str(counter))
        if len(shown) == 1:
            counter.advance()  # one step took 10 s: three are left
    assert shown == ["30.0 s left", "30.0 s left", "25.0 s left", "0 ms left"]


def every_command() -> Iterator[click.Command]:
    """All command lines of the project, those of groups among them."""
    for folder in ("benchmarks", "cs336_systems", "writeup"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "@click.command" in file.read_text() or "@click.group" in file.read_text():
                module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
                todo = [each for each in vars(module).values() if isinstance(each, click.Command)]
                while todo:
                    yield (each := todo.pop())
                    todo += each.commands.values() if isinstance(each, click.Group) else ()


def test_no_command_takes_a_number_that_is_not_finite():
    taken, tried = set(), 0
    for each in every_command():
        for option in each.params:
            for value in ("inf", "nan") if isinstance(option.type, click.types.FloatParamType) else ():
                tried += 1
                with suppress(click.BadParameter, UserError):
                    option.process_value(click.Context(each), value)
                    taken.add((each.callback.__module__, option.name, value))
    assert tried > 50
    assert not taken
