"""A small server that forks ranks for tests: `python -m tests.support.rank_server`, one JSON request a line.

It imports everything heavy but runs no tensor code, so that its children start in milliseconds and may use threads: a
process that once ran a multi-threaded operator hangs its children at their first.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from cs336_systems.comm import Place, distributed

# Imported once here rather than by every child.
for heavy in ("pytest", "torch._dynamo", "torch.distributed.optim", "torch.utils.checkpoint", "cs336_systems.train"):
    importlib.import_module(heavy)
importlib.import_module("benchmarks.zero")


def run_rank(request: dict, rank: int, folder: Path) -> None:
    """A child's life: join the others, run the case, leave its result as JSON or its traceback as text."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the server
    world = request["world_size"]
    out = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = 0
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)  # which also poisons fresh memory with NaN
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        torch.manual_seed(0)
        if request["join"]:
            place = Place(rank, world, rank, world, str(folder / "store"))
            with distributed("cpu", timeout=request["collective_timeout"], place=place) as group:
                result = function(group, **request["arguments"])
        else:
            result = function(rank, world, str(folder), **request["arguments"])
        (folder / f"result-{rank}").write_text(json.dumps(result))
    except BaseException as error:
        (folder / f"error-{rank}").write_text(json.dumps([type(error).__name__, str(error), traceback.format_exc()]))
        status = 1
    finally:
        os._exit(status)


def run_case(request: dict) -> list[dict]:
    """Fork the ranks, wait for all, and kill those that outlive the timeout."""
    import_once({request["function"].partition(":")[0], request["arguments"].get("module")} - {None})
    with tempfile.TemporaryDirectory(prefix="case-") as name:
        folder, pids = Path(name), {}
        for rank in range(request["world_size"]):
            pid = os.fork()
            if pid == 0:
                run_rank(request, rank, folder)
            pids[pid] = rank
        codes, deadline = {}, time.monotonic() + request["timeout"]
        while len(codes) < len(pids):
            for pid, rank in pids.items():
                if rank not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(done[1])
            if time.monotonic() > deadline:
                for pid, rank in pids.items():
                    if rank not in codes:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        codes[rank] = "timeout"
            time.sleep(0.002)
        replies = []
        for rank in range(request["world_size"]):
            reply = {"code": codes[rank], "output": (folder / f"output-{rank}").read_text()}
            for kind in ("result", "error"):
                if (path := folder / f"{kind}-{rank}").exists():
                    reply[kind] = json.loads(path.read_text())
            replies.append(reply)
        return replies


def import_once(modules: set[str]) -> None:
    """Import a case's modules here rather than in every rank of it; an error of an import is the ranks' to tell."""
    if modules - sys.modules.keys():
        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
        gc.freeze()


def main() -> None:
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run_case(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
