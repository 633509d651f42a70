"""A scaling study in three panels: throughput over ranks, efficiency, and what an iteration is made of."""

from collections.abc import Sequence
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.lib.scaling_anomalies import marks
from benchmarks.lib.scaling_logs import BUBBLE, ScalingRun, default_base, efficiency, top_level
from cs336_systems.cost.plots.style import STYLES, ticks_at, tidy

# Okabe and Ito 2008; the bubble, in which nothing runs, is hatched.
PARTS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "sent between stages": "#009E73",
    "bubble": "#FFFFFF",
    "gradients' all-reduce": "#E69F00",
    "optimizer": "#CC79A7",
    "other timers": "#999999",
    "no timer": "#DDDDDD",
}
CARE = "#D55E00"  # marks what the findings are about; no line has this colour
LINES = tuple(style for style in STYLES if style[0] != CARE)
ROOM = 1.6  # a bar higher than this many times the next one is drawn smaller, to keep the others readable


def part(name: str) -> str:
    """The part of an iteration to which an outermost timer belongs."""
    plain = name.removesuffix("-wait")
    kinds = {
        "bubble": plain in BUBBLE,
        "optimizer": plain.startswith("optimizer"),
        "gradients' all-reduce": "params-all-reduce" in plain or "grads" in plain,
        "sent between stages": "send" in plain or "recv" in plain,
        "forward": plain == "forward-compute",
        "backward": plain == "backward-compute",
        "other timers": True,
    }
    return next(kind for kind, holds in kinds.items() if holds)


def breakdown(run: ScalingRun) -> dict[str, float]:
    """Milliseconds of an iteration by part, in the order of PARTS: in sum the iteration or, if more, the timers."""
    shares = dict.fromkeys(PARTS, 0.0)
    for name, value in top_level(run).items():
        shares[part(name)] += value
    shares["no timer"] = max(0.0, run.iteration_ms - sum(shares.values()))
    return shares


def draw(runs: Sequence[ScalingRun]) -> Any:
    """A matplotlib Figure of some runs; the ideal starts from `default_base`, efficiency from the first run, too."""
    base = default_base(runs)
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.1))
    throughput, ratio, bars = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    _throughput(throughput, runs, base)
    _efficiency(ratio, runs, base)
    _breakdown(bars, runs)
    for axes, place in ((throughput, "upper left"), (ratio, (0.5, 0.74))):
        ticks_at(axes, sorted({run.world for run in runs}))
        axes.set_xlabel("ranks")
        axes.legend(frameon=False, fontsize="small", loc=place)
    tidy(throughput, "Throughput")
    tidy(ratio, "Efficiency: throughput of a rank")
    tidy(bars, "An iteration by timer; above each bar by the clock")
    bars.grid(visible=False)
    return figure


def _series(runs: Sequence[ScalingRun]) -> dict[str, list[ScalingRun]]:
    """The runs of each line, by ranks: only those whose model is cut alike belong on one."""
    lines: dict[str, list[ScalingRun]] = {}
    for run in sorted(runs, key=lambda run: run.world):
        lines.setdefault(f"tp {run.tp}, pp {run.pp}", []).append(run)
    return lines


def _throughput(axes: Any, runs: Sequence[ScalingRun], base: ScalingRun) -> None:
    axes.set_yscale("log")
    for (name, line), (colour, marker) in zip(_series(runs).items(), cycle(LINES), strict=False):
        speeds = [run.samples_per_s for run in line]
        axes.plot([run.world for run in line], speeds, color=colour, marker=marker, markersize=6, label=name)
    worlds = [min(run.world for run in runs), max(run.world for run in runs)]
    ideal = [base.samples_per_s / base.world * world for world in worlds]
    axes.plot(worlds, ideal, "--", color="black", linewidth=1, label=f"ideal, from W = {base.world}")
    found = sorted((numbers, run.world, run.samples_per_s) for numbers, run in zip(marks(runs), runs, strict=True))
    beside = {"textcoords": "offset points", "color": CARE, "fontsize": "small", "ha": "left", "va": "center"}
    for numbers, *place in (each for each in found if each[0]):
        axes.plot(*place, "o", markersize=13, fillstyle="none", color=CARE)
        axes.annotate(numbers, place, (9, -9), **beside)
    if any(marks(runs)):
        axes.plot([], [], "o", markersize=9, fillstyle="none", color=CARE, label="finding below the table")
    axes.yaxis.set_major_formatter(import_module("matplotlib.ticker").StrMethodFormatter("{x:,g}"))
    axes.set_ylabel("samples / s")


def _efficiency(axes: Any, runs: Sequence[ScalingRun], base: ScalingRun) -> None:
    references = [runs[0]] if base is runs[0] else [runs[0], base]
    for reference, (colour, marker) in zip(references, LINES, strict=False):
        label: str | None = f"relative to W = {reference.world}"
        for line in _series([run for run in runs if run.world >= reference.world]).values():
            shares = [100 * efficiency(run, reference) for run in line]
            axes.plot([run.world for run in line], shares, color=colour, marker=marker, markersize=6, label=label)
            label = None  # the legend has one line for each reference
    axes.axhline(100, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("%")


def _breakdown(axes: Any, runs: Sequence[ScalingRun]) -> None:
    shares, places = np.array([list(breakdown(run).values()) for run in runs]), range(len(runs))  # (run part)
    totals = shares.sum(axis=1)
    highest = sorted(totals)
    while len(highest) > 1 and highest[-1] > ROOM * highest[-2]:
        highest.pop()
    scales = np.minimum(1.0, highest[-1] / totals)
    heights = shares * scales[:, None]
    tops = heights.cumsum(axis=1)
    for number, (name, colour) in enumerate(PARTS.items()):
        if heights[:, number].any():
            style = {"hatch": "///", "edgecolor": "#555555"} if name == "bubble" else {"edgecolor": "white"}
            bottom = tops[:, number] - heights[:, number]
            axes.bar(places, heights[:, number], 0.7, bottom, color=colour, linewidth=0.5, label=name, **style)
    for place, run, scale, top, numbers in zip(places, runs, scales, tops[:, -1], marks(runs), strict=True):
        text = f"{run.iteration_ms:,.0f} ms" + (f"\ndrawn at 1/{1 / scale:.1f}" if scale < 1 else "")
        look = {"ha": "center", "fontsize": "small", "color": CARE if numbers else "black"}
        text += f"  [{numbers}]" if numbers else ""
        axes.annotate(text, (place, top), (0, 3), textcoords="offset points", **look)
    axes.set_xticks(places, [f"{run.world}\n{run.layout}" for run in runs])
    axes.set_xlabel("ranks, and as tp/pp/dp")
    axes.set_ylabel("ms")
    axes.set_ylim(0, 1.15 * tops[:, -1].max())
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(PARTS))
