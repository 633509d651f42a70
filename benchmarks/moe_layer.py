"""CPU time of an expert layer with sorted and with one-hot dispatch: `python -m benchmarks.moe_layer`, or torchrun.

Both have the same weights, tokens and slots and give the same result; a layer without a capacity stands beside them.
All take turns on the same ranks. CPU time is compared: that of all threads of a rank's process, including the kernel's
work for it. Wall time would also count other processes on the cores, waiting for other ranks, and ranks that share a
core, which are no properties of the formulation.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click

from benchmarks.lib.expert_layer import Bench, Candidate, LayerSettings, Way, cell, work
from benchmarks.lib.expert_tables import layers, show
from benchmarks.lib.launcher import rank_counts, run
from benchmarks.lib.options import COUNT, command
from cs336_systems.comm import Group
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting
from cs336_systems.presets import Mixture

SMOKE: dict[str, Any] = {"experts": 8, "tokens": 64, "d_model": 16, "d_ff": 32, "rounds": 2, "steps": 1}


@dataclass(frozen=True)
class MoELayerSettings(LayerSettings):
    """Options of the command line, one field each."""

    benchmark = "moe_layer"
    experts: int = setting(512, "Experts of the layer.", type=COUNT)
    eval_fraction: float = setting(
        0.05, "Capacity of an expert, as a share of a rank's tokens.", type=click.FloatRange(0, 1, min_open=True)
    )
    nproc: int | None = setting(None, "Ranks to start, without torchrun.  [default: 2]", type=COUNT)
    rounds: int = setting(7, "Turns of each candidate.", type=COUNT)
    steps: int = setting(3, "Timed passes per turn.", type=COUNT)

    def sort(self) -> Way:
        """The sorted layer. Raises UserError for one that cannot be."""
        return self.sorted(self.experts, Mixture(eval_fraction=self.eval_fraction))

    def enter(self, group: Group, about: dict[str, Any]) -> list[Candidate]:
        """See there; the gate also looks at a single slot per expert, which drops tokens. Raises UserError if the
        one-hot tensors do not fit."""
        sort, about = self.sort(), about | {"eval_fraction": self.eval_fraction, "link": ""}
        bench = Bench(sort.config, 0.0, group)
        found = cell(bench, sort, about)
        if len(found) < 2:
            raise UserError(f"{sort.too_large(self.tokens, group)}: choose fewer experts, tokens or slots")
        bench.check(sort.changed("sort, one slot", eval_fraction=1 / self.tokens))
        dropless = sort.changed("sort, dropless", eval_fraction=0.0)
        bench.check(dropless)
        return [*found, Candidate(bench, dropless, about, found[1])]


@command(MoELayerSettings)
def main(settings: MoELayerSettings) -> None:
    """Time one expert layer in turn with dispatch by sort, by one-hot tensors, and without a capacity limit."""
    if settings.smoke:
        settings = replace(settings, **SMOKE)
    settings.sort()
    counts = rank_counts([settings.nproc] if settings.nproc else [], [2], [settings.experts])
    run(settings, settings.benchmark, counts, partial(show, layers), work)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
