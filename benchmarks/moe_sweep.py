"""CPU time of expert layers over number of experts, capacity and ranks: `python -m benchmarks.moe_sweep`.

Each setting of the grid is one layer (see `moe_layer.py`), sorted and, where its tensors are not too large, one-hot.
All settings of a number of ranks take turns. Each rank has equally many tokens in all of them. A random router is
nearly balanced on random tokens and drops hardly any. `--skew` adds a common part to all tokens, so that some experts
get more work than others, as with real text.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import cycle, product
from operator import attrgetter
from typing import Any

import click

from benchmarks.lib.collective import size_name
from benchmarks.lib.expert_layer import DEVICE, Bench, Candidate, LayerSettings, Way, cell, work
from benchmarks.lib.expert_tables import show, sweep
from benchmarks.lib.launcher import rank_counts, run
from benchmarks.lib.options import COUNT, command
from benchmarks.lib.sheets import groups
from benchmarks.records import Record
from cs336_systems.comm import Group
from cs336_systems.comm.launch import run_command_on_ranks
from cs336_systems.cost.plots.style import HOW_TO_PLOT, STYLES, can_plot, save, ticks_at, tidy
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds, setting
from cs336_systems.host.text import plot_text, printable
from cs336_systems.presets import Mixture

SMOKE: dict[str, Any] = {"experts": (4, 8), "tokens": 64, "d_model": 16, "d_ff": 32, "rounds": 1, "steps": 1}


@dataclass(frozen=True)
class MoESweepSettings(LayerSettings):
    """Options of the command line, one field each."""

    benchmark = "moe_sweep"
    experts: tuple[int, ...] = setting((8, 32, 128, 512), "Experts of the layer; may be repeated.", type=COUNT)
    capacity: tuple[str, ...] = setting(
        ("1x", "2x", "4x", "0.05", "dropless"),
        "Capacity of an expert: `2x` is 2 x tokens / experts, `0.05` a share of tokens, `dropless` no limit; may be "
        "repeated.",
    )
    nproc: tuple[int, ...] = setting(
        (), "Ranks to start, without torchrun; may be repeated.  [default: 1, then 2, then 4]", type=COUNT
    )
    skew: float = setting(0.5, "Preference of tokens for the same experts; 0: little.", type=click.FloatRange(0, 100))

    def cell(self, experts: int, capacity: str) -> Way:
        """The sorted layer of a cell of the grid. Raises UserError for one that cannot be."""
        return self.sorted(experts, *parse_capacity(capacity))

    def enter(self, group: Group, about: dict[str, Any]) -> list[Candidate]:
        """See there: all cells of the grid, sorted and, where tensors are not too large, one-hot."""
        found, count = list[Candidate](), len(self.experts) * len(self.capacity)
        with console.progress(f"{group.size()} rank(s), gate", count, quiet=group.rank() > 0) as advance:
            for experts in self.experts:
                bench = Bench(self.cell(experts, "dropless").config, self.skew, group)
                for capacity in self.capacity:
                    found += cell(bench, self.cell(experts, capacity), about | {"capacity": capacity})
                    advance(f"{experts} experts, {capacity}")
        return found


def parse_capacity(text: str) -> tuple[Mixture, bool]:
    """(`2x`, `0.05` or `dropless` as a mixture, whether that is its capacity in training). Raises UserError."""
    if text == "dropless":
        return Mixture(), False
    try:
        number = float(text.removesuffix("x"))
    except ValueError:
        number = 0.0
    if text.endswith("x") and 0 < number < float("inf"):
        return Mixture(capacity_factor=number), True
    if not text.endswith("x") and 0 < number <= 1:
        return Mixture(eval_fraction=number), False
    raise UserError(f"--capacity {text!r} is none: write 2x, or a share of the tokens such as 0.05, or dropless")


@command(MoESweepSettings)
def main(settings: MoESweepSettings) -> None:
    """Time and plot expert layers over experts, capacities and ranks, with dispatch by sort and by one-hot tensors."""
    if settings.smoke:
        settings = replace(settings, **SMOKE)
    counts = rank_counts(settings.nproc, (1, 2) if settings.smoke else (1, 2, 4), settings.experts)
    for experts, capacity in product(settings.experts, settings.capacity):
        settings.cell(experts, capacity)
    shown = run(settings, settings.benchmark, counts, partial(show, sweep), work)
    if shown and not settings.smoke:
        picture = settings.records_folder(DEVICE) / "moe_sweep.svg"
        print(printable(f"plot in {save(draw(shown), picture, '--results')}") if can_plot() else HOW_TO_PLOT)


if __name__ == "__main__":
    sys.exit(run_command_on_ranks(main))


CANDIDATES = {"einsum": "black", "sort": "#E69F00"}
DASHES, EVERY = ("-", "--", ":"), "einsum, all experts"


def chosen_capacity(records: Sequence[Record]) -> str:
    """The capacity whose times are drawn: a share of the tokens, as the evaluation has it, else the first."""
    names = list(dict.fromkeys(record.config["capacity"] for record in records))
    return next((name for name in names if name != "dropless" and not name.endswith("x")), names[0])


def factor(record: Record) -> float:
    """Slots of all experts over tokens: 1 if each expert takes its share of one choice."""
    config = record.config
    return float(config["slots"] * config["experts"] / config["tokens"])


def lines(
    records: Iterable[Record], place: Callable[[Record], float], *names: str
) -> dict[tuple[Any, ...], list[Record]]:
    """Records by the values of some fields, each line in the order of their `place` on the axis."""
    found = groups(sorted(records, key=place), lambda record: tuple(record.config[name] for name in names))
    return dict(sorted((tuple(line[0].config[name] for name in names), line) for line in found))


def draw(records: Sequence[Record]) -> Any:
    """A matplotlib Figure of one sweep."""
    figure = import_module("matplotlib.figure").Figure(figsize=(10.5, 4.4), layout="constrained")
    times, sent, dropped = figure.subplots(1, 3)
    config, most = records[0].config, max(record.config["ranks"] for record in records)
    sort, einsum = (
        [each for each in records if (each.config["ranks"], each.config["candidate"]) == (most, name)]
        for name in ("sort", "einsum")
    )
    _draw_times(times, records)
    tidy(sent, f"All-to-all, {most} rank{'s' * (most > 1)}")
    if most == 1:
        sent.text(0.5, 0.5, "one rank sends nothing", transform=sent.transAxes, ha="center")
    else:
        _over_factor(sent, sort, "all_to_all_bytes", "sort, {} experts")
        _over_factor(sent, einsum, "all_to_all_bytes")
        for record in [record for record in sort if record.config["slots"] is None][:1]:
            nbytes = record.metrics["all_to_all_bytes"]
            sent.axhline(nbytes, color="black", linestyle=":", label="sort, dropless")
        _name_steps(sent, "sent by a rank in one all-to-all", size_name)
    _over_factor(dropped, sort, "dropped_share", "{} experts")
    dropped.set_ylim(bottom=0)
    dropped.set_ylabel("choices that find no slot")
    dropped.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    tidy(dropped, "Dropped")
    figure.suptitle(
        f"Expert layers, {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens a rank, "
        f"top {config['top_k']}, skew {config['skew']:g}, on {plot_text(records[0].environment['device'])}",
        fontsize="medium",
    )
    for axes in filter(attrgetter("lines"), (times, sent, dropped)):
        axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def _draw_times(axes: Any, records: Sequence[Record]) -> None:
    capacity = chosen_capacity(records)
    every = [record for record in records if record.config["capacity"] == capacity]
    ranks = sorted({record.config["ranks"] for record in every})
    for (name, count), line in lines(every, lambda record: record.config["experts"], "candidate", "ranks").items():
        number, experts = ranks.index(count), [record.config["experts"] for record in line]
        look = {"color": CANDIDATES[name], "marker": STYLES[number % len(STYLES)][1], "markersize": 5}
        look["label"] = f"{name}, {count} rank{'s' * (count > 1)}"
        axes.plot(experts, [each.metrics["median_ms"] / 1e3 for each in line], DASHES[number % len(DASHES)], **look)
    ticks_at(axes, sorted({record.config["experts"] for record in every}))
    axes.set_xlabel("experts")
    _name_steps(axes, "CPU time of a layer, a rank", format_seconds)
    tidy(axes, f"Time, capacity {capacity}{' of the tokens' if capacity[-1].isdigit() else ''}")


def _over_factor(axes: Any, records: Sequence[Record], key: str, label: str = "") -> None:
    """A metric over the capacity: a line for each number of experts, or without a label one for all."""
    limited = [record for record in records if record.config["slots"] is not None]
    styles = cycle(STYLES if label else [("black", "x")])
    found = lines(limited, factor, *["experts"] * bool(label)).items()
    for (names, line), (colour, marker) in zip(found, styles, strict=False):
        look = {"color": colour, "marker": marker, "markersize": 5, "label": label.format(*names) or EVERY}
        axes.plot(list(map(factor, line)), [record.metrics[key] for record in line], **look)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("capacity: slots of all experts / tokens")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _name_steps(axes: Any, label: str, name: Callable[[float], str]) -> None:
    """A logarithmic axis that names 1, 2 and 5 times the powers of ten, and nothing between."""
    ticker = import_module("matplotlib.ticker")
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: name(value))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
