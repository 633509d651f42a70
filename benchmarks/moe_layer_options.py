"""Options that all benchmarks of one expert layer have: its size, how it is run, where records go."""

from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.moe_layer_run import DEVICE
from benchmarks.records import results_folder
from cs336_systems.comm.startup import TIMEOUT
from cs336_systems.host.console import PATIENCE, setting

COUNT = click.IntRange(1)


@dataclass(frozen=True)
class LayerSettings:
    """Options that every rank needs, one field each."""

    tokens: int = setting(2048, "Tokens of each rank.", type=COUNT)
    d_model: int = setting(64, "Width of a token.", type=COUNT)
    d_ff: int = setting(256, "Hidden width of an expert.", type=COUNT)
    threads: int = setting(1, "Threads of each rank; idle ones would spin, and count as CPU time.", type=COUNT)
    timeout: float = setting(TIMEOUT, "Seconds that ranks wait for each other.", PATIENCE)
    results: Path | None = setting(None, "Folder of the records.  [default: runs/results/<machine>]")
    machine: str | None = setting(None, "Name of this machine in the records.  [default: its device's]")
    commit: str | None = setting(None, "Commit to record, for a copy without its .git.")

    def folder(self) -> Path:
        """Where the records go."""
        return results_folder(self.results, self.machine, DEVICE)
