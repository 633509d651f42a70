"""Times of RMSNorm and LayerNorm beside that of a copy: `python -m benchmarks.norms`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
import torch

from benchmarks.lib.kernel import BOTH, DtypeName, SizedTask
from benchmarks.lib.kernel_run import ONE_CANDIDATE, KernelSettings, run_kernels
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.row_kernels import Norm
from benchmarks.lib.sheets import BEST_OTHER, HOST, Sheet, metric
from cs336_systems.host import console
from cs336_systems.host.console import setting

NORM = Norm()
COURSE_ROWS, COURSE_COLUMNS = 50_000, (1024, 2048, 4096, 8192)
LLM_SHAPES = (
    (4096, 1024), (4096, 4096), (4096, 8192), (8192, 8192), (16384, 4096), (32768, 1024), (32768, 2048), (32768, 4096),
    (32768, 8192), (32768, 16384), (32768, 32768), (32768, 65536), (16384, 131072), (8192, 262144),
)  # fmt: skip
CPU_ELEMENTS = 2**24  # of x on a CPU, unless --rows says otherwise
SHEET = Sheet(
    "rows x columns",
    lambda record: "{rows} x {columns} {dtype}".format(**record.config),
    (
        ("GB/s", metric("bytes_per_s", lambda rate: f"{rate / 1e9:.4g}")),
        ("of copy", metric("copy_fraction_median", "{:.0%}".format)),
        BEST_OTHER,
        HOST,
    ),
    "GB/s: x and y counted once (backward: x, dy and dx), weights, 1 / rms and partial weight gradients, over the "
    "median. of copy: the time of a copy that moves as many bytes, in turn with the others, over the candidate's. "
    "/ best other: time over the fastest other's. predicted: bytes / the rate of a large copy. host, on a GPU: for how "
    "long a call keeps the CPU busy",
    lambda config: bool(config["pass"] == BOTH or config["dtype"] == "fp32"),  # forward alone as the course asks
)


@dataclass(frozen=True)
class NormSettings(KernelSettings):
    """Options of the command line, one field each."""

    candidate: tuple[str, ...] = setting((), ONE_CANDIDATE, type=click.Choice(list(NORM.candidates)))
    rows: int | None = setting(None, "Rows.  [default: each shape's, on a CPU fewer: 16 M elements]", type=COUNT)
    # Of two columns a LayerNorm's gradient is zero but for rounding, and of one an RMSNorm's: no gate could compare it.
    columns: tuple[int, ...] = setting((), "Columns, at least 3; may be repeated.", type=click.IntRange(3))

    def tasks(self, device: torch.device) -> list[SizedTask]:
        """The passes to measure: the write-up's and a language model's, or those that were asked for."""
        course = [(self.rows or COURSE_ROWS, columns) for columns in self.columns or COURSE_COLUMNS]
        sizes: dict[DtypeName, Sequence[tuple[int, int]]] = {self.dtype or "fp32": course}
        if not self.rows and not self.columns:
            sizes = {"fp32": course, "bf16": LLM_SHAPES}
        found = dict[SizedTask, None]()
        for dtype, pairs in sizes.items():
            for rows, columns in pairs if self.dtype in (None, dtype) else ():
                fewer = device.type == "cpu" and not self.rows
                kept = min(rows, max(1, CPU_ELEMENTS // columns)) if fewer else rows
                found |= dict.fromkeys(SizedTask(NORM.name, (kept, columns), dtype, what) for what in NORM.whats)
        return list(found)


@command(NormSettings)
def main(settings: NormSettings) -> None:
    """Time normalisations forward and backward, each beside a copy of the same bytes and a prediction."""
    if settings.smoke:
        settings = replace(settings, rows=settings.rows or 64, columns=settings.columns or (128,), rounds=2)
    device = settings.on
    remark = "" if settings.rows else f"on a CPU rows are scaled down to {CPU_ELEMENTS // 2**20} M elements a tensor"
    run_kernels("norms", settings, [(NORM, task) for task in settings.tasks(device)], SHEET, remark)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
