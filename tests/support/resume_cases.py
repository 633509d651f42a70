"""Runs that are killed, stopped or corrupted at a chosen step of a chosen rank, and the files that they leave.

A fault is `{"rank": 1, "step": 3, "what": "kill", "when": "backward"}`: steps count from 1, and `when` is the beginning
of the step, its loss, its backward, its update, or the first write, fsync or rename of the save after it; before any
step, which is step 0, it may be "build".
"""

import errno
import json
import math
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cs336_systems.checkpoint.disk import list_checkpoints
from cs336_systems.checkpoint.folder import open_checkpoint, weights_hash
from cs336_systems.checkpoint.tensors import Checkpoint
from cs336_systems.comm import find_place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.data.corpus import random_corpus
from cs336_systems.train import __main__ as training
from cs336_systems.train import loop, run_log
from cs336_systems.train.__main__ import train
from cs336_systems.train.loop import Loop
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.trainer import Trainer
from tests.support import ranks
from tests.support.machine import made_up
from tests.support.state_cases import recipe_of, require_same, wide

FILES = ("fsync", "rename", "write")
FEW = (0, 20_000)  # seed and random tokens, of which a run of some steps reads few
PATIENCE = 3.0  # seconds that a rank waits for one that is dead
TINY = {
    "batch_size": 8, "context": 16, "lr": 1e-2, "warmup_steps": 3, "decay_steps": 20, "device": "cpu",
    "log_every": 1, "eval_iters": 1, "sample_bytes": 8,
}  # fmt: skip


class Fault:
    """Something that happens once, on one rank, in one step."""

    def __init__(self, rank: int, step: int, what: str, when: str = "step") -> None:
        self.rank, self.step, self.what, self.when = rank, step, what, when

    def strike(self) -> None:
        """End this process, tell it to end, hold it up, or have its disk full."""
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.what == "slow":
            time.sleep(0.3)
        if self.what == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def step_of(file: int | str | Path) -> int:
    """The step whose checkpoint an open file, or a path, is a part of: a save beside training may come to it when the
    next step has begun. 0 for others."""
    path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
    found = re.search(r"/\.?[a-z-]*step-([0-9]{8})", path)
    return int(found[1]) if found else 0


class Struck:
    """Puts the faults of this rank where they belong. Steps are counted as the trainer takes them."""

    def __init__(self, faults: list[dict], rank: int) -> None:
        self.faults = [fault for fault in (Fault(**each) for each in faults) if fault.rank == rank]
        self.step = 0
        self.spent: set[Fault] = set()
        self.wrap(Trainer, "__init__", lambda *_: self.strike("build"))
        self.wrap(Trainer, "step", self.before_step)
        self.wrap(Trainer, "_update", lambda *_: self.strike("update"))
        for name in FILES:
            self.wrap(os, name, lambda *of, name=name: self.strike(name, step_of(of[0])))
        share = Trainer._share

        def spoilt(trainer: Trainer, *arguments: Any) -> torch.Tensor:
            found = share(trainer, *arguments)
            for fault in self.due("loss"):
                found = found * math.nan if fault.what == "nan" else found
            if found.requires_grad:
                found.register_hook(self.in_backward)
            return found

        Trainer._share = spoilt

    def wrap(self, owner: Any, name: str, before: Callable[..., object]) -> None:
        real = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            before(*arguments)
            return real(*arguments, **named)

        setattr(owner, name, wrapped)

    def due(self, when: str, step: int | None = None) -> Iterator[Fault]:
        for fault in self.faults:
            if fault.when == when and fault.step == (self.step if step is None else step):
                yield fault

    def before_step(self, trainer: Trainer, step: int) -> None:
        self.step = step + 1
        self.strike("step")

    def in_backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.strike("backward")
        return gradient * math.nan if any(fault.what == "nan" for fault in self.due("backward")) else None

    def strike(self, when: str, step: int | None = None) -> None:
        for fault in self.due(when, step):
            if fault not in self.spent:
                if fault.what != "slow":
                    self.spent.add(fault)
                fault.strike()


def train_case(
    group, recipe: dict, faults: list[dict], float64: bool = False, echo: float = loop.SAME_SIGNAL, ahead: int = 0
) -> dict:
    """Train on this rank; what it prints and returns."""
    training.probe = made_up  # in the process of this case only, as all that follows
    random_corpus.__defaults__ = FEW
    run_log.environment = lambda device: {"device": "CPU"}
    loop.SAME_SIGNAL = echo
    if float64:
        wide()
    struck = Struck(faults, group.rank())
    struck.wrap(Loop, "run", lambda _, stop: setattr(stop, "ahead", ahead))
    paths = {"vocab_file", "log_file", "out", "weights"}
    shown = StringIO()
    with redirect_stdout(shown), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {name: Path(value) if name in paths and value else value for name, value in recipe.items()}
        final = train(Recipe.of(**given | {"data": tuple(given.get("data", ("random",)))}))
    return {"final": final, "shown": shown.getvalue(), "warnings": [str(each.message) for each in caught]}


def chain_case(group, recipes: list[dict]) -> list[list[list[float]]]:
    """Train one recipe after another in one process; of each the numbers that its steps drew from every generator. A
    run that goes on finds the generators in another state than it left them in."""
    drawn: list[list[float]] = []

    def draw(*_: object) -> None:
        drawn.append(
            [torch.rand(()).item(), torch.randn(()).item(), random.random(), random.gauss(), np.random.normal()]
        )

    struck, found = Struck([], group.rank()), []
    struck.wrap(Trainer, "step", draw)
    for recipe in recipes:
        drawn.clear()
        train_case(group, recipe, [])
        found.append(list(drawn))
    return found


class Outcome:
    """Outcome of an attempt: each rank's result, exit code and error."""

    def __init__(self, results: list, codes: list, errors: list) -> None:
        self.results, self.codes, self.errors = results, codes, errors

    @property
    def shown(self) -> str:
        return self.results[0]["shown"]

    @property
    def line(self) -> str:
        """The one line that all ranks that end with an error of the user's end with."""
        assert {error[0] for error in self.errors} <= {"UserError", "SaveError"}, self.errors
        lines = {error[1] for error in self.errors}
        assert len(lines) == 1, lines
        (line,) = lines
        assert "\n" not in line
        return line


def attempt(world: int, recipe: dict, *faults: dict, timeout: float = PATIENCE, **arguments: Any) -> Outcome:
    """A run that may fail, but may not hang."""
    given = {"recipe": recipe, "faults": list(faults)} | arguments
    try:
        results = ranks.ask(train_case, world, True, ranks.TIMEOUT, timeout, given)
    except ranks.RanksFailedError as error:
        if "timeout" in error.codes:
            raise
        return Outcome([], error.codes, error.errors)
    return Outcome(results, [0] * world, [None] * world)


def complete(world: int, recipe: dict, *faults: dict, **arguments: Any) -> Outcome:
    """A run that must not fail."""
    outcome = attempt(world, recipe, *faults, timeout=ranks.COLLECTIVE_TIMEOUT, **arguments)
    assert not any(outcome.codes), outcome.errors
    return outcome


def tiny(out: Path, **changes: Any) -> dict:
    """The tiny model on random bytes, which it learns nothing of, as a request that can be sent to ranks."""
    return TINY | {"data": ["random"], "out": str(out)} | changes


def family(layout: str, folder: Path, **changes: Any) -> dict:
    """One of the small models of the proof of checkpoints, in a layout by name."""
    recipe, defaults = recipe_of(layout, str(folder)), Recipe().options()
    given = {name: value for name, value in recipe.options().items() if value != defaults[name]}
    return given | {"data": list(recipe.data.data), "log_every": 1, "eval_iters": 1, "sample_bytes": 4} | changes


def newest(out: Path) -> Checkpoint:
    return open_checkpoint(list_checkpoints(out / "checkpoints")[-1])


def log_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def figures(out: Path) -> list[tuple]:
    """The log's entries of each step without times and memory."""
    keys = ("step", "loss", "lm_loss", "sop_loss", "lr", "grad_norm", "loss_scale", "skipped", "balance", "dropped")
    return [tuple(line.get(key) for key in keys) for line in log_of(out) if "loss" in line]


def require_same_end(one: Path, other: Path) -> None:
    """Raises AssertionError unless the last checkpoints of two runs are equal to the bit: parameters, the optimizer's
    state, generators, and what the trainer counts."""
    first, second = newest(one), newest(other)
    assert first.step == second.step
    assert weights_hash(first) == weights_hash(second)
    require_same(first, second)
    assert first.state["trainer"] == second.state["trainer"]
    assert figures(one) == figures(other)


def restarted() -> None:
    """The training command on a rank of torchrun, of which rank 1 kills itself the first time it comes to step 6."""
    place = find_place()
    training.probe = made_up
    random_corpus.__defaults__ = FEW
    Struck([{"rank": 1, "step": 6, "what": "kill"}] if place.attempt == "0" else [], place.rank)
    sys.exit(run_command_on_ranks(training.main))


def torchrun_case(rank: int, world: int, folder: str, words: list[str]) -> None:
    """Do the same as `torchrun --standalone --nproc-per-node 2 --max-restarts 3`, with ranks forked from this process,
    which has imported everything."""
    sys.argv = ["train", *words]
    standalone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "logs_specs": DefaultLogsSpecs(folder)}
    config = LaunchConfig(1, 1, 2, max_restarts=3, start_method="fork", monitor_interval=0.1, **standalone)
    elastic_launch(config, restarted)()
