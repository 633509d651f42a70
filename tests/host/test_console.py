"""Readable numbers, options from a dataclass, progress, and the exit status."""

import atexit
import gc
import itertools
import re
import shutil
import sys
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
from cs336_systems.host.console import (
    format_bytes,
    format_count,
    format_seconds,
    options,
    progress,
    run_command,
    setting,
)

ROOT = Path(__file__).resolve().parents[2]


def test_numbers_are_readable():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**20 - 1, 5 * 2**30, 3 * 2**40)] == [
        "0 B", "1023 B", "1.5 KiB", "1.0 MiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert [format_count(n) for n in (7, 92_700_000, 1.49e9, 2e15)] == ["7", "92.7 M", "1.49 G", "2 P"]
    assert [format_count(n, billion="B") for n in (1.49e9, 999_600)] == ["1.49 B", "1 M"]
    assert [format_seconds(s) for s in (0.0012, 59.94, 75, 7260)] == ["1.2 ms", "59.9 s", "1 min 15 s", "2 h 1 min"]
    hour = 3600
    long = (47 * hour, 49 * hour, 600 * 24 * hour, 800 * 24 * hour, 18_371_493 * hour)
    assert [format_seconds(s) for s in long] == ["47 h 0 min", "2.0 days", "600.0 days", "2.2 years", "2,095.8 years"]
    assert [format_seconds(s) for s in (0.9996, 59.96, 119.6, 3599.7)] == [
        "1.0 s",
        "1 min 0 s",
        "2 min 0 s",
        "1 h 0 min",
    ]
    assert [format_seconds(float(s)) for s in ("inf", "nan")] == ["inf years", "nan years"]


@dataclass(frozen=True)
class Settings:
    count: int = setting(3, "A number.")
    kind: Literal["a", "b"] | None = setting(None, "A choice.")
    loud: bool = setting(False, "A flag.")
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
    assert run_command(command, ["--kind", "b", "--loud", "--names", "x", "--names", "y"]) == 0
    assert capsys.readouterr().out == "Settings(count=3, kind='b', loud=True, names=('x', 'y'), internal=0)\n"
    assert run_command(command, []) == 0
    assert capsys.readouterr().out == f"{Settings()}\n"


def test_infinite_numbers_are_refused(capsys):
    @dataclass(frozen=True)
    class Some:
        rate: float = setting(1.0, "A rate.")
        share: float | None = setting(None, "A share.", click.FloatRange(min=0))

    ran = []
    command = click.command()(options(Some)(lambda **given: ran.append(given)))
    for name, value in itertools.product(("--rate", "--share"), ("inf", "nan", "1e999")):
        assert run_command(command, [name, value]) == 2
        shown = "nan" if value == "nan" else "inf"
        assert capsys.readouterr().err == f"error: Invalid value for '{name}': {shown} is not a finite number.\n"
    assert run_command(command, ["--rate", "1e30"]) == 0
    assert ran == [{"rate": 1e30, "share": None}]


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["--count", "13"], 2, "error: thirteen is refused\n"),
        (["--count", "x"], 2, "error: Invalid value for '--count': 'x' is not a valid integer.\n"),
        (["--kind", "c"], 2, "error: Invalid value for '--kind': 'c' is not one of 'a', 'b'.\n"),
        (["--count", "15"], 130, "interrupted\n"),
    ],
)
def test_a_users_error_is_one_line(arguments, status, error, capsys):
    assert run_command(command, arguments) == status
    assert capsys.readouterr().err.lstrip("\n") == error


def test_an_error_of_the_system_may_have_no_number():
    with pytest.raises(UserError, match="cannot copy x: the same file"), console.os_errors("copy x"):
        raise shutil.SameFileError("the same file")


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ValueError, match="a defect"):
        run_command(command, ["--count", "14"])


def test_only_the_command_of_a_process_ends_without_a_search_for_garbage(monkeypatch):
    frozen, at_exit = [], []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(atexit, "register", at_exit.append)
    assert run_command(command, ["--count", "13"]) == 2
    assert not frozen + at_exit, "what a caller leaves behind is to be collected"
    monkeypatch.setattr(sys, "argv", ["name", "--count", "13"])
    assert run_command(command) == 2
    assert (frozen, at_exit) == ([True], [gc.freeze])


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
    start = counter.start
    monkeypatch.setattr(console.time, "monotonic", lambda: start + 10.0)
    assert str(counter) == "30.0 s left"
    counter.advance()  # one step took 10 s: three are left
    assert str(counter) == "30.0 s left"
    monkeypatch.setattr(console.time, "monotonic", lambda: start + 15.0)
    assert str(counter) == "25.0 s left"
    monkeypatch.setattr(console.time, "monotonic", lambda: start + 500.0)
    assert str(counter) == "0 ms left"


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
