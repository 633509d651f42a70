"""Run cases on forked ranks: one case after another, each in a process group of its own, until one fails; the cases
after that get new ranks. Every wait has an end."""

import faulthandler
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cs336_systems.check.candidates import BATCH, Candidate, CandidateSide, accepted, average
from cs336_systems.check.cases import FIRST, Case
from cs336_systems.check.foreign import late_collectives
from cs336_systems.check.oracle import Notes, ObservedRun
from cs336_systems.comm import Group, Place, distributed, tell_environment
from cs336_systems.comm.launch import run_ranks
from cs336_systems.errors import UserError

HUNG = "it did not end: killed"
SAID = 160  # characters of an error that are kept


@contextmanager
def clean_torch() -> Iterator[None]:
    """Set double precision, one thread and seeds inside the block, and restore the settings after it."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)


def run_cases(candidate: Candidate, cases: list[Case], world: int, timeout: float) -> dict[str, list[Notes]]:
    """Notes of every rank by case. `timeout`: seconds that a rank waits for the others."""
    import_module("torch._dynamo")  # which optimizers load: once here, not in every rank
    found: dict[str, list[Notes]] = {}
    rest = list(cases)
    while rest:
        with tempfile.TemporaryDirectory(prefix="check-") as name:
            with suppress(UserError, RuntimeError):  # what a rank has written says more
                run_ranks(_work, world, "cpu", candidate, rest, Path(name), timeout)
            while rest:
                case = rest.pop(0)
                found[case.name] = [_read(Path(name, f"{case.name}-{rank}")) for rank in range(world)]
                if any(notes.error for notes in found[case.name]):
                    rest = [] if case.name == FIRST.name else rest  # what cannot train has no other property
                    break
    return found


def _work(place: Place, candidate: Candidate, cases: list[Case], folder: Path, timeout: float) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an alarm ends the process
    tempfile.tempdir = str(folder)  # so that what a killed rank leaves goes with it
    faulthandler.disable()  # a rank that gloo aborts has told why
    sink = os.open(folder / f"output-{place.rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    tell_environment(place)
    for number, case in enumerate(cases):
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
        notes, spot = Notes(), replace(place, meeting=f"{place.meeting}-{number}")
        path = folder / f"{case.name}-{place.rank}"
        try:
            with clean_torch(), distributed("cpu", None, timeout, spot) as group:
                try:
                    with late_collectives() if case.slow else nullcontext():
                        observe(candidate, case, group, notes)
                except BaseException as error:
                    notes.error = line_of(error)
                    raise
                finally:
                    _write(path, notes)  # before leaving, which may not end
        except BaseException as error:
            notes.error = notes.error or line_of(error)
            _write(path, notes)
            os._exit(0)


def line_of(error: BaseException) -> str:
    """Kind and message of an error, in one line that is not too long."""
    words = re.sub(r"\[\S+\.cc:\d+\] ", "", " ".join(str(error).split()))  # gloo's own place in its source
    return f"{type(error).__name__}: {words if len(words) <= SAID else f'{words[:SAID]} ...'}"


def observe(candidate: Candidate, case: Case, group: Group, notes: Notes) -> None:
    """One rank's part of a case; of kind "function", `build` is all of it."""
    if candidate.kind == "function":
        candidate.build(case.name, group)
        return
    module = case.module(group.rank() if case.seeds else 0, group.rank())
    side = CandidateSide(candidate, module, group)
    if candidate.kind == "step":
        model, optimizer = module, case.cls(module.parameters(), **case.options)
    else:
        model, optimizer = candidate.build(module, case.cls, case.options, group)
    side.model = model
    run = CandidateRun(model, optimizer, group.rank(), group.size(), side=side, notes=notes)
    case.adapt(run)
    run.note("buffer", dict(module.named_buffers()), step=-1)
    run.note("weight", side.weights(), step=-1)
    for _ in case.program(run):
        run.finish()
        run.note("gradient", side.gradients())
    run.note("buffer", dict(module.named_buffers()))


class CandidateRun(ObservedRun):
    """A rank's side of a program, synchronised as the candidate does it."""

    @property
    def candidate(self) -> Candidate:
        return self.side.candidate

    def finish(self) -> None:
        if self.candidate.kind == "sharded-optimizer":
            average(self.side.group, self.model, self.optimizer)
        else:
            self.candidate.finish(self.model, self.optimizer)

    def loss(self, step: int, **options: Any) -> Any:
        """Compute the loss, after the candidate's preparation for a batch."""
        self.candidate.before(self.model, self.optimizer)
        return super().loss(step, **options)

    def train(self, step: int, **options: Any) -> Iterator[None]:
        """Take an ordinary step, or the user's training step."""
        if self.candidate.kind != "step":
            yield from super().train(step, **options)
            return
        inputs, targets = self.rows(step)
        given = (self.model, self.optimizer, self.criterion, inputs, targets, self.side.group)
        names = (3, 2, 3, 3, 3, 1)  # of BATCH, one argument after another
        values = [value for value, count in zip(given, names, strict=True) for _ in range(count)]
        loss = self.candidate.build(**accepted(self.candidate.build, dict(zip(BATCH, values, strict=True))))
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.note("loss", {"": loss})
        self.note("weight", self.side.weights())
        self.optimizer.zero_grad()
        self.number += 1
        yield from ()


def _write(path: Path, notes: Notes) -> None:
    """Write all tensors as one flat array, with the shapes and names that are needed to split it."""
    tensors = list(notes.tensors.values())
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *(each.flatten() for each in tensors)])
    flat.numpy().tofile(f"{path}.numbers")
    shapes = [tuple(each.shape) for each in tensors]
    said = {"error": notes.error, "keys": list(notes.tensors), "dtypes": list(notes.dtypes.values()), "shapes": shapes}
    Path(f"{path}.json").write_text(json.dumps(said, allow_nan=False), encoding="utf-8")


def _read(path: Path) -> Notes:
    try:
        said = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        flat = torch.from_numpy(np.fromfile(f"{path}.numbers"))
        pieces = flat.split([math.prod(shape) for shape in said["shapes"]])
    except (OSError, ValueError, KeyError, RuntimeError):  # it was killed before, or while it wrote
        return Notes(error=HUNG)
    keys = [(step, kind, name) for step, kind, name in said["keys"]]
    values = [piece.view(shape) for piece, shape in zip(pieces, said["shapes"], strict=True)]
    return Notes(dict(zip(keys, values, strict=True)), dict(zip(keys, said["dtypes"], strict=True)), said["error"])
