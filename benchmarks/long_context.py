"""Long sequences: three kinds of context parallelism beside one rank: `python -m benchmarks.long_context`.

Every length is trained by one rank and by context-parallel ranks with the real loop, turn by turn: time of a step, peak
memory of a rank, bytes that it sends for attention. A layout whose losses differ from one rank's gets no speed.
"""

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.allreduce_plot import name_ticks
from benchmarks.harness import WrongResultError, noise, ratios, summarise
from benchmarks.lib.options import COUNT, RankOptions
from benchmarks.lib.scaling_measure import Answer, Launcher, ScalingTask, measure_peak, take_turn
from benchmarks.lib.scaling_record import Layout, affinity, gate, predict
from benchmarks.lib.sheets import MARK, groups, show
from benchmarks.records import Record, read_records, shown
from cs336_systems.comm import Place, find_place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.comm.startup import choose_backend
from cs336_systems.context_parallel import attention_work
from cs336_systems.cost.plots.style import HOW_TO_PLOT, STYLES, can_plot, save, ticks_at, tidy
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_seconds, setting
from cs336_systems.host.table import Table
from cs336_systems.host.text import plot_text
from cs336_systems.presets import Attention, ContextType
from cs336_systems.traffic import sent
from cs336_systems.train.recipe import Recipe

COLUMNS = ("tokens", "ranks", "way", "step", "predicted", "/ one rank", "peak memory", "live", "sent", "work")
NOTE = (
    "peak memory: of the rank that needs most, in its process; live: tensors alone, predicted by running the library "
    "on the meta device; sent: for attention, by a rank in a step; work: the most scores of a rank over the mean. "
    f"{MARK}"
)


@dataclass(frozen=True)
class LongContextSettings(RankOptions):
    """Options of the command line, one field each."""

    contexts: tuple[int, ...] = setting((1024, 4096, 8192), "Tokens in a sequence; may be repeated.", type=COUNT)
    cp: tuple[int, ...] = setting((2, 4), "Context-parallel ranks; may be repeated.", type=click.IntRange(2))
    size: str = setting("tiny", "Model preset.")
    attention: Attention = setting("sdpa", "Implementation of attention.")
    batch_size: int = setting(1, "Sequences in a step.", type=COUNT)
    pack: bool = setting(False, "Train on rows of packed documents.")
    rounds: int = setting(3, "Turns of each candidate.", type=COUNT)
    steps: int = setting(2, "Timed steps per turn.", type=COUNT)
    threads: int = setting(1, "Threads of each CPU rank.", type=COUNT)

    def recipe(self, seq: int, cp: int = 1, kind: ContextType = "ring") -> Recipe:
        """Recipe of a candidate; its first update is at the full rate, as the gate assumes."""
        return Recipe.of(
            size=self.size, context=seq, batch_size=self.batch_size, micro_batch_size=self.batch_size, dp=1, cp=cp,
            cp_type=kind, attention=self.attention, pack=self.pack, lr=1e-3, min_lr=1e-3, warmup_steps=0,
            data=() if self.pack else ("random",), device=self.device, backend=self.backend, timeout=self.timeout,
        )  # fmt: skip


def plan(settings: LongContextSettings) -> list[Layout]:
    """One rank and the three ways, at every length. Raises UserError for a length that does not divide."""
    ways: list[tuple[int, ContextType]] = [(1, "ring")]
    ways += [(cp, kind) for cp in settings.cp for kind in ("ring", "gather", "ulysses")]
    layouts = []
    for seq in settings.contexts:
        for cp, kind in ways:
            recipe = settings.recipe(seq, cp, kind)
            config = recipe.model_config()
            if kind == "ulysses" and config.num_heads % cp:
                continue  # the model has too few heads
            recipe.check(config, cp)
            layouts.append(Layout(recipe, cp, config))
    return layouts


def name_of(layout: Layout) -> str:
    """`4096 tokens, ring over 2 ranks`."""
    way = f"{layout.recipe.parallel.cp_type} over {layout.ranks} ranks" if layout.ranks > 1 else "one rank"
    return f"{layout.seq} tokens, {way}"


def play(layouts: list[Layout], settings: LongContextSettings, launcher: Launcher) -> None:
    """The gate, then a turn of every candidate in each round."""
    with console.progress("gate", len(layouts)) as advance:
        for layout in layouts:
            alone = next(each for each in layouts if each.seq == layout.seq)  # the one rank comes first
            layout.gate = launcher.run(take_turn, ScalingTask(layout.recipe, threads=settings.threads), layout.ranks)
            layout.wrong = gate(layout.gate, alone.gate, layout.config, layout.recipe)
            advance(name_of(layout))
    good = [layout for layout in layouts if not layout.wrong]
    with console.progress("taking turns", settings.rounds * len(good)) as advance:
        for _ in range(settings.rounds):
            for layout in good:
                task = ScalingTask(layout.recipe, settings.steps, 1, settings.threads)
                layout.turns.append(launcher.run(take_turn, task, layout.ranks))
                advance(name_of(layout))


def make_record(layout: Layout, alone: Layout, peak: Answer, settings: LongContextSettings) -> Record:
    """The record of a candidate, beside one rank with sequences of this length."""
    parallel = layout.recipe.parallel
    kind = torch.device("cuda" if peak["gpus"] else "cpu")
    backend = choose_backend(settings.backend, kind, Place(0, layout.ranks, 0, layout.ranks))
    what = {
        "way": parallel.cp_type if layout.ranks > 1 else "one rank", "cp": layout.ranks, "context": layout.seq,
        "size": settings.size, "batch_size": settings.batch_size, "attention": settings.attention,
        "pack": settings.pack, "backend": backend, "threads": settings.threads,
    }  # fmt: skip
    stamp = peak["environment"] | {"world_size": layout.ranks, "backend": backend, "threads": settings.threads}
    seen = layout.stages[0]
    of_attention = ((each, n) for each, n in seen.traffic.items() if each.axis == "cp")
    predicted: dict[str, Any] = {"live_bytes": sum(seen.peak.values()), "activations_bytes": seen.activations}
    predicted["sent_bytes"] = sum(n * each.nbytes * sent(each.verb, each.ranks) for each, n in of_attention)
    predicted |= predict(layout, peak, settings.threads)
    if layout.wrong:
        return Record("long_context", what, stamp, flags=[layout.wrong], predicted=predicted, status="unsupported")
    samples = [sample for turn in layout.turns for sample in turn["samples_ms"]]
    metrics: dict[str, Any] = summarise(samples) | ratios(layout.turn_ms(), alone.turn_ms())
    memory = [max(turn["memory_bytes"]) for turn in layout.turns if None not in turn["memory_bytes"]]
    metrics["memory_bytes"] = max(memory) if memory else None
    work = attention_work(layout.ranks, layout.seq)  # of rows that are one document
    metrics["balance"] = None if settings.pack else max(work) * len(work) / sum(work)
    metrics["affinity"] = affinity(layout.ranks, settings.threads) if kind.type == "cpu" else None
    return Record("long_context", what, stamp, samples, metrics, predicted, noise(metrics))


def row(record: Record) -> list[str]:
    """One record as cells."""
    config, metrics, predicted = record.config, record.metrics, record.predicted
    start = [f"{config['context']:,}", str(config["cp"]), config["way"]]
    if record.status != "ok":
        return [*start, "wrong", *[""] * (len(COLUMNS) - len(start) - 1)]
    memory = "unknown" if metrics["memory_bytes"] is None else format_bytes(metrics["memory_bytes"])
    times = [format_seconds(value / 1e3) for value in (metrics["median_ms"], predicted["mean_ms"])]
    sent = format_bytes(predicted["sent_bytes"]) if config["cp"] > 1 else "-"
    cells = [times[0] + "*" * bool(record.flags), times[1], f"{metrics['ratio_median']:.2f}", memory]
    return [
        *start,
        *cells,
        format_bytes(predicted["live_bytes"]),
        sent,
        "-" if metrics["balance"] is None else f"{metrics['balance']:.2f}",
    ]


def title_of(record: Record) -> str:
    """Title of a table: the model, machine and threads that its rows share."""
    config, stamp = record.config, record.environment
    packed = ", packed documents" if config["pack"] else ""
    model = f"{config['size']}, batch of {config['batch_size']}, attention {config['attention']}{packed}"
    return f"Long sequences; {model}; {stamp['device']}, {stamp['cores']} cores, {config['threads']} thread(s) a rank"


def sheets(records: list[Record]) -> list[Table]:
    """A table for each model, the shortest sequence first."""
    records = sorted(records, key=lambda each: (each.config["context"], each.config["cp"]))
    return [Table(title_of(rows[0]), COLUMNS, list(map(row, rows)), NOTE) for rows in groups(records, title_of)]


def draw(path: Path) -> Path:
    """Draw peak memory and time over the length from all records of a file; returns the picture beside it."""
    newest = [each for each in read_records(path) if each.metrics.get("memory_bytes") and not each.config["pack"]]
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    styles = dict(zip(("one rank", "ring", "gather", "ulysses"), STYLES, strict=False))
    for way, cp in dict.fromkeys((each.config["way"], each.config["cp"]) for each in newest):
        line = [each for each in newest if (each.config["way"], each.config["cp"]) == (way, cp)]
        line.sort(key=lambda each: each.config["context"])
        colour, marker = styles[way]
        dashes = dict(zip(sorted({each.config["cp"] for each in newest}), cycle(("-", "-", "--")), strict=False))[cp]
        places = [each.config["context"] for each in line]
        label = way if cp == 1 else f"{way}, {cp} ranks"
        figures = [[each.metrics["memory_bytes"] for each in line], [each.metrics["median_ms"] / 1e3 for each in line]]
        for panel, values in zip(panels, figures, strict=True):
            panel.plot(places, values, dashes, color=colour, marker=marker, markersize=4, label=plot_text(label))
    formats, names = (format_bytes, format_seconds), ("peak memory of a rank's process", "a step")
    for panel, write, name in zip(panels, formats, names, strict=True):
        ticks = sorted({each.config["context"] for each in newest})
        ticks_at(panel, ticks, [f"{tick:,}" for tick in ticks])
        panel.set_xlabel("tokens in a sequence")
        panel.set_yscale("log", base=2)
        name_ticks(panel.yaxis, write)
        tidy(panel, name)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False, fontsize="small"
    )
    return save(figure, path.with_suffix(".svg"))


@click.command()
@console.options(LongContextSettings)
def main(**options: Any) -> None:
    """Train on long sequences with one rank and with three kinds of context parallelism, in turn."""
    settings, here = LongContextSettings(**options), find_place()
    if here.world_size > 1:
        raise UserError("this benchmark starts its ranks itself: run it without torchrun")
    kind = settings.device or ("cuda" if torch.cuda.device_count() else "cpu")
    settings = replace(settings, device=kind)
    if settings.smoke:
        settings = replace(settings, contexts=(64,), cp=(2,), rounds=1, steps=1)
    layouts, launcher = plan(settings), Launcher(here, kind)
    for layout in layouts:
        choose_backend(settings.backend, torch.device(kind), Place(0, layout.ranks, 0, layout.ranks))
    recorder = settings.recorder("long_context", torch.device(kind))
    play(layouts, settings, launcher)
    budget = 0.02 if settings.smoke else 0.3
    task = ScalingTask(layouts[0].recipe, 0, 0, settings.threads, budget, settings.commit)
    peak = launcher.run(measure_peak, task, 1)
    first = {layout.seq: layout for layout in reversed(layouts)}
    records = [make_record(layout, first[layout.seq], peak, settings) for layout in layouts]
    show(sheets(records))
    recorder.keep(*records)
    recorder.tell()
    if recorder.path:
        with shown(recorder.path):
            print(draw(recorder.path) if can_plot() else HOW_TO_PLOT)
    if wrong := [f"{name_of(layout)}: {layout.wrong}" for layout in layouts if layout.wrong]:
        raise WrongResultError("; ".join(wrong))


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
