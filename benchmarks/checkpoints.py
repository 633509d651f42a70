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

from benchmarks.checkpoint_tables import sheets
from benchmarks.harness import noise, ratios, summarise, take_turns
from benchmarks.lib.checkpoint_candidates import Bench, Candidate, nothing, ours, predict, theirs
from benchmarks.lib.options import COUNT
from benchmarks.lib.sheets import show
from benchmarks.parallel_run import ParallelSettings, start
from benchmarks.rank_times import gather_times
from benchmarks.records import Record
from cs336_systems.comm import Place, agree, all_reduce, backend_of, distributed
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.train.__main__ import require_fit
from cs336_systems.train.recipe import Recipe


@dataclass(frozen=True)
class CheckpointSettings(ParallelSettings):
    """Options of the command line, one field each."""

    size: str = setting("small", "Model preset.")
    batch_size: int = setting(1, "Sequences of each rank in the single training step.", type=COUNT)
    context: int | None = setting(32, "Tokens in a sequence.", type=COUNT)
    folder_of_files: Path | None = setting(
        None, "Folder for the checkpoints, to choose a disk.  [default: a temporary folder here]"
    )


def play(bench: Bench, rivals: dict[str, Candidate], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank by candidate; they take turns."""

    def turn(candidate: Candidate) -> float:
        all_reduce(bench.token, bench.group, "line up").wait()
        spent = bench.seconds(candidate.run) * 1e3
        candidate.after()
        return spent

    turns = {name: partial(turn, candidate) for name, candidate in rivals.items()}
    samples = take_turns(turns, rounds, quiet=bench.group.rank() > 0)
    return {name: gather_times(each, bench.group, bench.device).amax(dim=0).tolist() for name, each in samples.items()}


def recipe_of(settings: CheckpointSettings, ranks: int, device: str) -> Recipe:
    """The run whose state is saved."""
    config = settings.config()
    return Recipe.of(
        size=settings.size,
        year=settings.year,
        d_model=config.d_model,
        d_ff=config.d_ff,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        data=("random",),
        batch_size=settings.batch_size * ranks,
        context=config.context_length,
        device=device,
    )


def measured(bench: Bench, settings: CheckpointSettings, stamp: dict[str, Any]) -> list[Record]:
    """The gate, then the turns: a record for every candidate."""
    rivals, group, config = ours(bench) | theirs(bench), bench.group, bench.trainer.config
    for name, candidate in rivals.items():
        candidate.check()
        if group.rank() == 0 and candidate.check is not nothing:
            print(f"gate: {name} gives back what was saved, bit for bit", flush=True)
    predicted = predict(bench)
    samples = play(bench, rivals, settings.rounds)
    records = []
    for name, candidate in rivals.items():
        metrics: dict[str, Any] = summarise(samples[name]) | ratios(samples[name], samples[candidate.rival])
        metrics |= {"bytes": bench.nbytes}
        what = {"candidate": name, "size": settings.size, "year": settings.year, "ranks": group.size()}
        what |= {"d_model": config.d_model, "layers": config.num_layers}
        expected = {"mean_ms": 1e3 * predicted[name]} if name in predicted else {}
        records.append(Record("checkpoints", what, stamp, samples[name], metrics, expected, noise(metrics)))
    return records


def work(place: Place, settings: CheckpointSettings) -> None:
    """One rank's part."""
    device = choose_device(settings.device)
    where = settings.folder_of_files or Path.cwd()
    recipe = recipe_of(settings, place.world_size, device.type)
    usable = usable_memory(device) // (place.world_size if device.type == "cpu" else 1)
    require_fit(recipe, place.world_size, usable)  # before the ranks join, since it observes one of them alone
    stamp = environment(device, settings.commit)  # while the folder is not there, which would be a change of the code
    with (
        distributed(device, settings.backend, settings.timeout, place) as group,
        tempfile.TemporaryDirectory(dir=where, prefix="checkpoints-") as mine,
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
    start(work, CheckpointSettings(**options), "checkpoints")


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
