"""Candidates that save and load the same state in turn, and the predicted time of ours."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_state
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_state

from benchmarks.harness import WrongResultError
from benchmarks.rank_times import now
from cs336_systems.checkpoint.disk import list_checkpoints
from cs336_systems.checkpoint.folder import Saver, open_checkpoint, save
from cs336_systems.comm import Group, agree
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.run_state import RunState
from cs336_systems.train.trainer import Trainer

PROBE = 1 << 26  # bytes that the probes write, hash and copy
OURS, BACKGROUND, LOAD = "save", "save in the background", "load"
DCP_SAVE, DCP_LOAD = "DCP save", "DCP load"
TORCH_SAVE, TORCH_LOAD = "torch.save", "torch.load"


@dataclass(frozen=True)
class Candidate:
    """A function to time, its baseline, what runs `after` it untimed, and for one that saves how the gate loads."""

    run: Callable[[], object]
    rival: str
    after: Callable[[], object] = lambda: None
    load: Callable[[], object] | None = None


class Bench:
    """A trainer after one step on every rank, its state as one dictionary, and the folder."""

    def __init__(self, recipe: Recipe, group: Group, device: torch.device, folder: Path) -> None:
        self.group, self.device, self.folder = group, device, folder
        self.trainer = Trainer(recipe)
        self.trainer.step(0)
        self.state = RunState(self.trainer)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the run by name and kind, as DCP and torch.save take them: the same on all ranks."""
        found = {f"{name}/value": parameter.detach() for name, parameter in self.state.parameters.items()}
        for optimizer in self.state.part.optimizers:
            for parameter, state in optimizer.state.items():
                name = self.state.names[parameter]  # type: ignore[index]
                found |= {f"{name}/{kind}": value for kind, value in state.items() if isinstance(value, Tensor)}
        return found

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds that a function takes on this rank, including its device's work."""
        begin = now(self.device)
        run()
        return now(self.device) - begin

    @torch.no_grad()
    def check(self, name: str, candidate: Candidate) -> None:
        """The gate: save, forget, load. Raises WrongResultError."""
        want = {key: tensor.clone() for key, tensor in self.tensors().items()}
        candidate.run()
        candidate.after()
        agree("saved", "", self.group)
        for tensor in self.tensors().values():
            tensor.zero_()
        assert candidate.load is not None
        candidate.load()
        got = self.tensors()
        if got.keys() != want.keys() or not all(torch.equal(got[key], want[key]) for key in want):
            raise WrongResultError(f"{name}: what was loaded is not what was saved")


def candidates(bench: Bench) -> dict[str, Candidate]:
    """`folder.save`, `Saver` with a thread, and verifying and restoring; PyTorch's distributed checkpoint; and
    `torch.save` by rank 0."""
    first, numbers = bench.group.rank() == 0, count(1)  # of the steps that are saved, a new one each time
    parent, parent_dcp, file = bench.folder / "ours", bench.folder / "dcp", bench.folder / "state.pt"
    saver = Saver(parent, bench.group, background=True)

    def save_it() -> None:
        save(parent, next(numbers), *bench.state.pieces(), {}, bench.group)

    def begin() -> None:
        saver.start(next(numbers), *bench.state.pieces(), {})

    def load_it() -> None:
        bench.state.restore(open_checkpoint(list_checkpoints(parent)[-1], bench.group))

    def dcp_save() -> None:
        dcp_save_state(bench.tensors(), checkpoint_id=parent_dcp / f"{next(numbers):08d}")

    def dcp_load() -> None:
        dcp_load_state(bench.tensors(), checkpoint_id=max(parent_dcp.iterdir()))

    def forget() -> None:
        """Delete all but the newest two, as ours does."""
        for folder in sorted(parent_dcp.iterdir())[:-2] if first else ():
            shutil.rmtree(folder)
        agree("forgotten", "", bench.group)

    def torch_save() -> None:
        if first:
            torch.save(bench.tensors(), file)
        agree("torch.save", "", bench.group)

    def torch_load() -> None:
        loaded = torch.load(file, weights_only=True)
        for key, tensor in bench.tensors().items():
            tensor.copy_(loaded[key])

    return {
        OURS: Candidate(save_it, DCP_SAVE, load=load_it),
        BACKGROUND: Candidate(begin, DCP_SAVE, saver.finish, load_it),
        LOAD: Candidate(load_it, DCP_LOAD),
        DCP_SAVE: Candidate(dcp_save, DCP_SAVE, forget, dcp_load),
        DCP_LOAD: Candidate(dcp_load, DCP_LOAD),
        TORCH_SAVE: Candidate(torch_save, DCP_SAVE, load=torch_load),
        TORCH_LOAD: Candidate(torch_load, DCP_LOAD),
    }


def predict(bench: Bench) -> dict[str, float]:
    """Seconds of ours from four figures of this machine, taken with all ranks at work: how fast it copies, hashes and
    writes to the disk, and how long an fsync of almost nothing takes.

    A save copies a rank's part twice (out of the run, into the file's form), hashes and writes it, and waits for the
    disk some times more; one in the background only copies before training goes on. A load hashes this rank's share of
    the files, and reads and copies all.
    """
    data = torch.zeros(PROBE, dtype=torch.uint8)
    buffer = data.numpy().data
    path = bench.folder / f"probe-{bench.group.rank()}"
    agree("probe", "", bench.group)
    copy = PROBE / min(bench.seconds(data.clone) for _ in range(3))
    hashing = PROBE / bench.seconds(lambda: sha256(buffer).digest())
    writing = PROBE / bench.seconds(lambda: _write(path, buffer))
    wait = min(bench.seconds(lambda: _write(path, buffer[:64])) for _ in range(3))
    path.unlink()
    mine = sum(piece.tensor.nbytes for piece in bench.state.pieces()[0])
    return {
        OURS: mine * (2 / copy + 1 / hashing + 1 / writing) + 4 * wait,
        BACKGROUND: mine / copy,
        LOAD: mine / hashing + 2 * bench.nbytes / copy,
    }


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
