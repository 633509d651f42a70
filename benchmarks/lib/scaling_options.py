"""Options of a scaling study: its grid of layouts, and the training run of each."""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.lib.options import COUNT, RankOptions
from cs336_systems.errors import UserError
from cs336_systems.host.console import setting
from cs336_systems.presets import Recompute, preset
from cs336_systems.schedule.lists import ScheduleName
from cs336_systems.train.recipe import Recipe

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# What makes a smoke run short, in place of the defaults.
SMOKE: dict[str, Any] = {"context": 32, "rounds": 1, "steps": 1, "warmup": 1}
SMOKE_GRID = "1x1x1,1x2x1"
SMOKE_BATCH: dict[str, Any] = {"micro_batch_size": 1, "global_batch_per_dp": 2}
# A multiple of 128, to which tensor parallelism pads: all layouts then have the same logits to compute.
VOCABULARY = 512


@dataclass(frozen=True)
class ScalingSettings(RankOptions):
    """Options of the command line, one field each."""

    grid: str = setting("1x1x1,2x1x1,1x2x1,1x1x2,2x2x1,2x2x2", "Layouts, as tp x pp x dp or RANKS:tp x pp x dp.")
    size: str = setting("tiny", "Model preset.")
    objective: Literal["lm", "bert"] = setting("bert", "Predict the next token, or masked tokens and sentence order.")
    context: int | None = setting(None, "Tokens in a sequence.  [default: the preset's]", type=COUNT)
    vocab_size: int | None = setting(None, "Vocabulary size.  [default: the preset's; 512 for BERT in another's shape]")
    data: tuple[str, ...] = setting(("random",), "Text files, or `random`.")
    micro_batch_size: int = setting(4, "Sequences that pass through the model at once.", type=COUNT)
    global_batch_per_dp: int | None = setting(
        None, "Weak scaling: sequences of each data-parallel replica in a step.  [default: 16]", type=COUNT
    )
    global_batch_size: int | None = setting(None, "Strong scaling: sequences of all replicas in a step.", type=COUNT)
    steps: int = setting(3, "Timed steps per turn.", type=COUNT)
    warmup: int = setting(2, "Untimed steps per turn before the timed ones.", type=click.IntRange(0))
    rounds: int = setting(5, "Turns of each layout.", type=COUNT)
    precision: tuple[str, ...] = setting(
        ("fp32",), "Precision; may be repeated, to run the whole grid in each.", type=click.Choice(PRECISIONS)
    )
    zero: int = setting(0, "ZeRO stage of layouts with data-parallel ranks.", type=click.IntRange(0, 3))
    schedule: ScheduleName | None = setting(None, "Pipeline schedule.")
    chunks: int = setting(1, "Groups of blocks per pipeline stage, in layouts with stages.", type=COUNT)
    sequence_parallel: bool = setting(False, "Split activations along the sequence, in layouts with tp ranks.")
    recompute: Recompute = setting("none", "Activations that backward recomputes instead of keeping them.")
    threads: int = setting(1, "Threads of each CPU rank, the same in every layout.", type=COUNT)
    plot: Path | None = setting(None, "Picture to draw: .png, .svg, .pdf.")

    def batch(self, dp: int) -> int:
        """Sequences in a step with `replicas` replicas. Raises UserError if both kinds of scaling were asked for."""
        if self.global_batch_size and self.global_batch_per_dp:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} keeps the batch, --global-batch-per-dp "
                f"{self.global_batch_per_dp} lets it grow with the replicas: give one of the two"
            )
        return self.global_batch_size or (self.global_batch_per_dp or 16) * dp

    def shortened(self, alone: bool) -> "ScalingSettings":
        """The settings of a smoke run: options that the user has changed stay, and so do layouts of torchrun's ranks.

        So does the batch where it or the grid was changed, which have to fit each other.
        """
        kept = {name for name, value in asdict(ScalingSettings()).items() if getattr(self, name) != value}
        batch = {} if kept & {"grid", "global_batch_size", *SMOKE_BATCH} else SMOKE_BATCH
        less = SMOKE | batch | ({"grid": SMOKE_GRID} if alone else {})
        return replace(self, **{name: value for name, value in less.items() if name not in kept})

    def recipe(self, degrees: tuple[int, int, int], precision: str) -> Recipe:
        """Recipe that a layout trains; options that it does not use keep their defaults."""
        tp, pp, dp = degrees
        vocabulary = VOCABULARY if self.objective == "bert" and preset(self.size).model.causal else None
        return Recipe.of(
            size=self.size, objective=self.objective, context=self.context, vocab_size=self.vocab_size or vocabulary,
            data=self.data, batch_size=self.batch(dp), micro_batch_size=self.micro_batch_size, recompute=self.recompute,
            tp=tp, pp=pp, dp=dp, precision=precision,
            # The first update at full rate, as the gate assumes; a loss scale at which fp16 skips no step.
            lr=1e-3, min_lr=1e-3, warmup_steps=0, initial_loss_scale=2.0**16,
            zero=self.zero if dp > 1 else 0, schedule=self.schedule if pp > 1 else None,
            chunks=self.chunks if pp > 1 else 1, sequence_parallel=self.sequence_parallel and tp > 1,
            device=self.device, backend=self.backend, timeout=self.timeout,
        )  # fmt: skip


def parse_grid(text: str) -> list[tuple[int, int, int]]:
    """`1x1x1,8:2x2x2` -> [(1, 1, 1), (2, 2, 2)], each tp, pp, dp, without repetitions.

    Raises UserError for what is no layout, and where the ranks before a colon are not its product.
    """
    found = []
    for word in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"(?:(\d+):)?([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", word)
        if match is None:
            raise UserError(
                f"--grid has {word!r}, which is no layout: write tp x pp x dp, such as 2x1x1,2x2x2 or 8:2x2x2"
            )
        tp, pp, dp = map(int, match.groups()[1:])
        if match[1] and int(match[1]) != tp * pp * dp:
            raise UserError(f"--grid has {word!r}, but tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp} ranks")
        found.append((tp, pp, dp))
    if not found:
        raise UserError("--grid names no layout: write some, such as 1x1x1,2x1x1,2x2x2")
    return list(dict.fromkeys(found))
