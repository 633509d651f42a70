"""The commands: `python -m cs336_systems` lists them, `cs336 train ...` runs one.

`python -m` looks for modules in the current folder first, where another `cs336_systems` may lie; `cs336` does not.
"""

import ast
import re
import runpy
import sys
from pathlib import Path

import click
from rich.table import Table

from cs336_systems.errors import UserError
from cs336_systems.host import console

PACKAGES = ("cs336_systems", "benchmarks", "writeup")


def commands() -> dict[str, str]:
    """The first words of each module that is a command, by the module's name. Nothing is imported."""
    found, root = {}, Path(__file__).parents[1]
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":' in text and path != Path(__file__):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__main__")
            paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
            found[name] = re.split(r"(?<=\?) `python|: `python", paragraph)[0]
    return found


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    """List the commands, or run one of them."""
    if words[:1] in ((), ("--help",)):
        table = Table.grid(padding=(0, 2))
        for name, line in commands().items():
            table.add_row(name, line)
        out = console.console()
        out.print("Commands, as `python -m NAME` or `cs336 NAME`; `--help` after one lists its options:\n")
        out.print(table)
        return
    fitting = [name for name in commands() if words[0] in (name, name.partition(".")[2])]  # also without its package
    if not fitting:
        raise UserError(f"there is no command {words[0]}: `python -m cs336_systems` lists them")
    sys.argv[:] = ["-m", *words[1:]]  # as Python has it until it has found the module
    runpy.run_module(fitting[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Run this command line."""
    sys.exit(console.run_command(command))


if __name__ == "__main__":
    main()
