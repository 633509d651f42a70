"""Time of an all-reduce over its size, a line for each number of ranks and backend, the prediction dashed beside it."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.collective import size_name
from benchmarks.records import Record, read_records, shown
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import plot_text

HOW_TO_PLOT = "no plot without matplotlib; python -m pip install -e '.[writeup]' brings it"
# Told apart by every common colour vision (Okabe and Ito 2008), and by their markers where printed in grey.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v"), ("#555555", "P"))


def can_plot() -> bool:
    """True if matplotlib, of the optional extra `writeup`, is installed."""
    return find_spec("matplotlib") is not None


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


def draw(records: Iterable[Record]) -> Any:
    """A matplotlib Figure of some records."""
    figure = import_module("matplotlib.figure").Figure(figsize=(7.5, 5.5), layout="constrained")
    ticker, axes = import_module("matplotlib.ticker"), figure.add_subplot(xscale="log", yscale="log")
    for (name, line), (colour, marker) in zip(lines(records).items(), cycle(STYLES), strict=False):
        sizes = [record.config["bytes"] for record in line]
        times, low, high = ([r.metrics[f"{key}_ms"] / 1e3 for r in line] for key in ("mean", "min", "max"))
        axes.plot(sizes, times, color=colour, marker=marker, markersize=5, label=plot_text(name))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(sizes, [r.predicted["mean_ms"] / 1e3 for r in line], color=colour, linestyle="--", linewidth=1)
        device = plot_text(line[0].environment["device"])
        axes.set_title(f"All-reduce of float32 on {device}", loc="left", fontsize="medium")
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label="predicted from the links")
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("time until the last rank is done (mean; band: range)")
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: size_name(value)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_seconds(value)))
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize="small")
    return figure


def plot(path: Path) -> Path:
    """Draw all records of a file, and return the picture's path, which lies beside it."""
    picture = path.with_suffix(".svg")
    # The same records give the same file: no date, and identifiers from a fixed salt.
    with shown(path), import_module("matplotlib").rc_context({"svg.hashsalt": "allreduce"}):
        draw(read_records(path)).savefig(picture, metadata={"Date": None})
    return picture
