"""Line counts of every room against its budget, and of README's week-end reading: `python -m tests.sizes`.

A room is a row of ARCHITECTURE.md's table: a file at the flat level of cs336_systems/, or a folder. Exits with 1 if a
limit is exceeded.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1.2  # a room may exceed its own budget by a fifth; the limits below are exact
ROW = re.compile(r"^\| (\d+) \| `([\w/]+?)(\.py|/)` \| ([\d,]+) \|", re.MULTILINE)


@dataclass(frozen=True)
class Room:
    """A row of the table: its floor, its path from the root without an ending, and its budget in lines."""

    floor: int
    name: str
    budget: int

    @property
    def files(self) -> list[Path]:
        folder = ROOT / self.name
        return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def rooms() -> list[Room]:
    """The rows of ARCHITECTURE.md's table, in its order."""
    rows = ROW.findall((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    return [Room(int(floor), name, int(budget.replace(",", ""))) for floor, name, _, budget in rows]


def lines_of(files: list[Path]) -> int:
    """Lines in some files, docstrings, comments and blank lines included."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def week_end() -> list[Path]:
    """The Python files that README's week-end reading names, in its order; a folder stands for all its files."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## A week-end's reading\n")[1].split("\n## ")[0]
    found: dict[Path, None] = {}
    for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|", section, re.MULTILINE):
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            path = next((each for each in (ROOT / "cs336_systems" / name, ROOT / name) if each.exists()), None)
            if path is None:
                raise FileNotFoundError(f"README's week-end reading names {name}, which does not exist")
            found |= dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path])
    return list(found)


def parts() -> dict[str, tuple[int, int, int]]:
    """(lines, limit, goal) of each part of the project that has a limit of its own; a limit is lowered after a cut."""
    size = {room.name: lines_of(room.files) for room in rooms()}
    beside = ("cs336_systems/cost", "cs336_systems/profiling", "cs336_systems/check")
    library = sum(n for name, n in size.items() if name.startswith("cs336_systems/") and name not in beside)
    return {
        "library without cost, profiling, check": (library, 13_268, 10_500),
        "check": (size["cs336_systems/check"], 2_753, 900),
        "cost": (size["cs336_systems/cost"], 7_128, 7_500),
        "profiling": (size["cs336_systems/profiling"], 3_489, 3_500),
        "kernels": (size["kernels"], 2_000, 2_000),
        "README's week-end reading": (lines_of(week_end()), 5_000, 5_000),
    }


def main() -> None:
    """Print both tables."""
    console, failed = Console(width=80), False
    by_room = Table("room", "lines", "budget")
    for room in rooms():
        lines = lines_of(room.files)
        over = lines > room.budget * TOLERANCE
        failed |= over
        by_room.add_row(room.name, f"{lines:,}", f"{room.budget:,}", style="bold red" if over else "")
    by_part = Table("part", "lines", "limit", "goal")
    for name, (lines, limit, goal) in parts().items():
        failed |= lines > limit
        by_part.add_row(name, f"{lines:,}", f"{limit:,}", f"{goal:,}", style="bold red" if lines > limit else "")
    console.print(by_room, by_part)
    tests = lines_of(sorted((ROOT / "tests").rglob("*.py")))
    console.print(f"tests: {tests:,} lines")
    sys.exit(failed)


if __name__ == "__main__":
    main()
