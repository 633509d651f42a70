"""Fixtures of the cost model's commands."""

import pytest

from cs336_systems.cost import __main__ as cli
from cs336_systems.host.console import run_command


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def go(*arguments: str) -> tuple[int, str, str]:
        status = run_command(cli.main, list(arguments))
        return status, *capsys.readouterr()

    return go


@pytest.fixture
def printed(run):
    """Run a command line that succeeds without a word on stderr: its stdout."""

    def go(*arguments: str) -> str:
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        return out

    return go
