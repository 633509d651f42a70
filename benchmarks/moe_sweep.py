"""CPU time of expert layers over number of experts, capacity and ranks: `python -m benchmarks.moe_sweep`.

Each setting of the grid is one layer (see `moe_layer.py`), sorted and, where its tensors are not too large, one-hot.
All settings of a number of ranks take turns. Each rank has equally many tokens in all of them. A random router is
nearly balanced on random tokens and drops hardly any. `--skew` adds a common part to all tokens, so that some experts
get more work than others, as with real text.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import click

from benchmarks.expert_tables import show, sweep
from benchmarks.lib.expert_layer import DEVICE, Bench, Candidate, LayerSettings, Way, cell, work
from benchmarks.lib.expert_picture import draw
from benchmarks.lib.launcher import rank_counts, run
from benchmarks.lib.options import COUNT
from cs336_systems.comm import Group
from cs336_systems.comm.launch import run_command_on_ranks
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
        return self.sorted(experts, *parse_capacity(capacity))


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


@click.command()
@console.options(MoESweepSettings)
def main(**options: Any) -> None:
    """Time and plot expert layers over experts, capacities and ranks, with dispatch by sort and by one-hot tensors."""
    settings = MoESweepSettings(**options)
    if settings.smoke:
        settings = replace(settings, **SMOKE)
    counts = rank_counts(settings.nproc, (1, 2) if settings.smoke else (1, 2, 4), settings.experts)
    for experts, capacity in product(settings.experts, settings.capacity):
        settings.cell(experts, capacity)
    shown = run(settings, "moe_sweep", counts, partial(show, sweep), work, partial(enter, settings))
    if shown and not settings.smoke:
        picture = settings.records_folder(DEVICE) / "moe_sweep.svg"
        print(printable(f"plot in {save(draw(shown), picture, '--results')}") if can_plot() else HOW_TO_PLOT)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
