"""Time of an all-reduce over its size, a line for each number of ranks and backend, the prediction dashed beside it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.collective import size_name
from benchmarks.records import Record, read_records, shown
from cs336_systems.cost.plots.style import STYLES, save, tidy
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import plot_text


def lines(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by line of the plot, each sorted by size; of runs that differ in their warm-up, the newest."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        if record.status == "ok":
            found.setdefault(label(record.config), {})[record.config["bytes"]] = record
    return {name: [by_size[nbytes] for nbytes in sorted(by_size)] for name, by_size in found.items()}


def label(config: dict[str, Any]) -> str:
    """`2 ranks, gloo`, and what else is not usual about them."""
    parts = [f"{config['ranks']} ranks", config["backend"]]
    parts += ["GPU tensors"] if (config["backend"], config["device"]) == ("gloo", "cuda") else []
    parts += [f"{config['nodes']} nodes"] if config["nodes"] > 1 and not config["link"] else []
    return ", ".join(parts) + (f"\n{config['link']}" if config["link"] else "")


def draw(records: Sequence[Record]) -> Any:
    """A matplotlib Figure of some records: a colour for each backend and link, a marker for each number of ranks."""
    figure = import_module("matplotlib.figure").Figure(figsize=(7.5, 5.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    colours: dict[Any, str] = defaultdict(cycle(colour for colour, _ in STYLES).__next__)
    markers: dict[int, str] = defaultdict(cycle(marker for _, marker in STYLES).__next__)
    for name, line in lines(records).items():
        config = line[0].config
        link = config["backend"], config["device"], config["nodes"], config["link"]
        colour, marker = colours[link], markers[config["ranks"]]
        sizes = [record.config["bytes"] for record in line]
        times, low, high = ([r.metrics[f"{key}_ms"] / 1e3 for r in line] for key in ("mean", "min", "max"))
        axes.plot(sizes, times, color=colour, marker=marker, markersize=5, label=plot_text(name))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(sizes, [r.predicted["mean_ms"] / 1e3 for r in line], color=colour, linestyle="--", linewidth=1)
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label="predicted from the links")
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("time until the last rank is done (mean; band: range)")
    name_ticks(axes.xaxis, size_name)
    name_ticks(axes.yaxis, format_seconds)
    tidy(axes, plot_text(f"All-reduce of float32 on {records[-1].environment['device']}"))
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize="small")
    return figure


def name_ticks(axis: Any, name: Callable[[float], str]) -> None:
    """Write an axis's ticks by a function."""
    axis.set_major_formatter(import_module("matplotlib.ticker").FuncFormatter(lambda value, _: name(value)))


def plot(path: Path) -> Path:
    """Draw all records of a file, and return the picture's path, which lies beside it."""
    with shown(path):
        return save(draw(read_records(path)), path.with_suffix(".svg"))
