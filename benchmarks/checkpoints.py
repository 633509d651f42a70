"""Time and size of a checkpoint, and how long training stops for it: `python -m benchmarks.checkpoints`.

Saving and loading, PyTorch's distributed checkpoints (DCP) and a plain `torch.save` by rank 0 take turns on the same
ranks with the same state: a model and its AdamW state after a step. Every candidate's checkpoint is first loaded again
and compared bit by bit. Only ours verifies the files when it loads.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_state
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_state

from benchmarks.harness import WrongResultError, gather_times, line_up, noise, now, ratios, summarise, take_turns
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.parallel_run import ParallelSettings, start
from benchmarks.lib.sheets import MARK, day, groups, machine, median, show, time
from benchmarks.records import Record
from cs336_systems.checkpoint.disk import list_checkpoints
from cs336_systems.checkpoint.folder import Saver, open_checkpoint, save
from cs336_systems.comm import Group, Place, agree, backend_of, distributed
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, setting
from cs336_systems.host.machine import environment, usable_memory
from cs336_systems.host.table import Table
from cs336_systems.train.__main__ import require_fit
from cs336_systems.train.recipe import Recipe
from cs336_systems.train.run_state import RunState
from cs336_systems.train.trainer import Trainer

PROBE = 1 << 26  # bytes that the probes write, hash and copy
OURS, BACKGROUND, LOAD = "save", "save in the background", "load"
DCP_SAVE, DCP_LOAD = "DCP save", "DCP load"
TORCH_SAVE, TORCH_LOAD = "torch.save", "torch.load"


@dataclass(frozen=True)
class Candidate:
    """A function to time, what runs `after` it untimed, and for one that saves how the gate loads."""

    run: Callable[[], object]
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
    """`folder.save`, `Saver` with a thread, restoring; PyTorch's distributed checkpoint; `torch.save` by rank 0."""
    first, numbers = bench.group.rank() == 0, count(1)  # of the steps that are saved, a new one each time
    parent, parent_dcp, file = bench.folder / "ours", bench.folder / "dcp", bench.folder / "state.pt"
    saver = Saver(parent, bench.group, background=True)

    def save_it() -> None:
        save(parent, next(numbers), *bench.state.pieces(), {}, bench.group)

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
        OURS: Candidate(save_it, load=load_it),
        BACKGROUND: Candidate(lambda: saver.start(next(numbers), *bench.state.pieces(), {}), saver.finish, load_it),
        LOAD: Candidate(load_it),
        DCP_SAVE: Candidate(dcp_save, forget, dcp_load),
        DCP_LOAD: Candidate(dcp_load),
        TORCH_SAVE: Candidate(torch_save, load=torch_load),
        TORCH_LOAD: Candidate(torch_load),
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


HEADS = ("candidate", "time", "predicted", "bytes/s", "/ DCP's", "quartiles")
NOTE = (
    "In the background: how long training stands still. Loads are from the page cache; ours compares every SHA-256. "
    "`torch.save` does not wait for the disk. The ratios are of pairs of turns: ours, and torch's, over DCP's."
)


@dataclass(frozen=True)
class CheckpointSettings(ParallelSettings):
    """Options of the command line, one field each."""

    size: str = setting("small", "Model preset.")
    batch_size: int = setting(1, "Sequences of each rank in the single training step.", type=COUNT)
    context: int | None = setting(32, "Tokens in a sequence.", type=COUNT)


def recipe_of(settings: CheckpointSettings, ranks: int, device: str) -> Recipe:
    """The run whose state is saved."""
    config = settings.config()
    shape = {name: getattr(config, name) for name in ("d_model", "d_ff", "num_heads", "num_layers")}
    asked = {"batch_size": settings.batch_size * ranks, "context": config.context_length, "device": device}
    return Recipe.of(size=settings.size, year=settings.year, data=("random",), **shape, **asked)


def measured(bench: Bench, settings: CheckpointSettings, stamp: dict[str, Any]) -> list[Record]:
    """The gate, then the turns, each of which counts as long as its slowest rank: a record for every candidate."""
    rivals, group, config = candidates(bench), bench.group, bench.trainer.config
    for name, candidate in rivals.items():
        if candidate.load:
            bench.check(name, candidate)
            if group.rank() == 0:
                print(f"gate: {name} gives back what was saved, bit for bit", flush=True)
    predicted = predict(bench)

    def turn(candidate: Candidate) -> float:
        line_up(group, bench.device)
        milliseconds = bench.seconds(candidate.run) * 1e3
        candidate.after()
        return milliseconds

    turns = {name: partial(turn, candidate) for name, candidate in rivals.items()}
    mine = take_turns(turns, settings.rounds, quiet=group.rank() > 0)
    samples = {name: gather_times(each, group, bench.device).amax(dim=0).tolist() for name, each in mine.items()}
    records, shape = [], {"d_model": config.d_model, "layers": config.num_layers}
    for name in rivals:
        metrics = summarise(samples[name])
        metrics |= ratios(samples[name], samples[DCP_LOAD if name in (LOAD, DCP_LOAD, TORCH_LOAD) else DCP_SAVE])
        what = {"candidate": name, "size": settings.size, "year": settings.year, "ranks": group.size()} | shape
        what |= {"link": settings.link} if settings.link else {}
        expected = {"mean_ms": 1e3 * predicted[name]} if name in predicted else {}
        metrics |= {"bytes": bench.nbytes}
        records.append(Record("checkpoints", what, stamp, samples[name], metrics, expected, noise(metrics)))
    return records


def title(record: Record) -> str:
    """The state that is saved, and the machine."""
    config, size = record.config, format_bytes(record.metrics["bytes"])
    link = f"{config['link']}; " if "link" in config else ""
    return f"{config['size']}, {size} of weights and AdamW state, {config['ranks']} ranks; {link}{machine(record)}"


def row(record: Record) -> list[str]:
    """One candidate."""
    metrics = record.metrics
    cells = [record.config["candidate"], median(record), time(record.predicted["mean_ms"]) if record.predicted else ""]
    cells += [f"{format_bytes(metrics['bytes'] / metrics['median_ms'] * 1e3)}/s", f"{metrics['ratio_median']:.2f}"]
    return [*cells, f"{metrics['ratio_low']:.2f} to {metrics['ratio_high']:.2f}"]


def sheets(records: list[Record]) -> list[Table]:
    """A table for each size, number of ranks and machine, with all candidates."""
    found = []
    for group in groups(records, title):
        noisy = f"\n{MARK}" if any(record.flags for record in group) else ""
        found.append(Table(f"{title(group[0])}, {day(group)}", HEADS, [row(record) for record in group], NOTE + noisy))
    return found


def require_room(settings: CheckpointSettings, place: Place) -> None:
    """Raises UserError if a rank's part of the run does not fit."""
    device, ranks = settings.on, place.world_size
    usable = usable_memory(device) // (place.local_world_size if device.type == "cpu" else 1)
    try:
        require_fit(recipe_of(settings, ranks, device.type), ranks, usable)
    except UserError as error:
        said = str(error).partition("; ")[0]  # what follows is advice for training
        raise UserError(f"{said}; choose a smaller --size, or fewer --layers or ranks") from None


def work(place: Place, settings: CheckpointSettings) -> None:
    """One rank's part."""
    device = settings.on
    recipe = recipe_of(settings, place.world_size, device.type)
    stamp = environment(device, settings.commit)  # while the folder is not there, which would be a change of the code
    with (
        distributed(device, settings.backend, settings.timeout, place) as group,
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="checkpoints-") as mine,
    ):
        folder = Path(agree("folder", mine, group)[0])
        stamp |= {"world_size": group.size(), "backend": backend_of(group)}
        records = measured(Bench(recipe, group, device, folder), settings, stamp)
        if group.rank() == 0:
            show(sheets(records))
            recorder = settings.recorder("checkpoints", device)
            recorder.keep(*records)
            recorder.tell()
        agree("measured", "", group)  # the folder goes now


@command(CheckpointSettings)
def main(settings: CheckpointSettings) -> None:
    """Time saving and loading a model and its optimizer's state; ways to save take turns. Print predictions, too."""
    start(work, settings, "checkpoints", require_room)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
