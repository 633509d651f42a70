"""How does training scale over layouts of tensor, pipeline and data parallelism? `python -m benchmarks.scaling`.

Every layout of a grid trains the same model with the real loop, turn by turn; a layout whose losses are not those of
one rank gets no speed. `python -m benchmarks.scaling import-log FILE` makes the same tables of Megatron-LM's logs.
"""

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import click
import torch
from click.core import ParameterSource

from benchmarks.allreduce_plot import HOW_TO_PLOT, can_plot
from benchmarks.harness import WrongResultError
from benchmarks.records import Record, append_record, appended, open_records
from benchmarks.scaling_anomalies import anomalies
from benchmarks.scaling_measure import Answer, Launcher, ScalingTask, measure_peak, take_turn
from benchmarks.scaling_options import ScalingSettings, parse_grid
from benchmarks.scaling_plot import SUFFIXES, save
from benchmarks.scaling_record import Layout, gate, make_record, predict, study_run
from benchmarks.scaling_show import show
from benchmarks.scaling_table import import_log
from cs336_systems.comm import Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.comm.startup import choose_backend
from cs336_systems.cost.capacity import require_layout_fits
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.machine import usable_memory
from cs336_systems.host.text import printable
from cs336_systems.train.options import ParallelOptions
from cs336_systems.train.recipe import Recipe

GATE_STEPS = 2
PROBE_SECONDS = 0.3


def plan(settings: ScalingSettings, here: Place) -> list[Layout]:
    """All layouts to measure, in every precision, seen to divide; under torchrun those of as many ranks.

    Raises UserError for the first that cannot be, before anything starts.
    """
    grid, ranks = parse_grid(settings.grid), here.world_size
    if ranks > 1:
        given = settings.grid
        grid = [degrees for degrees in grid if degrees[0] * degrees[1] * degrees[2] == ranks]
        if not grid:
            raise UserError(f"{ranks} ranks were started, and --grid {given} has no layout of {ranks}")
    layouts = []
    for precision in dict.fromkeys(settings.precision):
        for tp, pp, dp in grid:
            recipe, count = settings.recipe((tp, pp, dp), precision), tp * pp * dp
            try:
                config = recipe.model_config()
                recipe.check(config, count)
            except UserError as error:
                raise UserError(f"layout {tp}x{pp}x{dp}: {error}") from None
            layouts.append(Layout(recipe, count, config))
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
        self.seen: dict[tuple[Recipe, int], Answer] = {}

    @property
    def quiet(self) -> bool:
        """True if this rank prints nothing, because another does."""
        return self.launcher.here.rank > 0

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
            recipe = task.recipe
            degrees = f"{recipe.parallel.tp}x{recipe.parallel.pp}x{recipe.parallel.dp}"
            raise UserError(f"layout {degrees}: {error}") from None

    def check(self) -> None:
        """The gate: every layout against one rank with the same global batch, in fp32 and in its own precision."""
        with console.progress("gate", len(self.layouts), quiet=self.quiet) as advance:
            for layout in self.layouts:
                for precision in dict.fromkeys(("fp32", layout.recipe.model.precision)):
                    if layout.wrong:
                        break
                    recipe = layout.recipe.change(precision=precision)
                    alone = replace(recipe, parallel=ParallelOptions(dp=1))
                    want = self.first_steps(alone, 1)
                    layout.gate = self.first_steps(recipe, layout.ranks)
                    layout.wrong = gate(layout.gate, want, layout.config, recipe)
                advance(layout.label)

    def peaks(self) -> dict[str, Answer]:
        """The machine's ceilings, by precision."""
        settings = self.settings
        found: dict[str, Answer] = {}
        for layout in self.layouts:
            precision = layout.recipe.model.precision
            if precision not in found:
                budget, together = 0.02 if settings.smoke else PROBE_SECONDS, self.launcher.here.world_size > 1
                task = ScalingTask(layout.recipe, 0, 0, settings.threads, budget, settings.commit, together)
                found[precision] = self.launcher.run(measure_peak, task, 1)
        return found

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

    def records(self, peaks: dict[str, Answer]) -> list[Record]:
        """A record for each layout, the ones that are not right included, with the anomalies among their flags."""
        found: list[Record] = []
        for precision, peak in peaks.items():
            layouts = [layout for layout in self.layouts if layout.recipe.model.precision == precision]
            base = next((layout for layout in layouts if not layout.wrong), None)
            records = [self._record(layout, base, peak) for layout in layouts]
            measured = [record for record in records if record.samples_ms]
            for anomaly in anomalies([study_run(record) for record in measured]):
                for index in anomaly.runs:
                    measured[index].flags.append(anomaly.text)
            found += records
        return found

    def _record(self, layout: Layout, base: Layout | None, peak: Answer) -> Record:
        settings, config = self.settings, layout.config
        kind = torch.device("cuda" if peak["gpus"] else "cpu")
        about = {
            "size": settings.size, "objective": settings.objective, "d_model": config.d_model, "d_ff": config.d_ff,
            "num_layers": config.num_layers, "vocab_size": config.vocab_size, "context": layout.seq,
            "micro_batch_size": settings.micro_batch_size, "recompute": settings.recompute,
            "scaling": "strong" if settings.global_batch_size else "weak", "data": " ".join(settings.data),
            "base": base.degrees if base else None, "device": peak["environment"]["device_type"],
            "backend": choose_backend(settings.backend, kind, Place(0, 2, 0, 2)),
        }  # fmt: skip
        return make_record(layout, base, peak, settings.threads, about, predict(layout, peak, settings.threads))


def draw(records: list[Record], settings: ScalingSettings) -> None:
    """The picture, or one for each precision."""
    assert settings.plot is not None
    precisions = list(dict.fromkeys(record.config["precision"] for record in records if record.samples_ms))
    for precision in precisions:
        runs = [
            study_run(record) for record in records if record.samples_ms and record.config["precision"] == precision
        ]
        name = f"{settings.plot.stem}-{precision}" if len(precisions) > 1 else settings.plot.stem
        print(printable(str(save(runs, settings.plot.with_stem(name), runs[0]))))


def measure(settings: ScalingSettings, given: Collection[str] = ()) -> None:
    """Check the layouts, measure, record, print; a smoke run leaves the `given` settings as they are.

    Raises UserError for what cannot be measured, and at the end, of the class WrongResultError, if a layout did not
    pass the gate.
    """
    here = find_place()
    kind = settings.device or ("cuda" if torch.cuda.device_count() else "cpu")
    settings, device = replace(settings, device=kind), torch.device(kind)
    if settings.plot and not can_plot():
        raise UserError(HOW_TO_PLOT)
    if settings.plot and settings.plot.suffix not in SUFFIXES:
        raise UserError(f"--plot {settings.plot} should end in {', '.join(SUFFIXES)}")
    layouts = plan(settings, here)
    if settings.smoke:  # what cannot be measured cannot be tried either
        settings = settings.shortened(given, here.world_size == 1)
        layouts = plan(settings, here)
    check_gpus(layouts, settings, device, here)
    check_memory(layouts, device)
    path = None
    if here.rank == 0 and not settings.smoke:
        path = open_records(settings.folder(device), "scaling")
    study = Study(settings, layouts, Launcher(here, kind))
    study.check()
    peaks = study.peaks()
    study.play()
    records = study.records(peaks)
    if here.rank > 0:
        return
    show(records)
    if path:
        for record in records:
            append_record(record, path)
        print(appended(len(records), path))
    if settings.plot:
        draw(records, settings)
    if wrong := [f"{layout.label}: {layout.wrong}" for layout in layouts if layout.wrong and layout.status == "ok"]:
        raise WrongResultError(f"{len(wrong)} of {len(layouts)} layouts train something else: {'; '.join(wrong)}")


@click.group(invoke_without_command=True)
@console.options(ScalingSettings)
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Train in every layout of a grid, turn by turn: times, efficiency, bubbles, memory, and what looks wrong."""
    if context.invoked_subcommand is None:
        given = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        measure(ScalingSettings(**options), given)


main.add_command(import_log)

if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
