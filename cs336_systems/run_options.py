"""How far a run goes, where it begins, what it keeps, and how it goes on after an end that nobody had planned, as
options of a command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from cs336_systems.console import setting
from cs336_systems.errors import UserError

COUNT = click.IntRange(1)


@dataclass(frozen=True)
class RunOptions:
    """What a command line says of a run, whatever it learns."""

    steps: int = setting(300, "Optimizer steps in all, those before a resumption included.", type=COUNT)
    out: Path | None = setting(
        None, "Folder of the run: its checkpoints, its log, its lock.  [default: nothing is kept]"
    )
    save_every: int | None = setting(
        None,
        "Steps between two checkpoints; there is one at the end in any case.",
        type=COUNT,
    )
    keep: int = setting(2, "Checkpoints that stay; older ones are deleted.", type=click.IntRange(2))
    background_save: bool = setting(False, "Write a copy of the state while training goes on.")
    resume: bool = setting(False, "Go on from the newest checkpoint in --out that is whole, if there is one.")
    weights: Path | None = setting(None, "Begin with the parameters of a plain safetensors file.")
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop",
        "What to do when the loss or its gradient is inf or NaN: end, or leave the step out. With --precision fp16 the "
        "step is left out either way, and the loss scale lowered.",
    )
    log_file: Path | None = setting(
        None, "Where the log goes, one JSON line a record.  [default: train.jsonl in --out, or in runs]"
    )
    log_every: int = setting(10, "Steps between two log lines.", type=COUNT)

    @property
    def log_path(self) -> Path:
        """Where the log goes."""
        return self.log_file or (self.out or Path("runs")) / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        assert self.out is not None
        return self.out / "checkpoints"

    def check_run(self) -> None:
        """Raises UserError for settings that mean nothing without a folder."""
        given = {"--save-every": self.save_every, "--resume": self.resume, "--background-save": self.background_save}
        if self.out is None and (used := [name for name, value in given.items() if value]):
            raise UserError(f"{used[0]} needs a folder for the checkpoints: name one with --out DIR")
