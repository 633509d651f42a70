"""Long sequences: three kinds of context parallelism beside one rank: `python -m benchmarks.long_context`.

Every length is trained by one rank and by context-parallel ranks with the real loop, turn by turn: time of a step, peak
memory of a rank, bytes that it sends for attention. A layout whose losses differ from one rank's gets no speed.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import click

from benchmarks.harness import ratios
from benchmarks.lib.launcher import Answer
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.scaling_record import make_record
from benchmarks.lib.scaling_study import Layout, LayoutOptions, Study
from benchmarks.lib.sheets import MARK, groups, time
from benchmarks.records import Record, read_records, shown
from cs336_systems.comm import find_place
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.context_parallel import attention_work
from cs336_systems.cost.plots.style import HOW_TO_PLOT, STYLES, can_plot, save, ticks_at, tidy
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_bytes, format_seconds, setting
from cs336_systems.host.table import Table
from cs336_systems.host.text import plot_text, printable
from cs336_systems.presets import ContextType, preset
from cs336_systems.traffic import sent

COLUMNS = ("tokens", "ranks", "way", "step", "predicted", "/ one rank", "peak memory", "live", "sent", "work")
NOTE = (
    "peak memory: of the rank that needs most, in its process; live: tensors alone, predicted by running the library "
    "on the meta device; sent: for attention, by a rank in a step; work: the most scores of a rank over the mean. "
    f"{MARK}"
)


@dataclass(frozen=True)
class LongContextSettings(LayoutOptions):
    """Options of the command line, one field each."""

    contexts: tuple[int, ...] = setting((1024, 4096, 8192), "Tokens in a sequence; may be repeated.", type=COUNT)
    cp: tuple[int, ...] = setting((2, 4), "Context-parallel ranks; may be repeated.", type=click.IntRange(2))
    rounds: int = setting(3, "Turns of each candidate.", type=COUNT)
    steps: int = setting(2, "Timed steps per turn.", type=COUNT)
    warmup: int = setting(1, "Untimed steps per turn before the timed ones.", type=click.IntRange(0))

    words: ClassVar[dict[str, str]] = {
        "--context ": "--contexts ",
        "--size or --micro-batch-size": "--size or --contexts",
        "raise --tp, --pp or --zero, use --recompute segments, or lower --micro-batch-size": "lower --contexts",
    }

    def layouts(self) -> list[Layout]:
        """One rank and the three ways, at every length. Raises UserError for a length that does not divide."""
        ways: list[tuple[int, ContextType]] = [(1, "ring")]
        ways += [(cp, kind) for cp in self.cp for kind in ("ring", "gather", "ulysses")]
        heads = preset(self.size).model.num_heads
        return [
            self.layout(
                f"{seq} tokens, {f'{kind} over {cp} ranks' if cp > 1 else 'one rank'}", cp, context=seq,
                batch_size=1, micro_batch_size=1, dp=1, cp=cp, cp_type=kind, attention="sdpa", data=("random",),
            )
            for seq in self.contexts for cp, kind in ways if kind != "ulysses" or heads % cp == 0
        ]  # fmt: skip


def layout_record(settings: LongContextSettings, layout: Layout, alone: Layout | None, peak: Answer) -> Record:
    """The record of a candidate, beside one rank with sequences of this length."""
    what = {
        "way": layout.recipe.parallel.cp_type if layout.ranks > 1 else "one rank", "cp": layout.ranks,
        "context": layout.seq, "size": settings.size, "batch_size": 1, "attention": "sdpa", "pack": False,
        "backend": settings.joined_by(layout.ranks),
    }  # fmt: skip
    record, seen = make_record("long_context", layout, alone, peak, settings, what), layout.stages[0]
    of_attention = ((each, n) for each, n in seen.traffic.items() if each.axis == "cp")
    predicted = record.predicted | {"live_bytes": sum(seen.peak.values())}
    predicted["sent_bytes"] = sum(n * each.nbytes * sent(each.verb, each.ranks) for each, n in of_attention)
    if alone is None or not record.samples_ms:
        return replace(record, predicted=predicted)
    metrics = record.metrics | ratios(layout.turn_ms(), alone.turn_ms())
    memory = [max(turn["memory_bytes"]) for turn in layout.turns if None not in turn["memory_bytes"]]
    metrics["memory_bytes"] = max(memory, default=None)
    work = attention_work(layout.ranks, layout.seq)
    metrics["balance"] = max(work) * len(work) / sum(work)
    return replace(record, metrics=metrics, predicted=predicted)


def row(record: Record) -> list[str]:
    """One record as cells."""
    config, metrics, predicted = record.config, record.metrics, record.predicted
    start = [f"{config['context']:,}", str(config["cp"]), config["way"]]
    if record.status != "ok":
        return [*start, "wrong", *[""] * (len(COLUMNS) - len(start) - 1)]
    cells = [time(metrics["median_ms"]) + "*" * bool(record.flags), time(predicted["mean_ms"])]
    cells += [f"{metrics['ratio_median']:.2f}"]
    cells += ["unknown" if metrics["memory_bytes"] is None else format_bytes(metrics["memory_bytes"])]
    cells += [format_bytes(predicted["live_bytes"]), format_bytes(predicted["sent_bytes"]) if config["cp"] > 1 else "-"]
    return [*start, *cells, f"{metrics['balance']:.2f}"]


def title_of(record: Record) -> str:
    """Title of a table: the model, machine and threads that its rows share."""
    config, stamp = record.config, record.environment
    model = f"{config['size']}, batch of {config['batch_size']}, attention {config['attention']}"
    return f"Long sequences; {model}; {stamp['device']}, {stamp['cores']} cores, {config['threads']} thread(s) a rank"


def sheets(records: list[Record]) -> list[Table]:
    """A table for each model, the shortest sequence first."""
    records = sorted(records, key=lambda each: (each.config["context"], each.config["cp"]))
    return [Table(title_of(rows[0]), COLUMNS, list(map(row, rows)), NOTE) for rows in groups(records, title_of)]


def draw(path: Path, like: Record) -> Path:
    """Draw peak memory and time over the length from all records of a file that one table with the record `like` shows;
    returns the picture beside it."""
    alike = (each for each in read_records(path) if title_of(each) == title_of(like))
    newest = [each for each in alike if each.metrics.get("memory_bytes")]
    newest.sort(key=lambda each: each.config["context"])
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.2), layout="constrained")
    styles = dict(zip(("one rank", "ring", "gather", "ulysses"), STYLES, strict=False))
    dashes = dict(zip(sorted({each.config["cp"] for each in newest}), cycle(("-", "-", "--")), strict=False))
    ticks = list(dict.fromkeys(each.config["context"] for each in newest))
    figures = {
        "peak memory of a rank's process": ("memory_bytes", 1.0, format_bytes),
        "a step": ("median_ms", 1e-3, format_seconds),
    }
    for panel, (title, (name, unit, write)) in zip(figure.subplots(1, 2), figures.items(), strict=True):
        for line in groups(newest, lambda each: (each.config["way"], each.config["cp"])):
            way, cp = line[0].config["way"], line[0].config["cp"]
            look = dict(zip(("color", "marker"), styles[way], strict=True)) | {"linestyle": dashes[cp], "markersize": 4}
            values = [each.metrics[name] * unit for each in line]
            label = plot_text(way if cp == 1 else f"{way}, {cp} ranks")
            panel.plot([each.config["context"] for each in line], values, label=label, **look)
        ticks_at(panel, ticks, [f"{tick:,}" for tick in ticks])
        panel.set_xlabel("tokens in a sequence")
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(lambda value, _, write=write: write(value))
        tidy(panel, title)
    lines = panel.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower left", ncols=4, frameon=False, fontsize="small")
    return save(figure, path.with_suffix(".svg"))


@command(LongContextSettings)
def main(settings: LongContextSettings) -> None:
    """Train on long sequences with one rank and with three kinds of context parallelism, in turn."""
    here = find_place()
    if here.world_size > 1:
        raise UserError("this benchmark starts its ranks itself: run it without torchrun")
    if settings.smoke:
        settings = settings.smaller(contexts=(64,), cp=(2,), rounds=1, steps=1)
    study = Study(settings, settings.layouts(), here)
    if missing := [each.wrong for each in study.layouts if each.unsupported]:
        raise UserError(missing[0])
    recorder = study.run("long_context", partial(layout_record, settings), sheets)
    if recorder and recorder.path:
        with shown(recorder.path):
            print(printable(f"plot in {draw(recorder.path, recorder.records[0])}") if can_plot() else HOW_TO_PLOT)
    study.require_right()


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))
