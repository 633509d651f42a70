"""Check of a printed command: its module exists, and it takes these options and arguments."""

import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import click

from cs336_systems.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
TORCHRUN = {"--standalone": 0, "--nproc-per-node": 1, "--nnodes": 1, "--node-rank": 1, "--master-addr": 1}
TORCHRUN |= {"--master-port": 1}  # of its options those that the pages use, and how many words follow


def problem_of(line: str) -> str | None:
    """Why a command cannot run as printed, or None. Nothing is run."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["python", "-m"] or words[:1] == ["torchrun"]:
        return _problem_of_python(words[1:] if words[0] == "python" else _after_torchrun(words[1:]))
    if words[0] == "python":
        return _problem_of_python(words[1:])
    if words[0] == "make":
        return next((f"make has no target {word}" for word in words[1:] if word not in TARGETS), None)
    if words[0] == "sbatch":
        file = next((word for word in words[1:] if not word.startswith("-")), "")
        return None if (ROOT / file).is_file() else f"{file!r} is no file"
    return f"{words[0]} is no program that is known here"


def _after_torchrun(words: list[str]) -> list[str]:
    """The command that torchrun is to run."""
    while words and words[0] in TORCHRUN:
        words = words[1 + TORCHRUN[words[0]] :]
    return words


def _problem_of_python(words: list[str]) -> str | None:
    """Of `-m MODULE ...` or `FILE ...`."""
    if not words:
        return "nothing is to be run"
    if words[0] == "-m":
        module, rest = words[1], words[2:]
    elif (ROOT / words[0]).is_file():
        module, rest = words[0].removesuffix(".py").replace("/", "."), words[1:]
    else:
        return f"{words[0]} is no file"
    if module in ("pytest", "pip"):
        files = [word.split("::")[0] for word in rest if word.startswith("tests/")]
        return next((f"{file} is no file" for file in files if not (ROOT / file).is_file()), None)
    try:
        if find_spec(module) is None:
            return f"there is no module {module}"
        if (spec := find_spec(module)) and spec.submodule_search_locations:
            module += ".__main__"
        command = import_module(module).main
    except (ModuleNotFoundError, AttributeError) as error:
        return f"{module}: {error}"
    return _problem_of_options(command, rest) if isinstance(command, click.Command) else None


def _problem_of_options(command: click.Command, words: list[str]) -> str | None:
    """click's error for the words, or nothing."""
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, words = words[0], words[1:]
            found = command.get_command(click.Context(command), name)
            if found is None:
                return f"there is no command {name}"
            command = found
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            context = command.make_context("command", list(words))
    except click.exceptions.Exit:  # of --help
        return None
    except (click.ClickException, UserError) as error:
        return error.format_message() if isinstance(error, click.ClickException) else str(error)
    inner = context.params.get("command")  # what benchmarks.two_nodes runs
    return _problem_of_python(list(inner)) if isinstance(inner, tuple) and inner else None
