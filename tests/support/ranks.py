"""Run a function on several ranks: `run(case, 2, width=4)` forks them from a warm server and returns their results.

A case is a function at the top of a module, `case(group, **arguments)`, which asserts and returns what JSON can hold.
"""

import atexit
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any, TextIO

from cs336_systems.host.machine import allowed_cores
from tests.support.leftovers import MARK, ROOT

TIMEOUT = 60.0  # seconds of a case; a busy machine is slow
COLLECTIVE_TIMEOUT = 20.0  # seconds that a rank waits for the others


def patience(seconds: float) -> float:
    """Seconds to wait for a rank: in proportion on a busy machine, where a rank that is right is late."""
    return round(seconds * max(1.0, os.getloadavg()[0] / allowed_cores()), 1)


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


class Server:
    """A server of ranks of this process alone, forked from the one that the run's first worker starts, which has
    imported everything once for all of them."""

    def __init__(self) -> None:
        name, self.starter = os.environ.get(MARK, f"ranks of {os.getpid()}"), None
        folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)  # one worker after another
        try:
            if not self.connect(name):  # nobody has started it, or who did has ended
                command = [sys.executable, "-m", "tests.support.rank_server", name]
                self.starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
                require_answer(self.starter.stdout, self.starter.pid, patience(120))
                assert self.starter.stdout.readline() == "ready\n"
                assert self.connect(name)
        finally:
            os.close(folder)

    def connect(self, name: str) -> bool:
        """False if nobody listens."""
        self.connection = socket.socket(socket.AF_UNIX)
        self.stream = self.connection.makefile("rw")
        try:
            self.connection.connect(f"\0{name}")
            self.pid = int(self.stream.readline())
        except (OSError, ValueError):
            self.close()
            return False
        return True

    def close(self) -> None:
        self.stream.close()
        self.connection.close()

    def stop(self) -> None:
        """End it; what other workers' servers were forked from ends with the worker that has started it."""
        self.close()
        if self.starter:
            self.starter.kill()
            self.starter.communicate(timeout=10)

    def ask(self, request: dict, timeout: float) -> list[dict]:
        self.stream.write(json.dumps(request) + "\n")
        self.stream.flush()
        require_answer(self.connection, self.pid, timeout)
        return json.loads(self.stream.readline())


@cache
def server() -> Server:
    started = Server()
    atexit.register(started.stop)
    return started


def require_answer(stream: TextIO | socket.socket, pid: int, timeout: float) -> None:
    """Kill a server that says nothing in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(timeout):
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"the rank server said nothing for {timeout} s")


def ask(
    function: Callable,
    world_size: int,
    join: bool,
    timeout: float,
    collective: float,
    arguments: dict,
    backend: str | None = None,
) -> list:
    timeout = patience(timeout)
    request = {
        "function": f"{function.__module__}:{function.__name__}",
        "world_size": world_size,
        "timeout": timeout,
        "collective_timeout": collective,
        "join": join,
        "backend": backend,
        "arguments": arguments,
    }
    replies = server().ask(request, timeout + 30)
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
    """Every rank's (type, message) where some are to fail, waiting for each other no longer than the timeout, in
    proportion on a busy machine: ranks that are right are late to join there."""
    try:
        ask(function, world_size, True, TIMEOUT, patience(collective_timeout), arguments)
    except RanksFailedError as error:
        if not any(error.errors):
            raise
        return error.errors
    raise AssertionError("no rank failed")


def run_alone(function: Callable, world_size: int, **arguments: Any) -> list:
    """As `run`, for `function(rank, world_size, folder, **arguments)`, which joins the others by itself or never."""
    return ask(function, world_size, False, TIMEOUT, COLLECTIVE_TIMEOUT, arguments)
