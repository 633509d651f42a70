"""The list of commands, the command that runs one, and runs in a folder that has folders of the same names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mixed_precision
from benchmarks.lib.options import RecordOptions
from cs336_systems import __main__ as commands
from cs336_systems.comm.launch import run_ranks
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors, run_command
from cs336_systems.host.machine import choose_device

ROOT = Path(__file__).resolve().parents[1]


def test_all_commands_are_listed(capsys):
    assert run_command(commands.command, []) == 0
    shown = capsys.readouterr().out
    for name in ("cs336_systems.train ", "cs336_systems.cost ", "benchmarks.e2e ", "writeup "):
        assert f"\n{name}" in shown
    found = commands.commands()
    assert len(found) > 25
    assert all(len(line) > 10 and "`python" not in line[1:] for line in found.values())


def test_a_command_is_run_by_its_name(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cs336"])
    monkeypatch.delitem(sys.modules, "cs336_systems.checkpoint.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        run_command(commands.command, ["checkpoint", "show", "nowhere"])
    assert ended.value.code == 2
    assert "nowhere is no checkpoint, and there is none in it" in capsys.readouterr().err
    assert run_command(commands.command, ["trane"]) == 2
    assert capsys.readouterr().err == "error: there is no command trane: `python -m cs336_systems` lists them\n"


@pytest.mark.parametrize(
    ("folder", "command", "code"),
    [
        ("kernels", "-m cs336_systems.cost --help", 2),
        ("cs336_systems", "-m benchmarks.e2e --help", 2),
        ("kernels", "-c from+cs336_systems.presets+import+preset", 1),
    ],
)
def test_a_folder_of_the_same_name_is_named_in_one_line(tmp_path, folder, command, code):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").touch()
    words = [sys.executable, *(word.replace("+", " ") for word in command.split())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    *before, line = done.stderr.splitlines()
    assert f"`{folder}` is found in {tmp_path / folder}, and that is not the package of this name beside " in line
    assert line.endswith(": rename that folder, or start from another one")
    assert not before or code == 1


def test_records_go_to_the_current_folder(in_tmp):
    folder = RecordOptions(machine="Some GPU").records_folder(choose_device("cpu"))
    assert folder == Path("runs/results/some-gpu")
    assert RecordOptions(results=Path("there")).records_folder(choose_device("cpu")) == Path("there")
    assert run_command(mixed_precision.main, ["accumulation"]) == 0
    (written,) = in_tmp.rglob("*.jsonl")
    assert written.relative_to(in_tmp).parts[:2] == ("runs", "results")
    assert json.loads(written.read_text().splitlines()[0])["benchmark"] == "mixed_precision"


UNREAD = """
import click
from cs336_systems.host import console
@click.command()
@click.argument("ranks", type=int)
def main(ranks):
    if ranks == 1:
        return print("no more")
    from cs336_systems.comm.launch import start_ranks
    start_ranks(lambda place: console.console().print(place), "cpu", ranks)
raise SystemExit(console.run_command(main))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_output_that_nobody_reads_ends_a_command_without_a_word(ranks):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", UNREAD, str(ranks)]
    late = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # written at the end only
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=late, timeout=600, check=False, text=True
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def write_to_a_closed_pipe(place) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")


def test_a_broken_pipe_that_is_not_the_outputs_is_said():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 ended with exit code 1.*_closed_pipe.*BrokenPipeError"):
        run_ranks(write_to_a_closed_pipe, 1, "cpu")
    with pytest.raises(UserError, match="cannot write it: Broken pipe"), os_errors("write it"):
        write_to_a_closed_pipe(None)
