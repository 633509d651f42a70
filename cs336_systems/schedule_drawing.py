"""A pipeline's timeline as text: a row for each stage, a run of characters for each action, dots for idle time."""

import math
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Literal, NamedTuple

LEGEND = "0> forward and 0< backward of microbatch 0; with chunks, 0a and 0A in chunk a, 0b and 0B in chunk b; . idle"


class Cell(NamedTuple):
    """An action and when it ran."""

    start: float
    end: float
    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int


def draw(rows: Sequence[Sequence[Cell]], chunks: int, width: int) -> str:
    """The rows, at most `width` columns wide in all; a row's cells come in the order of time and do not overlap.

    The shortest cell takes a whole number of columns, so that equal times look equal, unless `width` is too small for
    that. A cell whose microbatch's number leaves no room shows only its direction and chunk.
    """
    margin = len(f"stage {len(rows) - 1} ")
    makespan = max(row[-1].end for row in rows)
    shortest = min(cell.end - cell.start for row in rows for cell in row)
    scale = max(width - margin, 1) / makespan
    # The small term undoes the rounding of times such as a third.
    columns = math.floor(scale * shortest + 1e-9)
    if columns:
        scale = columns / shortest
    lines = [_line(row, chunks, scale).ljust(round(makespan * scale), ".") for row in rows]
    return "\n".join(f"stage {stage}".ljust(margin) + line for stage, line in enumerate(lines))


def _line(row: Sequence[Cell], chunks: int, scale: float) -> str:
    text = ""
    for cell in row:
        start, end = round(cell.start * scale), round(cell.end * scale)
        number = str(cell.microbatch) if len(str(cell.microbatch)) < end - start else ""
        text = text.ljust(start, ".") + number.ljust(end - start, _mark(cell, chunks))
    return text


def _mark(cell: Cell, chunks: int) -> str:
    if chunks == 1:
        return ">" if cell.kind == "forward" else "<"
    letter = ascii_lowercase[cell.chunk % len(ascii_lowercase)]
    return letter if cell.kind == "forward" else letter.upper()
