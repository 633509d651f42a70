"""Reads an SVG by matplotlib: shapes with tooltips, and text."""

import re
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


class Shape(NamedTuple):
    """A shape's tooltip, its edges in pixels, and its fill."""

    tooltip: str
    left: float
    top: float
    right: float
    bottom: float
    fill: str


def shapes(svg: str) -> list[Shape]:
    """All shapes that have a tooltip."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, path = group.find(f"{SVG}title"), next(group.iter(f"{SVG}path"), None)
        if title is not None and path is not None:
            points = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d", ""))
            xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
            fill = re.search(r"fill: ([^;]+)", path.get("style", ""))
            colour = fill[1] if fill else ""
            found.append(Shape(title.text or "", min(xs), min(ys), max(xs), max(ys), colour))
    return found


def texts(svg: str) -> list[str]:
    """All text, in order."""
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def placed_texts(svg: str) -> list[tuple[float, float, float, str]]:
    """(x, y, size, words) of all text that is not turned; x is that of its left edge, if it is set left."""
    found = []
    for each in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        style = each.get("style", "")
        size = re.search(r"([\d.]+)px", style)
        place = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", each.get("transform", ""))
        x, y = (float(place[1]), float(place[2])) if place else (float(each.get("x", 0)), float(each.get("y", 0)))
        if "text-anchor: " not in style or "start" in style:
            found.append((x, y, float(size[1]) if size else 0.0, each.text or ""))
    return found
