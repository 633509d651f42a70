"""Conversion of a figure drawn for a screen to a narrow one, whose small text can be read on A4."""

from textwrap import fill
from typing import Any

WIDTH = 8.0  # inches; printed 17 cm wide, text of 8.3 points has 7
LINE = 95  # characters of a title over the whole width


def narrowed(canvas: Any, width: float = WIDTH) -> Any:
    """Make the matplotlib figure narrower. Titles and labels are broken into lines that fit their panel, legends of
    several columns get half as many, and the figure gets higher for them."""
    canvas.set_size_inches(width, 1.15 * canvas.get_size_inches()[1])
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
    return canvas


def _halved(legend: Any) -> dict[str, Any]:
    labels = [text.get_text() for text in legend.get_texts()]
    columns = (legend._ncols + 1) // 2
    return {"handles": legend.legend_handles, "labels": labels, "ncols": columns, "frameon": False, "fontsize": "small"}
