"""Time and size of a checkpoint, and how long training stops for it: `python -m benchmarks.checkpoints`.

Saving and loading, PyTorch's distributed checkpoints (DCP) and a plain `torch.save` by rank 0 take turns on the same
ranks with the same state: a model and its AdamW state after a step. Every candidate's checkpoint is first loaded again
and compared bit by bit. Only ours verifies the files when it loads.
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import noise, ratios, summarise, take_turns
from benchmarks.lib.checkpoint_candidates import Bench, Candidate, candidates, predict
from benchmarks.lib.options import COUNT
from benchmarks.lib.sheets import MARK, day, groups, machine, median, show, time
from benchmarks.parallel_run import ParallelSettings, start
from benchmarks.rank_times import gather_times, line_up
from benchmarks.records import Record
from cs336_systems.comm import Place, agree, backend_of, distributed
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, setting
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.host.table import Table
from cs336_systems.train.__main__ import require_fit
from cs336_systems.train.recipe import Recipe

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
    for name, candidate in rivals.items():
        metrics = summarise(samples[name]) | ratios(samples[name], samples[candidate.rival])
        what = {"candidate": name, "size": settings.size, "year": settings.year, "ranks": group.size()} | shape
        expected = {"mean_ms": 1e3 * predicted[name]} if name in predicted else {}
        found = metrics | {"bytes": bench.nbytes}
        records.append(Record("checkpoints", what, stamp, samples[name], found, expected, noise(metrics)))
    return records


def title(record: Record) -> str:
    """The state that is saved, and the machine."""
    config, size = record.config, format_bytes(record.metrics["bytes"])
    return f"{config['size']}, {size} of weights and AdamW state, {config['ranks']} ranks; {machine(record)}"


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
    device, ranks = choose_device(settings.device), place.world_size
    usable = usable_memory(device) // (place.local_world_size if device.type == "cpu" else 1)
    try:
        require_fit(recipe_of(settings, ranks, device.type), ranks, usable)
    except UserError as error:
        said = str(error).partition("; ")[0]  # what follows is advice for training
        raise UserError(f"{said}; choose a smaller --size, or fewer --layers or ranks") from None


def work(place: Place, settings: CheckpointSettings) -> None:
    """One rank's part."""
    device = choose_device(settings.device)
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


@click.command()
@console.options(CheckpointSettings)
def main(**options: Any) -> None:
    """Time saving and loading a model and its optimizer's state; ways to save take turns. Print predictions, too."""
    start(work, CheckpointSettings(**options), "checkpoints", require_room)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
