"""SVG pictures by matplotlib: a page in pixels, colours, text that fits its room, and tooltips.

Text stays text, and the same numbers give the same bytes.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cs336_systems.host.text import plot_text, printable

# Phases in colours that every common colour vision tells apart (after Okabe and Ito 2008): the strong one of what is on
# top, the pale one of what lies within or behind it.
PAINTS = {
    "forward": ("#56B4E9", "#C4E4F7"),
    "backward": ("#E69F00", "#F7DEA8"),
    "synchronise": ("#DD92BD", "#F2D3E4"),
    "optimizer": ("#3DB892", "#B5E4D4"),
    "other": ("#B8B8B8", "#DEDEDE"),
}
INK, GREY, FAINT = "#222222", "#888888", "#dddddd"
WIDTH = 1400  # pixels
CHARACTER = 0.6  # width of a character of DejaVu Sans Mono, over its size
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cs336_systems",
    "font.family": "monospace",
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "hatch.linewidth": 2,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "path.simplify": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside in our style; `@styled()` decorates functions that draw."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may have any character, and text stays text
        yield


class Picture:
    """A figure of WIDTH x height pixels with a title; artists may have tooltips, which show under the pointer."""

    def __init__(self, height: float, title: str) -> None:
        self.height, self.title = height, title
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        self.tooltips: list[str] = []
        self.text(12, 26, title, size=17)

    def text(self, x: float, y: float, words: str, size: float = 12, **style: Any) -> None:
        """One line whose baseline is at (x, y), in pixels from the upper left corner."""
        self.figure.text(x / WIDTH, 1 - y / self.height, plot_text(words), size=size, **style)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes in a box given in pixels from the upper left corner."""
        box = (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        return self.figure.add_axes(box)

    def legend(self, y: float, entries: Mapping[str, Rectangle], x: float = 12, size: float = 12) -> None:
        """One line of coloured boxes and what they mean, at y pixels from the top."""
        for words, patch in entries.items():
            patch.set(transform=self.figure.transFigure)
            self.figure.add_artist(patch)
            patch.set_bounds(x / WIDTH, 1 - (y + 12) / self.height, 22 / WIDTH, 12 / self.height)
            self.text(x + 28, y + 10, words, size)
            x += 28 + len(words) * CHARACTER * size + 20

    def tooltip(self, words: str) -> str:
        """The id of an artist that shows some words, in lines, while the pointer rests on it."""
        self.tooltips.append(words)
        return f"tooltip-{len(self.tooltips) - 1}"

    def box(
        self, axes: Axes, x: float, y: float, width: float, height: float, fill: str, tooltip: str = "", **style: Any
    ) -> None:
        """A rectangle in the units of some axes, which must lie within them."""
        gid = self.tooltip(tooltip) if tooltip else None
        look: dict[str, Any] = {"facecolor": fill, "linewidth": 0, "clip_on": False, "gid": gid} | style
        axes.add_artist(Rectangle((x, y), width, height, **look))

    def render(self) -> str:
        """The SVG document."""
        file, metadata = StringIO(), {"Date": None, "Creator": None, "Title": printable(self.title)}
        with styled():
            self.figure.savefig(file, format="svg", metadata=metadata)
        # XML has no control characters at all.
        titles = [f"<g><title>{escape(printable(words, keep=chr(10)))}</title>" for words in self.tooltips]
        return re.sub(r'<g id="tooltip-(\d+)">', lambda match: titles[int(match[1])], file.getvalue())

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(), encoding="utf-8")


def swatch(fill: str, **style: Any) -> Rectangle:
    """A box of a legend."""
    look: dict[str, Any] = {"facecolor": fill, "linewidth": 0} | style
    return Rectangle((0, 0), 0, 0, **look)


def fitting(words: str, width: float, size: float = 12) -> str:
    """As much of a text as fits a width in pixels, with an ellipsis where it was cut; nothing if two letters do not."""
    room = int(width / (CHARACTER * size))
    if len(words) <= room:
        return words
    return words[: room - 1] + "…" if room > 2 else ""
