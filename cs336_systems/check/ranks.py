"""Run cases on forked ranks: one case after another, each in a process group of its own, until one fails; the cases
after that get new ranks, since an error may leave a candidate's globals half changed. Every wait has an end."""

import faulthandler
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cs336_systems.check.candidates import BATCH, ENDED, Candidate, accepted, called, exits_raised, line_of
from cs336_systems.check.cases import FIRST, Case
from cs336_systems.check.models import Run
from cs336_systems.check.oracle import Notes, ObservedRun, reference, whole_of
from cs336_systems.check.targets import late_collectives
from cs336_systems.comm import Group, Place, all_gather, all_reduce, distributed, tell_environment
from cs336_systems.comm.launch import has_autograd_threads, run_ranks
from cs336_systems.errors import UserError

HUNG = "it did not end: killed"


class BrokenPromiseError(AssertionError):
    """A condition of an exercise is not met."""


@contextmanager
def clean_torch() -> Iterator[None]:
    """Set double precision, one thread and seeds inside the block, and restore the settings after it."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        yield


def run_cases(candidate: Candidate, cases: list[Case], world: int, timeout: float) -> list[tuple[Case, list[Notes]]]:
    """Each case with the notes of every rank. `timeout`: seconds that a rank waits for the others. Raises UserError if
    ranks cannot be forked from this process."""
    if has_autograd_threads():
        why = "this process has computed gradients beside a GPU, and processes forked from it cannot"
        raise UserError(f"{why}: check before it does, or hide the GPU from it (CUDA_VISIBLE_DEVICES=)")
    found: list[tuple[Case, list[Notes]]] = []
    rest = list(cases)
    while rest:
        with tempfile.TemporaryDirectory(prefix="check-") as name:
            first = ""  # how the first rank that failed has ended; what a rank has written says more
            try:
                run_ranks(_work, world, "cpu", candidate, rest, Path(name), timeout)
            except (UserError, RuntimeError) as error:
                first = str(error).partition("\n")[0].partition(":")[0]
            while rest:
                case = rest.pop(0)
                found.append((case, [_read(Path(name, f"{case.name}-{rank}"), rank, first) for rank in range(world)]))
                if any(notes.error for notes in found[-1][1]):
                    rest = [] if case.name == FIRST.name else rest  # if training fails, so does the rest
                    break
    return found


def _work(place: Place, candidate: Candidate, cases: list[Case], folder: Path, timeout: float) -> None:
    tempfile.tempdir = str(folder)  # so that what a killed rank leaves goes with it
    faulthandler.disable()  # gloo has printed why it aborts a rank
    sys.stdout = sys.stderr = sink = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sink.fileno(), 1)
    os.dup2(sink.fileno(), 2)
    tell_environment(place)
    for number, case in enumerate(cases):
        faulthandler.dump_traceback_later(2 * timeout + 1, exit=True, file=sink)  # ends the process with code 1
        notes, spot = Notes(), replace(place, meeting=f"{place.meeting}-{number}")
        noted = partial(_noted, folder / f"{case.name}-{place.rank}", notes, f"rank {place.rank}")
        slow = late_collectives() if case.slow else nullcontext()
        try:  # notes are written before leaving the group, too, which may not end
            with noted(), clean_torch(), distributed("cpu", None, timeout, spot) as group, noted(), slow:
                observe(candidate, case, group, notes)
        except BaseException:
            os._exit(0)


def references(cases: list[Case], world: int) -> dict[str, list[Notes]]:
    """The reference of each case by its name, unless an error is right, computed in a process of its own, since this
    one may fork ranks again."""
    cases = [case for case in cases if not case.error]
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        if cases:
            run_ranks(_refer, 1, "cpu", cases, world, Path(name))
        return {case.name: [_read(Path(name, f"{case.name}-{r}"), r, "") for r in range(world)] for case in cases}


def _refer(place: Place, cases: list[Case], world: int, folder: Path) -> None:
    with clean_torch(), called("one process with the model of build()"):
        for case in cases:
            for rank, notes in enumerate(reference(case, world)):
                with _noted(folder / f"{case.name}-{rank}", notes, ""):
                    pass


@contextmanager
def _noted(path: Path, notes: Notes, who: str) -> Iterator[None]:
    """Note the first error that ends the block, and write the notes: a line of JSON, and the numbers of all tensors."""
    try:
        yield
    except BaseException as error:
        notes.error = notes.error or line_of(error, who)
        raise
    finally:
        if notes.error or not path.exists():
            head = [notes.error, [[*key, list(tensor.shape)] for key, tensor in notes.tensors.items()]]
            numbers = b"".join(tensor.numpy().tobytes() for tensor in notes.tensors.values())
            path.write_bytes(json.dumps(head, allow_nan=False).encode() + b"\n" + numbers)


def _read(path: Path, rank: int, first: str) -> Notes:
    """A rank's notes; without any, how it ended, from how the `first` rank that failed did (none: exit code 0)."""
    try:
        head, _, numbers = path.read_bytes().partition(b"\n")
        error, tensors = json.loads(head)
        flat = torch.from_numpy(np.frombuffer(bytearray(numbers)))
        pieces = zip(tensors, flat.split([math.prod(shape) for *_, shape in tensors]), strict=True)
        return Notes({(step, kind, name): piece.view(shape) for (step, kind, name, shape), piece in pieces}, error)
    except (OSError, ValueError, RuntimeError):  # it ended before, or while it wrote
        is_own = first.startswith(f"rank {rank} ") and not first.endswith("code 1")  # else it was too late
        return Notes(error=(first if is_own else HUNG) if first else f"rank {rank} {ENDED} 0")


def is_gone(error: str) -> bool:
    """True of a rank that hung, was killed or has ended by itself, without an error of its own."""
    return any(words in error for words in (HUNG, ENDED, "was killed by", "ended with exit code"))


@exits_raised()
def observe(candidate: Candidate, case: Case, group: Group, notes: Notes) -> None:
    """One rank's part of a case; of kind "function", `build` is all of it."""
    if candidate.kind == "function":
        candidate.build(case.name, group)
        return
    module = case.module(group.rank() if case.seeds else 0, group.rank())
    shapes = {name: p.shape for name, p in module.named_parameters()}
    model, optimizer = candidate.build(module, case.cls, case.options, group)
    copies = [x for x in getattr(model, "modules", list)() if dict(x.named_parameters()).keys() == shapes.keys()]
    bare = module if module in copies or not copies else copies[0]  # a wrapper may have copied it
    updated = {p for each in getattr(optimizer, "param_groups", ()) for p in each["params"]}
    if candidate.kind == "fsdp" and not updated.issuperset(p for p in bare.parameters() if p.requires_grad):
        candidate = replace(candidate, has_gradients=False)  # some have shards in their place
    run = CandidateRun(model, optimizer, group.rank(), group.size(), case=case, bare=bare, notes=notes,
                       candidate=candidate, group=group, shapes=shapes)  # fmt: skip
    for _ in run.observed():
        pass


@dataclass(kw_only=True)
class CandidateRun(ObservedRun):
    """A rank's part of a program with a candidate's model. All ranks must call these methods together."""

    candidate: Candidate
    group: Group
    shapes: dict[str, torch.Size]  # of the bare module's whole parameters

    def synchronise(self) -> None:
        """Synchronise as the candidate does; for an optimizer that shards its state alone, gradients are averaged."""
        if self.candidate.kind != "sharded-optimizer":
            self.candidate.finish(self.model, self.optimizer)
            return
        for gradient in super().gradients().values():
            flat = gradient.detach().reshape(-1).clone()
            all_reduce(flat, self.group).wait()
            gradient.copy_(flat.view_as(gradient))

    def weights(self) -> dict[str, Tensor]:
        """Whole parameters; under tensor parallelism this rank's."""
        gather = self.candidate.gather or getattr(type(self.model), "gather_full_params", None)
        if self.candidate.kind == "fsdp" and gather:
            found = {name.removeprefix("module."): p.detach() for name, p in gather(self.model).items()}
            return {name: found[name] for name in self.shapes if name in found}
        return {name: self._whole(name, p) for name, p in super().weights().items()}

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as it is, or put together from the ranks' equal, flat shards."""
        tensor, shape, world = whole_of(tensor), self.shapes.get(name, tensor.shape), self.group.size()
        if self.candidate.kind != "fsdp" or tensor.shape == shape:
            return tensor
        every = tensor.new_zeros(world * tensor.numel())
        every.chunk(world)[self.group.rank()].copy_(tensor.reshape(-1))
        all_gather(every, self.group).wait()
        return every[: shape.numel()].view(shape)

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, where `.grad` has them."""
        found = {name: whole_of(g) for name, g in super().gradients().items()} if self.candidate.has_gradients else {}
        is_whole = self.candidate.kind != "fsdp" or all(g.shape == self.shapes[name] for name, g in found.items())
        return found if is_whole else {}

    def save(self) -> tuple[dict[str, Any], Any]:
        """State of this rank; torch's sharded optimizer has it on the rank that it was last consolidated to."""
        consolidate: Any = getattr(self.optimizer, "consolidate_state_dict", None)
        saved: Any = None if consolidate else super().save()
        for rank in range(self.world if consolidate else 0):
            consolidate(to=rank)
            saved = super().save() if rank == self.rank else saved
        return saved

    def loss(self, step: int, **options: Any) -> Any:
        """Compute the loss, after the candidate's preparation for a batch."""
        self.candidate.before(self.model, self.optimizer)
        return super().loss(step, **options)

    backward_of = Run.backward_of  # of the reference alone are the parts of a gradient noted

    def train(self, step: int, **options: Any) -> Iterator[None]:
        """Take an ordinary step, or the user's training step."""
        if self.candidate.step is None:
            yield from super().train(step, **options)
            return
        given = (self.model, self.optimizer, self.criterion, *self.rows(step), self.group)
        self.candidate.step(**accepted(self.candidate.step, {name: given[i] for name, i in BATCH.items()}))
        self.ended()
