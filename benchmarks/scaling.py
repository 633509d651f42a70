"""Scaling of training over layouts of tensor, pipeline and data parallelism: `python -m benchmarks.scaling`.

Every layout of a grid trains the same model with the real loop, in turn; a layout whose losses differ from those of
one rank gets no speed. `python -m benchmarks.scaling import-log FILE` makes the same tables of Megatron-LM's logs.
"""

import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Self, get_args

import click

from benchmarks.harness import ratios
from benchmarks.lib.launcher import Answer
from benchmarks.lib.options import COUNT, refuse_ignored
from benchmarks.lib.scaling_anomalies import anomalies
from benchmarks.lib.scaling_logs import read_runs
from benchmarks.lib.scaling_plot import draw
from benchmarks.lib.scaling_record import make_record, peak_flops, pipeline_bubble, study_run
from benchmarks.lib.scaling_study import Layout, LayoutOptions, Study
from benchmarks.lib.scaling_tables import PUBLISHED, run_sheets, sheets
from benchmarks.lib.sheets import show
from benchmarks.records import Record, shown
from cs336_systems.comm import find_place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.cost import backward_flops, forward_flops
from cs336_systems.cost.flops import recompute_flops
from cs336_systems.cost.plots.style import check_path, save
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import finite, flag, setting
from cs336_systems.host.text import printable
from cs336_systems.presets import Precision, Recompute, preset
from cs336_systems.schedule.lists import ScheduleName

# What makes a smoke run short, in place of the defaults; its batch fits four stages.
SMOKE: dict[str, Any] = {"grid": "1x1x1,1x2x1", "context": 32, "rounds": 1, "steps": 1, "warmup": 1}
SMOKE |= {"micro_batch_size": 1, "global_batch_per_dp": 4}
# A multiple of 128, to which tensor parallelism pads: all layouts then have the same logits to compute.
VOCABULARY = 512


@dataclass(frozen=True)
class ScalingSettings(LayoutOptions):
    """Options of the command line, one field each."""

    grid: str = setting("1x1x1,2x1x1,1x2x1,1x1x2,2x2x1,2x2x2", "Layouts, each tp x pp x dp.")
    objective: Literal["lm", "bert"] = setting("bert", "Predict the next token, or masked tokens and sentence order.")
    context: int | None = setting(None, "Tokens in a sequence.  [default: the preset's]", type=COUNT)
    micro_batch_size: int = setting(4, "Sequences that pass through the model at once.", type=COUNT)
    global_batch_per_dp: int | None = setting(
        None, "Weak scaling: sequences of each data-parallel replica in a step.  [default: 16]", type=COUNT
    )
    global_batch_size: int | None = setting(None, "Strong scaling: sequences of all replicas in a step.", type=COUNT)
    precision: tuple[str, ...] = setting(
        ("fp32",), "Precision; may be repeated, to run the whole grid in each.", type=click.Choice(get_args(Precision))
    )
    zero: int = setting(0, "ZeRO stage of layouts with data-parallel ranks.", type=click.IntRange(0, 3))
    schedule: ScheduleName | None = setting(None, "Pipeline schedule.")
    chunks: int = setting(1, "Groups of blocks per pipeline stage, in layouts with stages.", type=COUNT)
    sequence_parallel: bool = setting(False, "Split activations along the sequence, in layouts with tp ranks.")
    recompute: Recompute = setting("none", "Activations that backward recomputes instead of keeping them.")

    words: ClassVar[dict[str, str]] = {
        " (--batch-size)": "",
        "raise --tp, --pp or --zero": "choose a smaller --size or fewer ranks in --grid, which share this memory (on "
        "GPUs raise tp, pp or --zero)",
    }

    def shortened(self, alone: bool) -> Self:
        """The settings of a smoke run: what the user has changed stays, and so do layouts of torchrun's ranks."""
        less = SMOKE | ({} if alone else {"grid": self.grid})
        return self.smaller(**(less | {"global_batch_per_dp": None} if self.global_batch_size else less))

    def layouts(self, started: int) -> list[Layout]:
        """All layouts to measure, in every precision, seen to divide; under torchrun those of as many ranks as it
        started. Raises UserError for the first that cannot be. Options that a layout does not use keep their defaults.
        """
        if self.global_batch_size and self.global_batch_per_dp:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} keeps the batch, --global-batch-per-dp "
                f"{self.global_batch_per_dp} lets it grow with the replicas: give one of the two"
            )
        grid = [each for each in parse_grid(self.grid) if started in (1, each[0] * each[1] * each[2])]
        if not grid:
            raise UserError(f"{started} ranks were started, and --grid {self.grid} has no layout of {started}")
        vocabulary = VOCABULARY if self.objective == "bert" and preset(self.size).model.causal else None
        return [
            self.layout(
                f"{tp}x{pp}x{dp}" + ("" if precision == "fp32" else f" {precision}"), tp * pp * dp,
                objective=self.objective, context=self.context, vocab_size=vocabulary, data=("random",),
                batch_size=self.global_batch_size or (self.global_batch_per_dp or 16) * dp,
                micro_batch_size=self.micro_batch_size, recompute=self.recompute, tp=tp, pp=pp, dp=dp,
                precision=precision, zero=self.zero if dp > 1 else 0, schedule=self.schedule if pp > 1 else None,
                chunks=self.chunks if pp > 1 else 1, sequence_parallel=self.sequence_parallel and tp > 1,
            )
            for precision in dict.fromkeys(self.precision) for tp, pp, dp in grid
        ]  # fmt: skip


def parse_grid(text: str) -> list[tuple[int, int, int]]:
    """`1x1x1,2x2x2` -> [(1, 1, 1), (2, 2, 2)], each tp, pp, dp, without repetitions. Raises UserError."""
    found = []
    for word in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", word)
        if match is None:
            raise UserError(f"--grid has {word!r}, which is no layout: write tp x pp x dp, such as 2x1x1,2x2x2")
        found.append((int(match[1]), int(match[2]), int(match[3])))
    if not found:
        raise UserError("--grid names no layout: write some, such as 1x1x1,2x1x1,2x2x2")
    return list(dict.fromkeys(found))


def efficiencies(layout: Layout, base: Layout) -> dict[str, float]:
    """Throughput of a rank over that in the base, round by round: median and quartiles."""
    cost = [[ms * each.ranks / each.shape.global_batch for ms in each.turn_ms()] for each in (base, layout)]
    return {name.replace("ratio", "efficiency"): value for name, value in ratios(*cost).items()}


def layout_record(settings: ScalingSettings, layout: Layout, base: Layout | None, peak: Answer) -> Record:
    """The record of a layout, without anomalies among its flags; `base` is what its efficiency is relative to."""
    parallel, config, shape = layout.recipe.parallel, layout.config, layout.shape
    what = {
        "size": settings.size, "objective": settings.objective, "d_model": config.d_model, "d_ff": config.d_ff,
        "num_layers": config.num_layers, "vocab_size": config.vocab_size, "context": layout.seq,
        "micro_batch_size": settings.micro_batch_size, "recompute": settings.recompute,
        "scaling": "strong" if settings.global_batch_size else "weak", "data": "random",
        "base": base.label.split()[0] if base else None, "device": settings.on.type,
        "backend": settings.joined_by(max(2, layout.ranks)), "layout": layout.label.split()[0],
        "tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "ranks": layout.ranks,
        "global_batch_size": shape.global_batch, "precision": layout.precision, "schedule": shape.schedule,
        "chunks": parallel.chunks, "sequence_parallel": parallel.sequence_parallel, "zero": parallel.zero,
    }  # fmt: skip
    record = make_record("scaling", layout, base, peak, settings, what)
    if base is None or not record.samples_ms:
        return record
    # The turn of median speed, the slower of two: its time and its timers are of one window.
    typical = sorted(layout.turns, key=lambda turn: fmean(turn["samples_ms"]))[len(layout.turns) // 2]
    size = config, shape.global_batch, layout.seq
    step_ms, together = fmean(typical["samples_ms"]), peak_flops(peak, layout.ranks)
    flops = sum(forward_flops(*size).values()) + backward_flops(*size)
    metrics = record.metrics | efficiencies(layout, base) | {
        "ms_per_sample": step_ms / shape.global_batch,
        "tokens_per_s": 1e3 * shape.global_batch * layout.seq / step_ms,
        "mfu": 1e3 * flops / step_ms / together,
        "hfu": 1e3 * (flops + recompute_flops(*size)) / step_ms / together,
        "peak_flops": together,
        "bubble": pipeline_bubble(typical["timers_ms"], parallel.pp),
    }  # fmt: skip
    metrics |= {name: typical[name] for name in ("timers_ms", "memory_bytes", "gpu_utilisation")}
    return replace(record, metrics=metrics)


def flag_anomalies(records: list[Record]) -> None:
    """Add the anomalies of some layouts to the flags of those that they are about."""
    measured = [record for record in records if record.samples_ms]
    for anomaly in anomalies([study_run(record) for record in measured]):
        for index in anomaly.runs:
            measured[index].flags.append(anomaly.text)


def measure(settings: ScalingSettings) -> None:
    """Check the layouts, measure, record, print.

    Raises UserError for what cannot be measured, and at the end, of the class WrongResultError, if a layout did not
    pass the gate.
    """
    here = find_place()
    layouts = settings.layouts(here.world_size)
    if settings.smoke:  # what cannot be measured cannot be tried either
        settings = settings.shortened(here.world_size == 1)
        layouts = settings.layouts(here.world_size)
    study = Study(settings, layouts, here)
    study.run("scaling", partial(layout_record, settings), sheets, flag_anomalies)
    study.require_right()


@click.command("import-log")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--peak-tflops", type=float, callback=finite, help="TFLOP/s of a device, if logs lack it: 312 for A100.")
@click.option("--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Picture: .png, .svg or .pdf.")
def import_log(files: tuple[Path, ...], peak_tflops: float | None, picture: Path | None) -> None:
    """Print tables of the runs in logs of Megatron-LM and of this project's train (the .jsonl of --log-file).

    Without FILES, show the published study of BERT-345M.
    """
    runs = read_runs(files or (PUBLISHED,))
    if peak_tflops is not None:
        if not peak_tflops > 0:
            raise UserError(f"--peak-tflops must be positive, not {peak_tflops:g}")
        runs = [replace(run, peak_flops=run.peak_flops or 1e12 * peak_tflops) for run in runs]
    if picture:
        check_path(picture, "--plot")
    with shown(" ".join(map(str, files)), "a run in {} lacks or garbles a field that is shown"):
        show(run_sheets(runs))
        if picture:
            print(printable(str(save(draw(runs), picture, "--plot"))))


@click.group(invoke_without_command=True)
@console.options(ScalingSettings)
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Train in each layout of a grid, in turn; print times, efficiency, bubbles, memory and anomalies."""
    if context.invoked_subcommand is None:
        measure(ScalingSettings(**options))
    elif given := refuse_ignored({}):
        raise UserError(f"{context.invoked_subcommand} measures nothing: drop {flag(min(given))}")


main.add_command(import_log)

if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
