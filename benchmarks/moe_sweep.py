"""CPU time of expert layers over number of experts, capacity and ranks: `python -m benchmarks.moe_sweep`.

Each setting of the grid is one layer (see `moe_layer.py`), sorted and, where its tensors are not too large, one-hot.
All settings of a number of ranks take turns. Each rank has equally many tokens in all of them. A random router is
nearly balanced on random tokens and drops hardly any. `--skew` adds a common part to all tokens, so that some experts
get more work than others, as with real text.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.expert_tables import show, sweep
from benchmarks.lib.expert_layer import DEVICE, Bench, LayerSettings, Way, check_ranks
from benchmarks.lib.expert_picture import draw
from benchmarks.lib.expert_turns import Candidate, cell, measure
from benchmarks.lib.options import COUNT
from benchmarks.records import Record, append_record, every_record, open_records, require_written
from cs336_systems.comm import CommError, Group, Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks, run_ranks
from cs336_systems.cost.plots.style import HOW_TO_PLOT, can_plot, save
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.text import printable
from cs336_systems.presets import Mixture

SMOKE: dict[str, Any] = {"experts": (4, 8), "tokens": 64, "d_model": 16, "d_ff": 32, "rounds": 1, "steps": 1}


@dataclass(frozen=True)
class MoESweepSettings(LayerSettings):
    """Options of the command line, one field each."""

    experts: tuple[int, ...] = setting((8, 32, 128, 512), "Experts of the layer; may be repeated.", type=COUNT)
    capacity: tuple[str, ...] = setting(
        ("1x", "2x", "4x", "0.05", "dropless"),
        "Capacity of an expert: `2x` is 2 x tokens / experts, `0.05` a share of tokens, `dropless` no limit; may be "
        "repeated.",
    )
    nproc: tuple[int, ...] = setting(
        (), "Ranks to start, without torchrun; may be repeated.  [default: 1, then 2, then 4]", type=COUNT
    )
    skew: float = setting(0.5, "Preference of tokens for the same experts; 0: little.", type=click.FloatRange(0, 100))

    def cell(self, experts: int, capacity: str) -> Way:
        """The sorted layer of a cell of the grid. Raises UserError for one that cannot be."""
        return self.way("sort", experts, *parse_capacity(capacity))

    def ranks(self, here: Place) -> tuple[int, ...]:
        """The numbers of ranks to measure. Raises UserError for ranks or layers that cannot be."""
        if here.world_size > 1 and self.nproc:
            raise UserError(
                f"--nproc {self.nproc[0]} would start ranks, but {here.world_size} were started already: drop it"
            )
        started = self.nproc or ((1, 2) if self.smoke else (1, 2, 4))
        found = (here.world_size,) if here.world_size > 1 else started
        for experts in self.experts:
            for count in found:
                check_ranks(experts, count)
            for capacity in self.capacity:
                self.cell(experts, capacity)
        return found


def parse_capacity(text: str) -> tuple[Mixture, bool]:
    """(`2x`, `0.05` or `dropless` as a mixture, whether that is its capacity in training). Raises UserError."""
    if text == "dropless":
        return Mixture(), False
    try:
        number = float(text.removesuffix("x"))
    except ValueError:
        number = 0.0
    if text.endswith("x") and 0 < number < float("inf"):
        return Mixture(capacity_factor=number), True
    if not text.endswith("x") and 0 < number <= 1:
        return Mixture(eval_fraction=number), False
    raise UserError(f"--capacity {text!r} is none: write 2x, or a share of the tokens such as 0.05, or dropless")


def enter(settings: MoESweepSettings, group: Group, about: dict[str, Any]) -> list[Candidate]:
    """All cells of the grid for these ranks, seen by the gate, sorted and, where tensors are not too large, one-hot.
    Every rank decides alike. Raises WrongResultError for a cell whose two layers differ."""
    found, count = list[Candidate](), len(settings.experts) * len(settings.capacity)
    with console.progress(f"{group.size()} rank(s), gate", count, quiet=group.rank() > 0) as advance:
        for experts in settings.experts:
            bench = Bench(settings.cell(experts, "dropless").config, settings.skew, group)
            for capacity in settings.capacity:
                found += cell(bench, settings.cell(experts, capacity), about | {"capacity": capacity})
                advance(f"{experts} experts, {capacity}")
    return found


def work(place: Place, settings: MoESweepSettings, path: Path) -> None:
    """One rank's part; rank 0 appends the records to a file. Raises UserError, and as `enter` does."""
    for record in measure(place, "moe_sweep", settings, partial(enter, settings)):
        append_record(record, path)
    require_written(path)


def measured(settings: MoESweepSettings, here: Place, folder: Path) -> list[Record]:
    """Measure and print all cells on all numbers of ranks; the records, on rank 0 alone. Raises UserError for what
    cannot be measured, before anything is; what was measured until an error is shown, too."""
    counts, records, before, path = settings.ranks(here), list[Record](), 0, folder / "moe_sweep.jsonl"
    if here.rank == 0:
        before = len(every_record(open_records(folder, "moe_sweep")))
    try:
        if here.world_size > 1:
            work(here, settings, path)
        else:
            for count in counts:
                run_ranks(work, count, "cpu", settings, path)
    except CommError as error:
        raise UserError(str(error)) from None
    finally:
        if here.rank == 0 and (records := every_record(path)[before:]):
            show(sweep(records), records)
    return records


def run(settings: MoESweepSettings) -> None:
    """Measure, print, and draw. Raises UserError for what cannot be done."""
    here, folder = find_place(), settings.records_folder(DEVICE)
    if settings.smoke:
        with TemporaryDirectory(prefix="moe-sweep-") as scratch:
            measured(settings, here, Path(scratch))
    elif records := measured(settings, here, folder):
        print(printable(f"{len(records)} records appended to {folder / 'moe_sweep.jsonl'}"))
        print(
            printable(f"plot in {save(draw(records), folder / 'moe_sweep.svg', '--results')}")
            if can_plot()
            else HOW_TO_PLOT
        )


@click.command()
@console.options(MoESweepSettings)
def main(**options: Any) -> None:
    """Time and plot expert layers over experts, capacities and ranks, with dispatch by sort and by one-hot tensors."""
    settings = MoESweepSettings(**options)
    run(replace(settings, **SMOKE) if settings.smoke else settings)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
