"""Run a function on several ranks: `run(case, 2, width=4)` forks them from a warm server and returns their results.

A case is a function at the top of a module, `case(group, **arguments)`, which asserts and returns what JSON can hold.
"""

import atexit
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cs336_systems.host.machine import allowed_cores

TIMEOUT = 60.0  # seconds of a case; a busy machine is slow
COLLECTIVE_TIMEOUT = 20.0  # seconds that a rank waits for the others


def patience(seconds: float) -> float:
    """How long a rank waits for another one: in proportion on a busy machine, where a rank is late that is right."""
    return seconds * max(1.0, os.getloadavg()[0] / allowed_cores())


class RanksFailedError(AssertionError):
    """Errors of the ranks that failed; `errors` has (type, message) or None by rank."""

    def __init__(self, replies: list[dict]) -> None:
        self.errors = [tuple(reply["error"][:2]) if "error" in reply else None for reply in replies]
        self.codes = [reply["code"] for reply in replies]
        parts = []
        for rank, reply in enumerate(replies):
            if reply["code"]:
                detail = reply["error"][2] if "error" in reply else reply["output"][-2000:]
                parts.append(f"rank {rank} ended with {reply['code']}:\n{detail}")
        super().__init__("\n".join(parts))


@cache
def server() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rank_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    atexit.register(stop, process)
    assert answer(process, 120) == "ready\n"
    return process


def stop(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def answer(process: subprocess.Popen, timeout: float) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout):
            process.kill()
            raise TimeoutError(f"the rank server said nothing for {timeout} s")
    return process.stdout.readline()


def ask(
    function: Callable,
    world_size: int,
    join: bool,
    timeout: float,
    collective: float,
    arguments: dict,
    backend: str | None = None,
) -> list:
    request = {
        "function": f"{function.__module__}:{function.__name__}",
        "world_size": world_size,
        "timeout": timeout,
        "collective_timeout": collective,
        "join": join,
        "backend": backend,
        "arguments": arguments,
    }
    process = server()
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    replies = json.loads(answer(process, timeout + 30))
    if any(reply["code"] for reply in replies):
        raise RanksFailedError(replies)
    return [reply["result"] for reply in replies]


def run(function: Callable, world_size: int, **arguments: Any) -> list:
    """Every rank's result of `function(group, **arguments)`. Raises RanksFailedError."""
    return ask(function, world_size, True, TIMEOUT, COLLECTIVE_TIMEOUT, arguments)


def run_on_gloo(function: Callable, world_size: int, **arguments: Any) -> list:
    """As `run`, where ranks of one machine would share memory otherwise."""
    return ask(function, world_size, True, TIMEOUT, COLLECTIVE_TIMEOUT, arguments, "gloo")


def run_failing(
    function: Callable, world_size: int, collective_timeout: float = 1.0, **arguments: Any
) -> list[tuple[str, str] | None]:
    """Every rank's (type, message) where some are to fail, waiting for each other no longer than the timeout."""
    try:
        ask(function, world_size, True, TIMEOUT, collective_timeout, arguments)
    except RanksFailedError as error:
        if not any(error.errors):
            raise
        return error.errors
    raise AssertionError("no rank failed")


def run_alone(function: Callable, world_size: int, **arguments: Any) -> list:
    """As `run`, for `function(rank, world_size, folder, **arguments)`, which joins the others by itself or never."""
    return ask(function, world_size, False, TIMEOUT, COLLECTIVE_TIMEOUT, arguments)
