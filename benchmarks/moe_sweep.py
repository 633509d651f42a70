"""CPU time of expert layers over number of experts, capacity and ranks: `python -m benchmarks.moe_sweep`.

Each setting of the grid is one layer (see `moe_layer.py`), sorted and, where its tensors are not too large, one-hot.
All settings of a number of ranks take turns. Each rank has equally many tokens in all of them. A random router is
nearly balanced on random tokens and drops hardly any. `--skew` adds a common part to all tokens, so that some experts
get more work than others, as with real text.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks.expert_tables import show, sweep
from benchmarks.lib.expert_layer import (
    DEVICE,
    Bench,
    LayerSettings,
    Way,
    ceilings,
    check_ranks,
    one_hot_bytes,
    shape,
    too_large,
)
from benchmarks.lib.expert_picture import draw
from benchmarks.lib.expert_turns import Candidate, take_turns
from benchmarks.lib.options import COUNT
from benchmarks.records import Record, append_record, every_record, open_records, read_records, require_written
from cs336_systems.comm import CommError, Group, Place, distributed, find_place
from cs336_systems.comm.launch import run_command_on_ranks, run_ranks
from cs336_systems.cost.plots.style import HOW_TO_PLOT, can_plot, check_path, save
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.text import printable
from cs336_systems.presets import Mixture

RANKS = (1, 2, 4)
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
    one_hot_limit: float = setting(
        1.0, "Largest one-hot tensor in 10^9 bytes; above it, only the sort is timed.", type=click.FloatRange(0)
    )
    rounds: int = setting(5, "Turns of each setting.", type=COUNT)
    steps: int = setting(1, "Timed passes per turn.", type=COUNT)
    plot: Path | None = setting(None, "File for the picture.  [default: beside the records]")
    from_records: bool = setting(False, "Measure nothing; show and draw the newest records.")

    def way(self, experts: int, capacity: str) -> Way:
        """The sorted layer of a cell. Raises UserError for one that cannot be."""
        mixture, training = parse_capacity(capacity)
        return Way("sort", shape(experts, self.tokens, self.d_model, self.d_ff, mixture), training)


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


def make_candidates(settings: MoESweepSettings, group: Group, about: dict[str, Any]) -> list[Candidate]:
    """All cells of the grid for these ranks, seen by the gate, sorted and, where tensors are not too large, one-hot.
    Every rank decides alike. Raises WrongResultError for a cell whose two layers differ."""
    found = []
    count = len(settings.experts) * len(settings.capacity)
    with console.progress(f"{group.size()} rank(s), gate", count, quiet=group.rank() > 0) as advance:
        for experts in settings.experts:
            bench = Bench(settings.way(experts, "dropless").config, settings.skew, group)
            for capacity in settings.capacity:
                way, what = settings.way(experts, capacity), about | {"capacity": capacity}
                sort, one_hot = Candidate(bench, way, settings.steps, what), way.changed("einsum", dispatch="einsum")
                sort.baseline = sort
                fits = one_hot_bytes(one_hot, settings.tokens) <= 1e9 * settings.one_hot_limit
                fits = fits and not too_large(one_hot, settings.tokens, False, group)
                bench.check(way, settings.tokens if fits else None)
                found += [Candidate(bench, one_hot, settings.steps, what, sort)] * fits + [sort]
                advance(f"{experts} experts, {capacity}")
    return found


def work(place: Place, settings: MoESweepSettings, path: Path) -> None:
    """One rank's part; rank 0 appends the records to a file. Raises UserError, and as `make_candidates` does."""
    torch.set_num_threads(settings.threads)
    with distributed(DEVICE, "gloo", settings.timeout, place) as group:
        hardware = ceilings(group, 0.02 if settings.smoke else 0.3)
        candidates = make_candidates(settings, group, {"nodes": place.world_size // place.local_world_size})
        for record in take_turns("moe_sweep", candidates, settings.rounds, hardware, settings.commit):
            append_record(record, path)
    require_written(path)


def places(settings: MoESweepSettings, here: Place) -> list[Place]:
    """Rank 0's place in each number of ranks. Raises UserError for ranks that cannot be."""
    if here.world_size > 1 and settings.nproc:
        raise UserError(
            f"--nproc {settings.nproc[0]} would start ranks, but {here.world_size} were started already: drop it"
        )
    counts = settings.nproc or ((1, 2) if settings.smoke else RANKS)
    todo = [here] if here.world_size > 1 else [Place(world_size=count, local_world_size=count) for count in counts]
    for place in todo:
        for experts in settings.experts:
            check_ranks(experts, place.world_size)
    return todo


def measure(settings: MoESweepSettings, here: Place, path: Path) -> None:
    """Measure all cells on all numbers of ranks into a file of records. Raises UserError for what cannot be measured,
    before anything is."""
    for place in places(settings, here):
        if here.world_size > 1:
            work(here, settings, path)
        else:
            run_ranks(work, place.world_size, "cpu", settings, path)


def newest(records: list[Record]) -> list[Record]:
    """The records that differ from the last one in nothing but the grid."""
    grid = ("candidate", "experts", "slots", "capacity", "ranks")

    def rest(record: Record) -> dict[str, Any]:
        return {name: value for name, value in record.config.items() if name not in grid}

    return [record for record in records if rest(record) == rest(records[-1])]


def run(settings: MoESweepSettings) -> None:
    """Measure or read, print, and draw. Raises UserError for what cannot be done."""
    here, path = find_place(), settings.records_folder(DEVICE) / "moe_sweep.jsonl"
    picture = settings.plot or path.with_suffix(".svg")
    if settings.plot:
        check_path(settings.plot, "--plot")
    if settings.from_records:
        if not can_plot():
            raise UserError(HOW_TO_PLOT)
        if not path.exists():
            raise UserError(f"no records in {path}: measure first, or name their folder with --results")
        records = newest(read_records(path))
        show(sweep(records), records)
    else:
        places(settings, here)
        for experts in settings.experts:
            for capacity in settings.capacity:
                settings.way(experts, capacity)
        with TemporaryDirectory(prefix="moe-sweep-") as folder:
            if here.rank == 0:
                path = open_records(Path(folder) if settings.smoke else settings.records_folder(DEVICE), "moe_sweep")
            records, before = [], len(every_record(path)) if here.rank == 0 else 0
            try:
                measure(settings, here, path)
            except CommError as error:
                raise UserError(str(error)) from None
            finally:  # also after an error: show what was measured
                if here.rank == 0 and (records := every_record(path)[before:]):
                    show(sweep(records), records)
        if here.rank > 0:
            return
        if not settings.smoke:
            print(printable(f"{len(records)} records appended to {path}"))
    if settings.plot or not settings.smoke:
        print(printable(f"plot in {save(draw(records), picture, '--plot')}") if can_plot() else HOW_TO_PLOT)


@click.command()
@console.options(MoESweepSettings)
def main(**options: Any) -> None:
    """Time and plot expert layers over experts, capacities and ranks, with dispatch by sort and by one-hot tensors."""
    settings = MoESweepSettings(**options)
    run(replace(settings, **SMOKE) if settings.smoke else settings)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
