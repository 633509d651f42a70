"""Scaling of training over layouts of tensor, pipeline and data parallelism: `python -m benchmarks.scaling`.

Every layout of a grid trains the same model with the real loop, in turn; a layout whose losses differ from those of
one rank gets no speed. `python -m benchmarks.scaling import-log FILE` makes the same tables of Megatron-LM's logs.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import WrongResultError
from benchmarks.lib.scaling_anomalies import anomalies
from benchmarks.lib.scaling_logs import read_runs
from benchmarks.lib.scaling_measure import Answer, Launcher, ScalingTask, measure_peak, take_turn
from benchmarks.lib.scaling_options import ScalingSettings, parse_grid
from benchmarks.lib.scaling_plot import draw
from benchmarks.lib.scaling_record import Layout, degrees, gate, make_record, study_run
from benchmarks.lib.scaling_run import ScalingRun
from benchmarks.lib.scaling_tables import PUBLISHED, markdown, show_records, show_runs, tables_apart
from benchmarks.records import Record
from cs336_systems.comm import Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.comm.startup import choose_backend
from cs336_systems.cost.capacity import require_layout_fits
from cs336_systems.cost.plots.style import check_path, save
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import finite
from cs336_systems.host.machine import usable_memory
from cs336_systems.host.text import printable
from cs336_systems.train.options import ParallelOptions
from cs336_systems.train.recipe import Recipe

GATE_STEPS = 2
PROBE_SECONDS = 0.3


def plan(settings: ScalingSettings, here: Place) -> list[Layout]:
    """All layouts to measure, in every precision, checked to divide; under torchrun those with its number of ranks.

    Raises UserError for the first that cannot be, before anything starts.
    """
    grid = [(tp * pp * dp, (tp, pp, dp)) for tp, pp, dp in parse_grid(settings.grid)]
    if (started := here.world_size) > 1:
        grid = [each for each in grid if each[0] == started]
        if not grid:
            raise UserError(f"{started} ranks were started, and --grid {settings.grid} has no layout of {started}")
    layouts = []
    for precision in dict.fromkeys(settings.precision):
        for ranks, chosen in grid:
            recipe = settings.recipe(chosen, precision)
            try:
                config = recipe.model_config()
                recipe.check(config, ranks)
            except UserError as error:
                raise UserError(f"layout {degrees(recipe)}: {error}") from None
            layouts.append(Layout(recipe, ranks, config))
    return layouts


def check_gpus(layouts: list[Layout], settings: ScalingSettings, device: torch.device, here: Place) -> None:
    """Mark the layouts that have more ranks than GPUs. Raises UserError for a backend that serves none."""
    choose_backend(settings.backend, device, Place(0, 1))
    for layout in layouts:
        local = here.local_world_size if here.world_size > 1 else layout.ranks
        try:
            choose_backend(settings.backend, device, Place(0, layout.ranks, 0, local))
        except UserError as error:
            layout.wrong, layout.status = str(error), "unsupported"


def check_memory(layouts: list[Layout], device: torch.device) -> None:
    """Raises UserError for the first layout of which a rank does not fit, before any rank starts."""
    for layout in (each for each in layouts if not each.wrong):
        usable = usable_memory(device) // (layout.ranks if device.type == "cpu" else 1)
        parts = max((seen.memory() for seen in layout.stages), key=lambda each: sum(each.values()))
        shape, name = layout.recipe.layout(layout.ranks), layout.recipe.model.name
        require_layout_fits(name, layout.config, shape, layout.seq, parts, usable)


class Study:
    """The turns of a grid of layouts. Every rank that torchrun started constructs it and calls its methods alike."""

    def __init__(self, settings: ScalingSettings, layouts: list[Layout], launcher: Launcher) -> None:
        self.settings, self.layouts, self.launcher = settings, layouts, launcher
        self.quiet = launcher.here.rank > 0
        self.seen: dict[tuple[Recipe, int], Answer] = {}

    def first_steps(self, recipe: Recipe, ranks: int) -> Answer:
        """Two steps, which are not timed; one run serves all layouts that are compared to it."""
        key = recipe, ranks
        if key not in self.seen:
            self.seen[key] = self.turn(ScalingTask(recipe, warmup=GATE_STEPS, threads=self.settings.threads), ranks)
        return self.seen[key]

    def turn(self, task: ScalingTask, ranks: int) -> Answer:
        """One turn of a layout, which an error names."""
        try:
            return self.launcher.run(take_turn, task, ranks)
        except UserError as error:
            raise UserError(f"layout {degrees(task.recipe)}: {error}") from None

    def check(self) -> None:
        """The gate: every layout against one rank with the same global batch, in fp32 and in its own precision."""
        with console.progress("gate", len(self.layouts), quiet=self.quiet) as advance:
            for layout in self.layouts:
                for precision in dict.fromkeys(("fp32", layout.recipe.model.precision)):
                    if layout.wrong:
                        break
                    recipe = layout.recipe.change(precision=precision)
                    want = self.first_steps(replace(recipe, parallel=ParallelOptions(dp=1)), 1)
                    layout.gate = self.first_steps(recipe, layout.ranks)
                    layout.wrong = gate(layout.gate, want, layout.config, recipe)
                advance(layout.label)

    def play(self) -> None:
        """Let every layout that is right take a turn in each round."""
        settings = self.settings
        good = [layout for layout in self.layouts if not layout.wrong]
        with console.progress("taking turns", len(good) * settings.rounds, quiet=self.quiet) as advance:
            for _ in range(settings.rounds):
                for layout in good:
                    task = ScalingTask(layout.recipe, settings.steps, settings.warmup, settings.threads)
                    layout.turns.append(self.turn(task, layout.ranks))
                    advance(layout.label)

    def records(self) -> list[Record]:
        """A record for each layout, the ones that are not right included, with the anomalies among their flags."""
        settings, found = self.settings, list[Record]()
        budget, together = 0.02 if settings.smoke else PROBE_SECONDS, self.launcher.here.world_size > 1
        for precision in dict.fromkeys(layout.recipe.model.precision for layout in self.layouts):
            layouts = [layout for layout in self.layouts if layout.recipe.model.precision == precision]
            task = ScalingTask(layouts[0].recipe, 0, 0, settings.threads, budget, settings.commit, together)
            peak = self.launcher.run(measure_peak, task, 1)
            base = next((layout for layout in layouts if not layout.wrong), None)
            records = [make_record(layout, base, peak, settings) for layout in layouts]
            measured = [record for record in records if record.samples_ms]
            for anomaly in anomalies([study_run(record) for record in measured]):
                for index in anomaly.runs:
                    measured[index].flags.append(anomaly.text)
            found += records
        return found


def measure(settings: ScalingSettings) -> None:
    """Check the layouts, measure, record, print.

    Raises UserError for what cannot be measured, and at the end, of the class WrongResultError, if a layout did not
    pass the gate.
    """
    here = find_place()
    kind = settings.device or ("cuda" if torch.cuda.device_count() else "cpu")
    settings, device = replace(settings, device=kind), torch.device(kind)
    if settings.plot:
        check_path(settings.plot, "--plot")
    layouts = plan(settings, here)
    if settings.smoke:  # after the plan: a smoke run refuses the same layouts
        settings = settings.shortened(here.world_size == 1)
        layouts = plan(settings, here)
    check_gpus(layouts, settings, device, here)
    check_memory(layouts, device)
    recorder = settings.recorder("scaling", device) if here.rank == 0 else None
    study = Study(settings, layouts, Launcher(here, kind))
    study.check()
    study.play()
    records = study.records()
    if recorder is None:
        return
    show_records(records)
    recorder.keep(*records)
    recorder.tell()
    measured = tables_apart([record for record in records if record.samples_ms]) if settings.plot else []
    for mine in measured:
        runs = [study_run(record) for record in mine]
        name = f"-{mine[0].config['precision']}" if len(measured) > 1 else ""
        plot(runs, settings.plot.with_stem(f"{settings.plot.stem}{name}"), runs[0])  # type: ignore[union-attr]
    if wrong := [f"{layout.label}: {layout.wrong}" for layout in layouts if layout.wrong and layout.status == "ok"]:
        raise WrongResultError(f"{len(wrong)} of {len(layouts)} layouts train something else: {'; '.join(wrong)}")


def plot(runs: list[ScalingRun], path: Path, base: ScalingRun | None = None) -> None:
    """Draw some runs into a file, and print its name. Raises UserError where it cannot be written."""
    print(printable(str(save(draw(runs, base), path, "--plot"))))


@click.command("import-log")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--peak-tflops", type=float, callback=finite, help="TFLOP/s of a device, if logs lack it: 312 for A100.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Picture: .png, .svg or .pdf.")
def import_log(files: tuple[Path, ...], peak_tflops: float | None, as_markdown: bool, picture: Path | None) -> None:
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
    if as_markdown:
        print(markdown(runs), end="")
    else:
        show_runs(runs)
    if picture:
        plot(runs, picture)


@click.group(invoke_without_command=True)
@console.options(ScalingSettings)
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Train in each layout of a grid, in turn; print times, efficiency, bubbles, memory and anomalies."""
    if context.invoked_subcommand is None:
        measure(ScalingSettings(**options))


main.add_command(import_log)

if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
