"""Errors and omissions of the notebook, and differences between its code and its printed output.

`differences.txt` states each at the notebook's own sizes: its kind and name, then lines for what the notebook has (none
for `missing`), what is right (for `text`: what it printed), and what that changes. Tests compute its numbers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["wrong", "missing", "text"]


@dataclass(frozen=True)
class Difference:
    """One difference: what the notebook has, what is right (`text`: what it printed), and what that changes."""

    kind: Kind
    name: str
    notebook: str
    right: str
    effect: str


def differences() -> tuple[Difference, ...]:
    found: list[list[Any]] = []
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kind, _, name = line[2:].partition(": ")
            found.append([kind, name, *[""] * (kind == "missing")])
        else:
            found[-1].append(line)
    return tuple(Difference(*each) for each in found)


DIFFERENCES = differences()
