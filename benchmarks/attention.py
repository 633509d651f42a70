"""Time of attention, kernel by kernel, and bytes that it keeps: `python -m benchmarks.attention --grid flash`."""

import sys
from dataclasses import dataclass, replace
from typing import Literal

import click

from benchmarks.lib.attention_candidates import CANDIDATES, Attention, AttentionTask
from benchmarks.lib.contest import OURS
from benchmarks.lib.kernel import BOTH, FORWARD, DtypeName
from benchmarks.lib.kernel_run import ONE_CANDIDATE, KernelSettings, run_kernels
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.sheets import BEST_OTHER, PEAKS, Sheet, metric
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, setting

Grid = Literal["course", "flash", "leaderboard"]
COURSE_SEQUENCES, FLASH_SEQUENCES = (256, 1024, 4096, 8192, 16384), tuple(2**power for power in range(7, 17))
DIMS = (16, 32, 64, 128)
GRID_CANDIDATES: dict[str, tuple[str, ...]] = {
    "course": (OURS, "eager", "compiled"),
    "flash": tuple(name for name in CANDIDATES if name != "compiled"),
    "leaderboard": tuple(name for name in CANDIDATES if name not in ("compiled", "tiled")),
}
ROUNDS = {"course": 100, "flash": 15, "leaderboard": 30}
LEADERBOARD = (
    AttentionTask("leaderboard", 16, 16384, 64, "bf16", causal=True),
    AttentionTask("leaderboard", 16, 16384, 128, "bf16", causal=False, backward=False),
)


def shape(record: Record) -> str:
    """The shape of a record."""
    config = record.config
    return "{batch} x {seq} x {dim} {dtype}".format(**config) + " causal" * config["causal"]


SHEET = Sheet(
    "batch x seq x dim",
    shape,
    (
        ("FLOP/s", metric("flops_per_s", format_count)),
        ("MFU", metric("mfu", "{:.0%}".format)),
        BEST_OTHER,
        ("kept", metric("before_backward_bytes", format_bytes)),
        *PEAKS,
    ),
    "FLOPs: 4 batch seq^2 dim forward, half with a causal mask; backward 2.5 x. predicted: FLOPs / the rate of the "
    "largest matrix product measured, MFU the FLOP/s over that rate. / best other: time over the fastest other's, in "
    "turns. kept: memory in use before backward (CPU: what forward keeps for it). "
    "predicted peak: inputs, outputs, gradients, and naive attention's scores",
    lambda config: bool(config["pass"] == (BOTH if config["keeps"] else FORWARD)),
)


@dataclass(frozen=True)
class AttentionSettings(KernelSettings):
    """Options of the command line, one field each."""

    candidate: tuple[str, ...] = setting((), ONE_CANDIDATE, type=click.Choice(list(CANDIDATES)))
    grid: Grid = setting("course", "Shapes of one of the write-up's tasks.")
    sequence: tuple[int, ...] = setting((), "Context instead of the grid's; may be repeated.", type=COUNT)
    dim: tuple[int, ...] = setting((), "Head dimension instead of the grid's; may be repeated.", type=COUNT)

    def tasks(self) -> list[AttentionTask]:
        """The shapes of the grid, short sequences first, from which the time of long ones is estimated."""
        if self.grid == "leaderboard":
            return [
                replace(task, seq=seq, dim=dim, dtype=self.dtype or task.dtype)
                for task in LEADERBOARD
                for seq in self.sequence or (task.seq,)
                for dim in self.dim or (task.dim,)
            ]
        flash = self.grid == "flash"
        dtypes: tuple[DtypeName, ...] = ("bf16", "fp32") if flash else ("fp32",)
        return [
            AttentionTask(self.grid, 1 if flash else 8, seq, dim, dtype, causal=flash)
            for dtype in ((self.dtype,) if self.dtype else dtypes)
            for dim in self.dim or DIMS
            for seq in self.sequence or (FLASH_SEQUENCES if flash else COURSE_SEQUENCES)
        ]


def run(settings: AttentionSettings) -> None:
    """Time attention forward and backward on the shapes of one of the write-up's tasks, with predictions."""
    if settings.smoke:
        sequence, dim = settings.sequence or (64,), settings.dim or (16,)
        settings = replace(settings, sequence=sequence, dim=dim, rounds=2)
    kernel = Attention(GRID_CANDIDATES[settings.grid], ROUNDS[settings.grid], f"the grid {settings.grid}")
    work = [(kernel, task) for task in settings.tasks()]
    run_kernels("attention", settings, work, SHEET)


main = command(AttentionSettings)(run)

if __name__ == "__main__":
    sys.exit(console.run_command(main))
