"""The equality matrix: for each strategy and each property, the tests that prove it equal to one process.

It is in `equality.toml`: node ids by short names, and rows whose cells name some of them or give a reason for none.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs336_systems.errors import UserError
from writeup.gallery import variants

MATRIX = Path(__file__).resolve().with_name("equality.toml")
PROPERTIES = ("parameters", "gradients", "norm", "loss", "resume", "reshard")
UNDEFINED, UNPROVEN, BITS = "not defined: ", "not proven: ", "bits only"


@dataclass(frozen=True)
class Cell:
    """Node ids of tests that prove a property, or the reason why there are none; `note` is a remark for readers."""

    tests: tuple[str, ...] = ()
    note: str = ""

    @property
    def is_defined(self) -> bool:
        """True if the property makes sense for the strategy."""
        return bool(self.tests) or not self.note.startswith(UNDEFINED)


@dataclass(frozen=True)
class Row:
    """A strategy: its name, the files that implement it, and a cell for each property.

    Some tests run many layouts. `layout` says which settings a layout must have to be one of this strategy, each with
    the values that are meant, and `runs` names the layouts of runs that are saved and resumed: with these a test checks
    that what is cited contains the strategy.
    """

    strategy: str
    files: tuple[str, ...]
    cells: dict[str, Cell]
    layout: dict[str, list[Any]] = field(default_factory=dict)
    runs: tuple[str, ...] = ()


def matrix(path: Path = MATRIX) -> tuple[Row, ...]:
    """All rows. Raises UserError for what is missing, empty, or a name that stands for no test."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        tests, rows = data["tests"], data["row"]
        found = tuple(_row(entry, tests) for entry in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path.name} cannot be read: {error!r}") from None
    used = {node for row in found for cell in row.cells.values() for node in cell.tests}
    if unused := [name for name, node in tests.items() if node not in used]:
        raise UserError(f"{path.name}: no cell cites {unused[0]!r}")
    return found


def _row(entry: dict[str, Any], tests: dict[str, str]) -> Row:
    strategy = entry["strategy"]
    if strange := entry.keys() - {"strategy", "files", "layout", "runs", *PROPERTIES}:
        raise UserError(f"equality.toml, {strategy}: there is no {min(strange)!r}")
    cells = {name: _cell(f"{strategy}, {name}", entry[name], tests) for name in PROPERTIES}
    return Row(strategy, tuple(entry["files"]), cells, entry.get("layout", {}), tuple(entry.get("runs", ())))


def _cell(where: str, value: Any, tests: dict[str, str]) -> Cell:
    """A list of names, a text why there is none, or a table of both."""
    if isinstance(value, str):
        if not value.startswith((UNDEFINED, UNPROVEN)) or len(value) < 20:
            raise UserError(f"equality.toml, {where}: an empty cell says {UNDEFINED!r} or {UNPROVEN!r}, and why")
        return Cell(note=value)
    names, note = (value["tests"], value["note"]) if isinstance(value, dict) else (value, "")
    if not names or (unknown := [name for name in names if name not in tests]):
        raise UserError(f"equality.toml, {where}: {unknown[0]!r} stands for no test" if names else f"{where} is empty")
    return Cell(tuple(tests[name] for name in names), note)


def cited() -> tuple[str, ...]:
    """The node ids of every test that the matrix or the gallery names, each once."""
    in_matrix = (node for row in matrix() for cell in row.cells.values() for node in cell.tests)
    return tuple(dict.fromkeys([*in_matrix, *(variant.test for variant in variants())]))
