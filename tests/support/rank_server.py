"""A small server that forks ranks for tests: `python -m tests.support.rank_server NAME`. Each process that connects to
the socket of this name is served by a fork of its own: one JSON request a line.

It imports everything heavy but runs no tensor code, so that its children start in milliseconds and may use threads: a
process that once ran a multi-threaded operator hangs its children at their first. Ranks serve cases
one after another, each in a process group of its own; after a case that failed, for one that joins by itself, and once
another module has been imported, they are forked anew.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from cs336_systems.comm import Place, distributed
from tests.support.machine import seed_cpus_alone, use_huge_pages

# Imported once here rather than by every child.
for heavy in ("pytest", "torch._dynamo", "torch.distributed.optim", "torch.utils.checkpoint", "cs336_systems.train"):
    importlib.import_module(heavy)
importlib.import_module("benchmarks.zero")
seed_cpus_alone()


class Rank:
    """A forked child that runs one case after another until one fails or leaves code that it has patched; `pid` and
    `pipe` are the server's ends."""

    def __init__(self, rank: int, others: Iterable["Rank"]) -> None:
        self.pipe, pipe = socket.socketpair()
        self.code: int | None = None  # once it has ended
        self.patched = False
        self.pid = os.fork()
        if self.pid == 0:
            for other in others:  # so that the end of a rank is the end of its pipe
                other.pipe.close()
            self.pipe.close()
            serve_cases(rank, pipe.makefile("rw"))
        pipe.close()

    def ask(self, request: dict, folder: Path) -> None:
        """Begin a case. The answer of a rank that has ended since the last one is its exit code."""
        with suppress(OSError):
            self.pipe.sendall((json.dumps([request, str(folder)]) + "\n").encode())

    def reply(self) -> int:
        """0 at the end of the case that was begun, or the exit code of a child that ended in it."""
        if said := self.pipe.recv(100):
            self.patched = said == b"patched\n"
            return 0
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def end(self) -> None:
        """Kill the child, if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pipe.close()


def serve_cases(rank: int, pipe: TextIO) -> None:
    """A child's life."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the server
    status = 1
    try:
        for line in pipe:
            request, folder = json.loads(line)
            run_rank(request, rank, Path(folder))
            patched = any(names.get(name) is not value for names, name, value in original)
            pipe.write("patched\n" if patched else "done\n")
            pipe.flush()
        status = 0
    finally:
        os._exit(status)


def note_code() -> None:
    """Note what cases may patch in modules imported since the last call: functions and classes of ours, and of the
    modules in OTHERS."""
    for name in sorted(sys.modules.keys() - noted):
        noted.add(name)
        ours = name in OTHERS or name.partition(".")[0] in ("cs336_systems", "benchmarks", "kernels")
        if ours and (module := sys.modules[name]):
            for key, value in list(vars(module).items()):
                if callable(value):
                    original.append((vars(module), key, value))
                # By its type: to ask isinstance of some of torch's old names prints a warning.
                if issubclass(type(value), type) and value.__module__ == name:
                    if issubclass(value, torch.optim.Optimizer):  # torch changes the class with its first instance
                        value._patch_step_function(value.__new__(value))
                    original.extend((vars(value), each, inner) for each, inner in list(vars(value).items()))


OTHERS = ("torch", "torch.distributed", "os", "time", "socket", "shutil", "signal")
original: list[tuple[Mapping[str, object], str, object]] = []  # (names, name, value)
noted: set[str] = set()  # modules


def run_rank(request: dict, rank: int, folder: Path) -> None:
    """Join the others, run the case, and write its result as JSON, or its traceback."""
    world = request["world_size"]
    out = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    try:
        gc.collect()  # wrappers of the case before
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)  # which also poisons fresh memory with NaN
        torch.set_default_dtype(torch.float32)
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        if request["join"]:
            place = Place(rank, world, rank, world, str(folder / "store"))
            with distributed("cpu", request["backend"], request["collective_timeout"], place) as group:
                result = function(group, **request["arguments"])
        else:
            result = function(rank, world, str(folder), **request["arguments"])
        (folder / f"result-{rank}").write_text(json.dumps(result))
    except BaseException as error:
        (folder / f"error-{rank}").write_text(json.dumps([type(error).__name__, str(error), traceback.format_exc()]))
        raise
    finally:
        sys.stdout.flush()  # into this case's file


def end_ranks() -> None:
    """Begin the next case with new ranks."""
    for ranks in idle.values():
        for child in ranks:
            child.end()
    idle.clear()


idle: dict[int, list[Rank]] = {}  # by world size, ranks that have failed no case yet, and have done the same ones


def run_case(request: dict) -> list[dict]:
    """Run a case on ranks that wait, or are forked, and kill those that outlive the timeout."""
    module = request["arguments"].get("module")
    if import_once({request["function"].partition(":")[0], module} - {None}) or not request["join"]:
        end_ranks()
    world = request["world_size"]
    ranks = idle.setdefault(world, [])
    while len(ranks) < world:
        ranks.append(Rank(len(ranks), chain(*idle.values())))
    with tempfile.TemporaryDirectory(prefix="case-") as name, selectors.DefaultSelector() as selector:
        folder, codes = Path(name), {}
        for rank, child in enumerate(ranks):
            child.ask(request, folder)
            selector.register(child.pipe, selectors.EVENT_READ, rank)
        deadline = time.monotonic() + request["timeout"]
        while len(codes) < world and (ready := selector.select(deadline - time.monotonic())):
            for key, _ in ready:
                selector.unregister(key.fileobj)
                codes[key.data] = ranks[key.data].reply()
        if len(codes) < world:
            end_ranks()
        replies = []
        for rank in range(world):
            output = folder / f"output-{rank}"
            reply = {"code": codes.get(rank, "timeout"), "output": output.read_text() if output.exists() else ""}
            for kind in ("result", "error"):
                if (path := folder / f"{kind}-{rank}").exists():
                    reply[kind] = json.loads(path.read_text())
            replies.append(reply)
    if any(reply["code"] for reply in replies) or any(rank.patched for rank in ranks) or not request["join"]:
        end_ranks()
    return replies


def import_once(modules: set[str]) -> bool:
    """Import a case's modules here rather than in every rank of it; an error of an import is the ranks' to tell.
    False if all had been imported before."""
    new = modules - sys.modules.keys()
    for name in new:
        with suppress(Exception):
            importlib.import_module(name)
    if new:
        note_code()
        gc.freeze()
    return bool(new)


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with who has started this
    note_code()
    gc.freeze()
    use_huge_pages()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{sys.argv[1]}")
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                if os.fork() == 0:
                    listener.close()
                    serve_requests(stream)


def serve_requests(stream: TextIO) -> None:
    """The life of one process's server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        print(os.getpid(), file=stream, flush=True)
        for line in stream:
            print(json.dumps(run_case(json.loads(line))), file=stream, flush=True)
    finally:
        os._exit(0)  # its ranks die with it


if __name__ == "__main__":
    main()
