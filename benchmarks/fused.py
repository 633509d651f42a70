"""Times of fused kernels beside a copy, or beside matrix products alone: `python -m benchmarks.fused`."""

import sys
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import click
import torch

from benchmarks.lib.fused_candidates import KERNELS
from benchmarks.lib.kernel import FORWARD, SizedTask
from benchmarks.lib.kernel_run import ONE_CANDIDATE, KernelSettings, run_kernels
from benchmarks.lib.options import command
from benchmarks.lib.sheets import BEST_OTHER, HOST, PEAKS, Sheet, metric
from benchmarks.records import Record
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_count, setting
from cs336_systems.host.machine import choose_device

KNOWN = list(dict.fromkeys(chain.from_iterable(kernel.candidates for kernel in KERNELS.values())))


def shape(record: Record) -> str:
    """The kernel and the sizes of a record."""
    config = record.config
    sizes = " x ".join(str(config[name]) for name in KERNELS[config["kernel"]].sizes_are)
    return f"{config['kernel']} {sizes} {config['dtype']}"


def rate(record: Record) -> str:
    """FLOP/s of a kernel with matrix products, bytes/s of the others."""
    unit = ("flops_per_s", "FLOP/s") if record.metrics.get("flops") else ("bytes_per_s", "B/s")
    return metric(unit[0], lambda value: f"{format_count(value)}{unit[1]}")(record)


SHEET = Sheet(
    "sizes",
    shape,
    (
        ("rate", rate),
        ("of floor", metric("floor_fraction_median", "{:.0%}".format)),
        BEST_OTHER,
        HOST,
        *PEAKS,
    ),
    "of floor: the time of the floor, in turn with the candidates, over the candidate's. The floor is a copy of as many"
    " bytes, for cross-entropy (tokens x d_model x vocab) the matrix products alone, of which 80% are the goal. "
    "rate: counts no more than what the floor does, bytes or FLOPs. adamw (layers x d_model x vocab of a GPT-2): one "
    "step of all its parameters. predicted: FLOPs / the rate of the largest product "
    "+ bytes / the rate of a large copy. / best other: time over the fastest other's. host, on a GPU: for how long a "
    "call keeps the CPU busy. predicted peak: inputs, results, gradients, state, and logits as far as they are kept",
    lambda config: bool(config["pass"] != FORWARD),
)
KERNEL_NAMES = click.Choice(list(KERNELS))


@dataclass(frozen=True)
class FusedSettings(KernelSettings):
    """Options of the command line, one field each."""

    candidate: tuple[str, ...] = setting((), ONE_CANDIDATE, type=click.Choice(list(KNOWN)))
    kernel: tuple[str, ...] = setting((), "Only this kernel; may be repeated.  [default: all]", type=KERNEL_NAMES)

    def kernels(self) -> list[str]:
        """The kernels that were asked for."""
        return [name for name in KERNELS if name in (self.kernel or KERNELS)]

    def tasks(self, device: torch.device) -> list[SizedTask]:
        """Measurements in order: all kernels' first shapes, then the second ones, in case the budget ends."""
        columns = []
        for name in self.kernels():
            kernel, dtype = KERNELS[name], self.dtype or KERNELS[name].dtypes[0]
            shapes = (kernel.tiny,) if self.smoke else kernel.cpu_sizes if device.type == "cpu" else kernel.sizes
            whats = kernel.whats if dtype in kernel.dtypes else ()
            columns.append([[SizedTask(name, shape, dtype, what) for what in whats] for shape in shapes])
        return [task for row in zip_longest(*columns, fillvalue=[]) for tasks in row for task in tasks]


@command(FusedSettings)
def main(settings: FusedSettings) -> None:
    """Time fused kernels, the unfused code, and a lower bound (a copy, or the matrix products), beside predictions."""
    if settings.smoke:
        settings = replace(settings, rounds=2)
    device = choose_device(settings.device)
    work = [(KERNELS[task.kernel], task) for task in settings.tasks(device)]
    if not work:
        raise UserError(f"nothing to measure: {', '.join(settings.kernels())} is not measured in {settings.dtype}")
    remark = "" if settings.smoke else "on a CPU shapes are scaled down to what it computes in a moment"
    run_kernels("fused", settings, work, SHEET, remark)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
