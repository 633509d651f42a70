"""Pictures of the write-up: drawn by matplotlib, the same bytes for the same data, or taken from beside the records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from textwrap import fill
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, StrMethodFormatter

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLE = {
    "svg.hashsalt": "writeup",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "axes.prop_cycle": cycler(color=COLOURS),
}
WIDTH = 8.0  # inches; printed 17 cm wide, text of 8.3 points has 7
LINE = 95  # characters of a title over the whole width


@dataclass(frozen=True)
class Figure:
    """A picture as SVG, with its caption, and a description for those who cannot see it."""

    name: str
    svg: str
    caption: str
    alt: str

    def __str__(self) -> str:
        alt = self.alt.replace('"', "'")
        return f'![{self.caption}](figures/{self.name}.svg){{#figure-{self.name} alt="{alt}"}}\n'


@contextmanager
def plain_settings(settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Use matplotlib's defaults with these settings, so that a user's matplotlibrc changes no picture."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def draw(
    name: str,
    caption: str,
    alt: str,
    into: Callable[[Any], None],
    columns: int = 0,
    width: float = 7.0,
    height: float = 3.2,
) -> Figure:
    """A figure that `into` draws into its axes or, with a number of `columns`, into the list of so many side by side.

    `width` and `height` are in inches. Text of the caption is Markdown; foreign text in labels must have passed through
    `cs336_systems.host.text.plot_text`.
    """
    with plain_settings(STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        axes: list[Axes] = [canvas.add_subplot(1, columns or 1, 1 + place) for place in range(columns or 1)]
        into(axes if columns else axes[0])
        return Figure(name, _svg(canvas), caption, alt)


def drawn(name: str, canvas: Any, caption: str, alt: str) -> Figure:
    """A matplotlib Figure that was drawn elsewhere for a screen, made narrower; the same bytes for the same data.

    It must have been drawn under `plain_settings`, as all that chapters call is.
    """
    with plain_settings({key: STYLE[key] for key in ("svg.hashsalt", "svg.fonttype")}):
        _narrow(canvas)
        return Figure(name, _svg(canvas), caption, alt)


def _narrow(canvas: Any) -> None:
    """Make a matplotlib figure for a screen narrower, so that its small text can be read on A4: titles and labels are
    broken into lines that fit their panel, legends of several columns get half as many, and the figure gets higher."""
    canvas.set_size_inches(WIDTH, 1.15 * canvas.get_size_inches()[1])
    if canvas.get_suptitle():
        canvas.suptitle(fill(canvas.get_suptitle(), LINE), fontsize="medium")
    for axes in canvas.axes:
        place = axes.get_subplotspec()
        share = (place.colspan.stop - place.colspan.start) / place.get_gridspec().ncols if place else 1.0
        most = max(12, int(0.8 * LINE * share))
        axes.set_title(fill(axes.get_title(loc="left"), most), loc="left", fontsize="medium")
        axes.set_xlabel(fill(axes.get_xlabel(), most))
        if (legend := axes.get_legend()) and legend._ncols > 1:
            below = -0.16 - 0.05 * axes.get_xlabel().count("\n")
            axes.legend(**_halved(legend), loc="upper center", bbox_to_anchor=(0.5, below))
    for legend in canvas.legends:
        legend.remove()
        canvas.legend(**_halved(legend), loc="outside upper left")


def _halved(legend: Any) -> dict[str, Any]:
    labels = [text.get_text() for text in legend.get_texts()]
    columns = (legend._ncols + 1) // 2
    return {"handles": legend.legend_handles, "labels": labels, "ncols": columns, "frameon": False, "fontsize": "small"}


def _svg(canvas: Canvas) -> str:
    text = StringIO()  # `savefig` would draw everything twice: once to lay it out, and once to write it
    FigureCanvasSVG(canvas).print_svg(text, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def logarithmic(axes: Axes, places: Sequence[float], x: str, y: str) -> None:
    """Make both axes logarithmic with plain numbers: ticks at `places` of x, and labels `x` and `y`."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), [f"{place:,.0f}" for place in places])
    if isfinite(axes.dataLim.minposy):  # where records are missing there may be nothing to draw
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
