"""The course map: for each problem of three editions, the code, the command, the chapter and the test that answer it.

The map is in `course.toml`; this file reads it and refuses an incomplete entry by name.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cs336_systems.errors import UserError
from cs336_systems.presets import COURSE_YEARS
from writeup.contents import CHAPTERS
from writeup.entries import Fields, check_fields, check_texts, read_entries

MAP = Path(__file__).resolve().with_name("course.toml")
LISTS = ("code", "commands", "tests")
NEEDED = {"id": str, "asks": str, "years": list, "chapter": str, **dict.fromkeys(LISTS, list)}
_CODE = re.compile(r"(?P<file>[\w./-]+)(: (?P<name>[A-Za-z_][\w.]*))?")


class Place(NamedTuple):
    """A file of the project, and a class or function in it, or None for all of it."""

    file: str
    name: str | None


@dataclass(frozen=True)
class Problem:
    """One problem of the assignment, in the editions of `years`, and the places of this project's answer."""

    id: str
    asks: str
    years: tuple[int, ...]
    chapter: str
    code: tuple[Place, ...]
    commands: tuple[str, ...]
    tests: tuple[str, ...]  # FILE or FILE::NAME
    note: str = ""

    @property
    def is_named(self) -> bool:
        """True if the handouts give the deliverable a name, and do not only ask for it."""
        return " " not in self.id


def course_map(path: Path = MAP) -> tuple[Problem, ...]:
    """Every problem, in the order of the file.

    Raises UserError for an entry that lacks something, has an unknown key or value, or comes twice in a year.
    """
    entries = read_entries(path, "problem")["problem"]
    if not entries:
        raise UserError(f"{path.name} has no [[problem]]")
    problems = tuple(_problem(where, entry) for where, entry in entries)
    seen: set[tuple[str, int]] = set()
    for problem in problems:
        for year in problem.years:
            if (problem.id, year) in seen:
                raise UserError(f"{path.name}: {problem.id} of {year} is there twice")
            seen.add((problem.id, year))
    return problems


def _problem(where: str, entry: Fields) -> Problem:
    """An entry of the file, checked as far as one can without the project's other files."""
    check_fields(where, entry, NEEDED, {"note": str})
    check_texts(where, entry, *LISTS)
    if empty := [name for name, value in entry.items() if not value]:
        raise UserError(f"{where}: {', '.join(empty)} must not be empty")
    if entry["years"] != [year for year in COURSE_YEARS if year in entry["years"]]:
        raise UserError(f"{where}: years are {entry['years']}, not some of {list(COURSE_YEARS)} in order")
    if entry["chapter"] not in CHAPTERS:
        raise UserError(f"{where}: no chapter is called {entry['chapter']!r}; there are {', '.join(CHAPTERS)}")
    lists = {"years": tuple(entry["years"]), **{name: tuple(entry[name]) for name in LISTS}}
    return Problem(**entry | lists | {"code": tuple(_place(where, text) for text in entry["code"])})


def _place(where: str, text: str) -> Place:
    """`FILE: NAME` or `FILE`."""
    if not (found := _CODE.fullmatch(text)):
        raise UserError(f"{where}: code has {text!r}, which is neither FILE nor FILE: NAME")
    return Place(found["file"], found["name"])
