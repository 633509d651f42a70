"""Layouts of a training run: each checked against one rank, then trained in turn, recorded, and shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from statistics import fmean
from typing import Any, ClassVar, Self

import click

from benchmarks.harness import WrongResultError, take_turns
from benchmarks.lib.gate import compare_steps
from benchmarks.lib.launcher import Answer, on_ranks
from benchmarks.lib.options import COUNT, RankOptions, Recorder
from benchmarks.lib.scaling_measure import measure_peak, take_turn
from benchmarks.lib.sheets import groups, show
from benchmarks.records import Record
from cs336_systems.comm import Place
from cs336_systems.comm.startup import choose_backend
from cs336_systems.cost.capacity import require_layout_fits
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import setting
from cs336_systems.host.machine import usable_memory
from cs336_systems.host.table import Table
from cs336_systems.layout import Layout as Shape
from cs336_systems.layout import Observation
from cs336_systems.presets import ModelConfig
from cs336_systems.train.observation import observe
from cs336_systems.train.options import ParallelOptions
from cs336_systems.train.recipe import Recipe

GATE_STEPS = 2
PROBE_SECONDS = 0.3


@dataclass(frozen=True)
class LayoutOptions(RankOptions):
    """Options of a benchmark whose layouts take turns."""

    size: str = setting("tiny", "Model preset.")
    rounds: int = setting(5, "Turns of each layout.", type=COUNT)
    steps: int = setting(3, "Timed steps per turn.", type=COUNT)
    warmup: int = setting(2, "Untimed steps per turn before the timed ones.", type=click.IntRange(0))

    words: ClassVar[dict[str, str]] = {}  # of the trainer in messages, and this command's

    def reworded(self, error: UserError) -> UserError:
        """The trainer's error, with the names of this command's options."""
        return UserError(reduce(lambda said, names: said.replace(*names), self.words.items(), str(error)))

    def smaller(self, **less: Any) -> Self:
        """Other values, of a smoke run, for those of these options that have their defaults."""
        return replace(self, **{name: less[name] for name in less if getattr(self, name) == getattr(type(self), name)})

    def joined_by(self, ranks: int) -> str:
        """The backend of so many ranks, for records."""
        usual = "nccl" if self.on.type == "cuda" else choose_backend(None, self.on, Place(0, ranks, 0, ranks))
        return self.backend or usual

    def layout(self, label: str, ranks: int, **options: object) -> "Layout":
        """A layout of a recipe's options, seen to divide. Raises UserError, naming it, if it does not.

        Its first update is at the full rate, as the gate assumes, and its loss scale lets fp16 skip no step.
        """
        recipe = Recipe.of(
            **{"size": self.size, "device": self.on.type, "backend": self.backend, "timeout": self.timeout},
            **{"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "initial_loss_scale": 2.0**16},
            **options,
        )
        try:
            config = recipe.model_config()
            recipe.check(config, ranks)
        except UserError as error:
            raise UserError(f"layout {label}: {self.reworded(error)}") from None
        return Layout(label, recipe, ranks, config)


@dataclass
class Layout:
    """A layout to measure, and what its turns have said so far. `recipe` has its degrees and precision."""

    label: str
    recipe: Recipe
    ranks: int
    config: ModelConfig
    gate: Answer = field(default_factory=dict)
    wrong: str = ""  # why there is no speed
    unsupported: bool = False  # because this machine cannot run it
    turns: list[Answer] = field(default_factory=list)

    @cached_property
    def shape(self) -> Shape:
        """Degrees and batch."""
        return self.recipe.layout(self.ranks)

    @property
    def precision(self) -> str:
        """Precision of matrix products."""
        return self.recipe.model.precision

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.recipe.seq(self.config)

    @cached_property
    def stages(self) -> list[Observation]:
        """A rank of each stage, observed: what it keeps, computes and sends. To be asked for before ranks start."""
        shape = self.shape
        return [observe(self.recipe, self.config, shape, stage * shape.tp * shape.data) for stage in range(shape.pp)]

    def turn_ms(self) -> list[float]:
        """Milliseconds of a step, the mean of each turn."""
        return [fmean(turn["samples_ms"]) for turn in self.turns]


class Study:
    """The turns of some layouts. Every rank that torchrun started constructs it and calls its methods alike.

    Raises UserError before any rank starts for a backend that serves none, and for a layout that does not fit; those
    with more ranks than GPUs are marked.
    """

    def __init__(self, settings: LayoutOptions, layouts: Sequence[Layout], here: Place) -> None:
        self.settings, self.layouts, self.here, device = settings, layouts, here, settings.on
        choose_backend(settings.backend, device, Place(0, 1))
        for layout in layouts:
            local = here.local_world_size if here.world_size > 1 else layout.ranks
            try:
                choose_backend(settings.backend, device, Place(0, layout.ranks, 0, local))
            except UserError as error:
                layout.wrong, layout.unsupported = str(error), True
                continue
            usable = usable_memory(device) // (layout.ranks if device.type == "cpu" else 1)
            parts = max((seen.memory() for seen in layout.stages), key=lambda each: sum(each.values()))
            try:
                require_layout_fits(settings.size, layout.config, layout.shape, layout.seq, parts, usable)
            except UserError as error:
                raise settings.reworded(error) from None

    def turn(self, layout: Layout, recipe: Recipe, ranks: int, steps: int, warmup: int) -> Answer:
        """One turn; an error names the layout."""
        settings = self.settings
        try:
            return on_ranks(self.here, settings.on.type, ranks, take_turn, recipe, steps, warmup)
        except UserError as error:
            raise UserError(f"layout {layout.label}: {settings.reworded(error)}") from None

    def check(self) -> None:
        """The gate: every layout against one rank with the same global batch, in fp32 and in its own precision. Their
        first two steps are not timed; one run serves all layouts that are compared to it."""
        known: dict[tuple[Recipe, int], Answer] = {}
        with console.progress("gate", len(self.layouts), quiet=self.here.rank > 0) as advance:
            for layout in self.layouts:
                for precision in dict.fromkeys(("fp32", layout.precision)):
                    if layout.wrong:
                        break
                    recipe = layout.recipe.change(precision=precision)
                    alone, mine = (replace(recipe, parallel=ParallelOptions(dp=1)), 1), (recipe, layout.ranks)
                    for each in (alone, mine):
                        known[each] = known.get(each) or self.turn(layout, *each, 0, GATE_STEPS)
                    layout.gate = known[mine]
                    layout.wrong = compare_steps(layout.gate, known[alone], layout.config, recipe)
                advance(layout.label)

    def run(
        self,
        benchmark: str,
        make: Callable[[Layout, Layout | None, Answer], Record],
        sheets: Callable[[list[Record]], list[Table]],
        flag: Callable[[list[Record]], None] = lambda records: None,
    ) -> Recorder | None:
        """Check, let every layout that is right take a turn in each round, record and, on the first rank, print;
        returns the recorder there. `make` is given a layout, the first that is right of its precision and length, and
        the machine's peak; `flag` the records of one precision and length."""
        settings, found, peaks = self.settings, list[Record](), dict[str, Answer]()
        kind = settings.on.type
        recorder = settings.recorder(benchmark, settings.on) if self.here.rank == 0 else None
        self.check()
        good, counts = [each for each in self.layouts if not each.wrong], (settings.steps, settings.warmup)
        turns = {each.label: partial(self.turn, each, each.recipe, each.ranks, *counts) for each in good}
        answers = take_turns(turns, settings.rounds, quiet=self.here.rank > 0)
        how = 0.02 if settings.smoke else PROBE_SECONDS, settings.commit, self.here.world_size > 1
        for layouts in groups(self.layouts, lambda each: (each.precision, each.seq)):
            name, recipe = layouts[0].precision, layouts[0].recipe
            peaks[name] = peak = peaks.get(name) or on_ranks(self.here, kind, 1, measure_peak, recipe, *how)
            base = next((layout for layout in layouts if not layout.wrong), None)
            for layout in layouts:
                layout.turns = answers.get(layout.label, [])
            records = [make(layout, base, peak) for layout in layouts]
            flag(records)
            found += records
        if recorder:
            show(sheets(found))
            recorder.keep(*found)
            recorder.tell()
        return recorder

    def require_right(self) -> None:
        """Raises WrongResultError if a layout did not pass the gate. To be called in the end."""
        if wrong := [f"{each.label}: {each.wrong}" for each in self.layouts if each.wrong and not each.unsupported]:
            several = f"{len(wrong)} of {len(self.layouts)} layouts train something else"
            raise WrongResultError(f"{several}: {'; '.join(wrong)}")
