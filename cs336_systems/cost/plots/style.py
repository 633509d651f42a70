"""Shared parts of the pictures: colours, axes, labels that do not overlap, and files with stable bytes."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from cs336_systems.cost.domain import MACHINES
from cs336_systems.cost.machines import System, check_out
from cs336_systems.errors import UserError
from cs336_systems.host.console import os_errors
from cs336_systems.host.text import plot_text

HOW_TO_PLOT = "no plot without matplotlib; python -m pip install -e '.[writeup]' brings it"
SUFFIXES = (".svg", ".png", ".pdf")
# Distinct in all common forms of colour vision (Okabe and Ito 2008), and by their markers in grey.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
FORWARD, BACKWARD = "#56B4E9", "#0072B2"
GREY, PALE = "#555555", "#dddddd"


def can_plot() -> bool:
    """True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_path(path: Path, option: str = "--out") -> Path:
    """The path. Raises UserError where no picture can be written: without matplotlib, a known suffix or permission."""
    if not can_plot():
        raise UserError(HOW_TO_PLOT)
    if path.suffix not in SUFFIXES:
        raise UserError(f"{option} {path} should end in {', '.join(SUFFIXES)}")
    check_out(path, option)
    return path


def new_figure(width: float, height: float, systems: Sequence[System], heading: str = "") -> Any:
    """An empty matplotlib Figure, in inches; a footnote names machines that no fitted run was on."""
    figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    if heading:
        figure.suptitle(heading, fontsize="medium")
    if names := [system.name for system in systems if system.name not in MACHINES]:
        note = f"predicted; {plot_text(', '.join(names))}: figures of data sheets, no run was fitted"
        figure.supxlabel(note, x=0.01, ha="left", color=GREY, fontsize="small")
    return figure


def tidy(axes: Any, title: str, grid: str = "both") -> None:
    """The title to the left, thin grid lines behind what is drawn, and no box around it."""
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(which="major", axis=grid, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="minor", bottom=False, left=False)


def ticks_at(axes: Any, values: Sequence[int], names: Sequence[str] | None = None) -> None:
    """A logarithmic axis of counts, with a tick at each of them and nothing between."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, names or [str(value) for value in values])
    axes.xaxis.set_minor_locator(import_module("matplotlib.ticker").NullLocator())


def name_lines(axes: Any) -> None:
    """A legend to the right of the lines, in the order of their ends from the top down."""
    lines = sorted((each for each in axes.lines if each.get_label()[0] != "_"), key=lambda each: -each.get_ydata()[-1])
    axes.legend(handles=lines, loc="center right", frameon=False, fontsize="small")


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places of labels at least `gap` apart, with the least sum of squared distances to the given ones, in their order:
    an isotonic regression, by the max-min formula (Robertson, Wright and Dykstra, 1988)."""
    order, found = sorted(range(len(places)), key=places.__getitem__), [0.0] * len(places)
    wanted = [places[who] - gap * number for number, who in enumerate(order)]  # these must not decrease
    for number, who in enumerate(order):
        ends = range(number + 1, len(places) + 1)
        found[who] = gap * number + max(min(fmean(wanted[a:b]) for b in ends) for a in range(number + 1))
    return found


def save(figure: Any, path: Path, option: str = "--out") -> Path:
    """Write a picture, of the kind that its suffix says; returns its path. Raises UserError if that cannot be."""
    date = None if path.suffix == ".png" else {"Date" if path.suffix == ".svg" else "CreationDate": None}
    # The same numbers give the same file: no date, and identifiers from a fixed salt. Text that stays text is smaller.
    fixed = import_module("matplotlib").rc_context({"svg.hashsalt": "cost", "svg.fonttype": "none"})
    with fixed, os_errors(f"write {path}", f"name another file with {option}"):
        figure.savefig(path, dpi=130, metadata=date)
    return path
