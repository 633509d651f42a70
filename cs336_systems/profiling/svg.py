"""A little SVG: rectangles, areas, text and time axes, in a file that any browser shows without network or scripts."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cs336_systems.text import printable

# What happens in a phase, in colours that every common colour vision tells apart (after Okabe and Ito 2008): the strong
# one of what is on top, the pale one of what lies within or behind it.
PAINTS = {
    "forward": ("#56B4E9", "#C4E4F7"),
    "backward": ("#E69F00", "#F7DEA8"),
    "synchronise": ("#DD92BD", "#F2D3E4"),
    "optimizer": ("#3DB892", "#B5E4D4"),
    "other": ("#B8B8B8", "#DEDEDE"),
}
INK, FAINT, PAPER = "#222222", "#dddddd", "#ffffff"
NEW_LINE = "\n"
CHARACTER = 0.6  # width of a character of the monospaced font, over its size


class Drawing:
    """A picture of width x height pixels; shapes are drawn in the order of the calls."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, hover: str = "", stroke: str = "none"
    ) -> None:
        """A filled rectangle; `hover` shows while the pointer rests on it."""
        self.shapes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" stroke="{stroke}">'
            f"{_title(hover)}</rect>"
        )

    def text(self, x: float, y: float, words: str, size: float = 12, anchor: str = "start", fill: str = INK) -> None:
        """One line of text whose baseline is at y; `anchor` is start, middle or end."""
        self.shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}" '
            f'pointer-events="none">{escape(printable(words))}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, dash: str = "") -> None:
        """A thin line, dashed if `dash` says how ("4 3")."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}"{dashes}/>')

    def area(self, points: Sequence[tuple[float, float]], fill: str, hover: str = "") -> None:
        """A filled polygon."""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.shapes.append(f'<polygon points="{path}" fill="{fill}">{_title(hover)}</polygon>')

    def render(self) -> str:
        """The SVG document."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="DejaVu Sans Mono, Menlo, monospace">',
                _title(self.title),
                f'<rect width="100%" height="100%" fill="{PAPER}"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )

    def save(self, path: Path) -> None:
        """Write the document."""
        path.write_text(self.render(), encoding="utf-8")


def _title(words: str) -> str:
    """What shows while the pointer rests on a shape, in lines; XML has no control characters at all."""
    return f"<title>{escape(printable(words, keep=NEW_LINE))}</title>" if words else ""


def fitting(words: str, width: float, size: float = 12) -> str:
    """As much of a text as fits a width in pixels, with an ellipsis where it was cut; nothing if two letters do not."""
    room = int(width / (CHARACTER * size))
    if len(words) <= room:
        return words
    return words[: room - 1] + "…" if room > 2 else ""


def round_ticks(largest: float, about: int = 8) -> list[float]:
    """Round numbers from 0 up to `largest`, about so many: steps of 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return [0.0]
    rough = largest / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(largest / step + 1e-9) + 1)]
