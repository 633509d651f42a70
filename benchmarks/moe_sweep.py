"""How do experts, their capacity and ranks change what an expert layer costs? `python -m benchmarks.moe_sweep`.

Every cell of the grid is one layer (see `moe_layer.py`), sorted and, where its tensors are not too large, one-hot.
All cells of a number of ranks take turns. Each rank has the same number of tokens in all of them. A random router is
nearly balanced on random tokens, and would drop next to nothing; `--skew` gives all tokens something in common, and so
some experts more work than others, as real text does.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks.allreduce_plot import HOW_TO_PLOT, can_plot
from benchmarks.moe_layer_options import COUNT, LayerSettings
from benchmarks.moe_layer_run import (
    DEVICE,
    Bench,
    Way,
    ceilings,
    check_ranks,
    one_hot_bytes,
    predict,
    shape,
    too_large,
)
from benchmarks.moe_layer_turns import Contender, play
from benchmarks.moe_sweep_plot import save
from benchmarks.moe_sweep_table import show
from benchmarks.records import Record, append_record, appended, open_records, read_records, require_written
from benchmarks.scaling_plot import SUFFIXES
from cs336_systems.comm import CommError, Group, Place, distributed, find_place
from cs336_systems.comm.launch import run_command_on_ranks, run_ranks
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.machine import environment
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
        "What an expert takes: `2x` twice tokens / experts, `0.05` such a share of the tokens, `dropless` all; may be "
        "repeated.",
    )
    nproc: tuple[int, ...] = setting(
        (), "Ranks to start, without torchrun; may be repeated.  [default: 1, then 2, then 4]", type=COUNT
    )
    skew: float = setting(0.5, "How much all tokens favour the same experts; 0: hardly.", type=click.FloatRange(0, 100))
    one_hot_limit: float = setting(
        1.0, "10^9 bytes of a one-hot tensor, above which a cell is only sorted.", type=click.FloatRange(0)
    )
    rounds: int = setting(5, "Turns of every cell.", type=COUNT)
    steps: int = setting(1, "Passes that count in a turn.", type=COUNT)
    plot: Path | None = setting(None, "File for the picture.  [default: beside the records]")
    from_records: bool = setting(False, "Measure nothing; table and picture of the newest records.")
    smoke: bool = setting(False, "Only show that it works: small, two ranks at most, one round, no record.")

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


@dataclass(frozen=True)
class SweepJob:
    """Work of every rank; `paths` are the files to which rank 0 appends its records."""

    settings: MoESweepSettings
    paths: tuple[Path, ...] = ()


@dataclass
class Cell:
    """A layer of the grid: sorted, and one-hot unless there is a reason against it."""

    capacity: str
    sort: Contender
    einsum: Contender
    reason: str = ""

    @property
    def contenders(self) -> list[Contender]:
        """Those that take turns."""
        return [self.sort] if self.reason else [self.einsum, self.sort]


def make_cells(settings: MoESweepSettings, group: Group) -> list[Cell]:
    """All cells for these ranks. Every rank decides alike."""
    cells = []
    for experts in settings.experts:
        bench = Bench(settings.way(experts, "dropless").config, settings.skew, group)
        for capacity in settings.capacity:
            sort = settings.way(experts, capacity)
            einsum = sort.changed("einsum", dispatch="einsum")
            reason = too_large(einsum, settings.tokens, False, group)
            if one_hot_bytes(einsum, settings.tokens) > 1e9 * settings.one_hot_limit:
                reason = "--one-hot-limit"
            pair = Contender(bench, sort, settings.steps), Contender(bench, einsum, settings.steps)
            cells.append(Cell(capacity, *pair, reason))
    return cells


def work(place: Place, job: SweepJob) -> None:
    """One rank's part. Raises UserError, and WrongResultError for a cell whose two layers differ."""
    settings = job.settings
    torch.set_num_threads(settings.threads)
    with distributed(DEVICE, "gloo", settings.timeout, place) as group:
        first, ranks = group.rank() == 0, group.size()
        hardware = ceilings(group, 0.02 if settings.smoke else 0.3)
        cells, title = make_cells(settings, group), f"{ranks} rank(s)"
        with console.progress(f"{title}, gate", len(cells), quiet=not first) as advance:
            for cell in cells:
                cell.sort.bench.check(cell.sort.way, None if cell.reason else settings.tokens)
                advance(f"{cell.sort.way.config.num_experts} experts, {cell.capacity}")
        contenders = [each for cell in cells for each in cell.contenders]
        said = {id(each): predict(each.way, settings.tokens, ranks, hardware, False) for each in contenders}
        expected = settings.rounds * settings.steps * sum(each["mean_ms"] for each in said.values()) / 1e3
        turns = (1 + settings.rounds) * len(contenders)
        with console.progress(f"{title}, taking turns", turns, expected, quiet=not first) as advance:
            play(contenders, settings.rounds, advance)
        found = {id(each): each.metrics() for each in contenders}
        if not first:
            return
        stamp = environment(DEVICE, settings.commit) | {"world_size": ranks, "backend": "gloo"}
        for cell in cells:
            about = {"capacity": cell.capacity, "nodes": ranks // place.local_world_size}
            for each in cell.contenders:
                record = each.record("moe_sweep", cell.sort, found[id(each)], said[id(each)], stamp, about)
                for path in job.paths:
                    append_record(record, path)
    for path in job.paths:
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


def measure(settings: MoESweepSettings, here: Place, scratch: Path) -> None:
    """Measure all cells on all numbers of ranks; records go to `scratch` and, unless it is a smoke run, to their file.

    Raises UserError for what cannot be measured, before anything is.
    """
    todo = places(settings, here)
    for experts in settings.experts:
        for capacity in settings.capacity:
            settings.way(experts, capacity)
    paths = [scratch]
    if here.rank == 0 and not settings.smoke:
        paths.append(open_records(settings.folder(), "moe_sweep"))
    job = SweepJob(settings, tuple(paths))
    for place in todo:
        if here.world_size > 1:
            work(here, job)
        else:
            run_ranks(work, place.world_size, "cpu", job)


def newest(records: list[Record]) -> list[Record]:
    """The records that differ from the last one in nothing but the grid."""
    grid = ("candidate", "experts", "slots", "capacity", "ranks")

    def rest(record: Record) -> dict[str, Any]:
        return {name: value for name, value in record.config.items() if name not in grid}

    return [record for record in records if rest(record) == rest(records[-1])]


def run(settings: MoESweepSettings) -> None:
    """Measure or read, print, and draw. Raises UserError for what cannot be done."""
    here, path = find_place(), settings.folder() / "moe_sweep.jsonl"
    picture = settings.plot or (None if settings.smoke else path.with_suffix(".svg"))
    if settings.plot and settings.plot.suffix not in SUFFIXES:
        raise UserError(f"--plot {settings.plot} should end in {', '.join(SUFFIXES)}")
    if not can_plot() and (settings.plot or settings.from_records):
        raise UserError(HOW_TO_PLOT)
    if settings.from_records:
        if not path.exists():
            raise UserError(f"no records in {path}: measure first, or name their folder with --results")
        show(records := newest(read_records(path)))
    else:
        with TemporaryDirectory(prefix="moe-sweep-") as folder:
            scratch = Path(folder, "moe_sweep.jsonl")
            scratch.touch()
            try:
                measure(settings, here, scratch)
            except CommError as error:
                raise UserError(str(error)) from None
            finally:
                if here.rank == 0 and (records := read_records(scratch)):
                    show(records)
        if here.rank > 0:
            return
    if not settings.smoke and not settings.from_records:
        print(appended(len(records), path))
    if picture:
        print(printable(f"plot in {save(records, picture)}") if can_plot() else HOW_TO_PLOT)


@click.command()
@console.options(MoESweepSettings)
def main(**options: Any) -> None:
    """Time expert layers of several sizes, capacities and numbers of ranks, sorted and one-hot; with a plot."""
    settings = MoESweepSettings(**options)
    run(replace(settings, **SMOKE) if settings.smoke else settings)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
