"""SVG pictures by matplotlib: colours, and boxes with tooltips and with labels where they fit.

Text stays text, and the same numbers give the same bytes.
"""

import re
import warnings
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cs336_systems.host.text import plot_text, printable

# Phases in colours that every common colour vision tells apart (after Okabe and Ito 2008).
PAINTS = {"forward": "#56B4E9", "backward": "#E69F00", "synchronise": "#DD92BD", "optimizer": "#3DB892"}
OTHER = "#C4C4C4"
INK, GREY, FAINT = "#222222", "#888888", "#dddddd"
WIDTH, ROW, SIZE = 1400, 19, 12  # pixels of a picture, of a row of boxes, and of letters
MARGIN = 160  # pixels at the sides of the axes, at most
CHARACTER = 0.6  # width of a character of DejaVu Sans Mono, over its size
STYLE: dict[str, Any] = {  # of `@rc_context(STYLE)`, around all that draws
    "svg.fonttype": "none",
    "svg.hashsalt": "cs336_systems",
    "font.family": "monospace",
    "font.size": SIZE,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "figure.constrained_layout.h_pad": 0.1,
    "hatch.linewidth": 2,
    "legend.frameon": False,
    "legend.title_fontsize": 17,
}


class Box(NamedTuple):
    """A rectangle in a row, in the units of the axes."""

    left: float
    width: float
    row: float
    fill: str
    tip: str = ""  # shown under the pointer
    labels: tuple[str, ...] = ()  # the first that fits is written on it
    edge: str = ""
    hatch: str = ""


def page(height: float) -> Figure:
    """An empty picture of WIDTH x height pixels."""
    return Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")


def draw_boxes(axes: Axes, boxes: Iterable[Box]) -> None:
    """Draw boxes in axes whose limits are set."""
    start, end = axes.get_xlim()
    character = SIZE * CHARACTER / (WIDTH - MARGIN) * (end - start)
    for box in boxes:
        shape = Rectangle((box.left, box.row - 0.44), box.width, 0.88, clip_on=False, in_layout=False)
        shape.set(facecolor=box.fill, edgecolor=box.edge or box.fill, hatch=box.hatch, linewidth=0.6)
        shape.set_gid("tip " + printable(box.tip, keep="\n"))
        axes.add_artist(shape)
        if words := next((each for each in box.labels if (len(each) + 1) * character <= box.width), ""):
            ink = "white" if sum(to_rgb(box.fill)) < 1.5 else INK
            ground = {"facecolor": box.fill, "edgecolor": "none", "pad": 0.5}
            left = box.left + character / 2
            axes.text(left, box.row, plot_text(words), va="center_baseline", color=ink, bbox=ground, in_layout=False)


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a picture as SVG. Artists' ids that begin with "tip " become tooltips."""
    file, metadata = StringIO(), {"Date": None, "Creator": None, "Title": printable(title)}
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may have any character, and text stays text
        figure.savefig(file, format="svg", metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = re.sub(r"""<g id=(["'])tip (.*?)\1>""", r"<g><title>\2</title>", file.getvalue(), flags=re.DOTALL)
    path.write_text(svg, encoding="utf-8")
