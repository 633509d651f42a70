"""The course map: for each problem of three editions, the code, the command, the chapter and the test that answer it.

The map is in `course.toml`; this file reads it and refuses an incomplete entry by name.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.errors import UserError
from cs336_systems.presets import COURSE_YEARS
from writeup.contents import CHAPTERS

MAP = Path(__file__).resolve().with_name("course.toml")
LISTS = ("code", "commands", "tests")
KEYS = {"id": str, "asks": str, "chapter": str, "note": str, "years": list, **dict.fromkeys(LISTS, list)}
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
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from None
    entries = data.pop("problem", None)
    if data or not isinstance(entries, list) or not entries:
        raise UserError(f"{path.name} must be a list of [[problem]] and nothing else")
    problems = tuple(_problem(f"{path.name}, problem {number}", entry) for number, entry in enumerate(entries, 1))
    seen: set[tuple[str, int]] = set()
    for problem in problems:
        for year in problem.years:
            if (problem.id, year) in seen:
                raise UserError(f"{path.name}: {problem.id} of {year} is there twice")
            seen.add((problem.id, year))
    return problems


def _problem(where: str, entry: Any) -> Problem:
    """An entry of the file, checked as far as one can without the project's other files."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is no table")
    where = f"{where} ({entry.get('id', 'without id')})"
    if strange := sorted(entry.keys() - KEYS.keys()):
        raise UserError(f"{where}: there is no {strange[0]!r}; the words are {', '.join(KEYS)}")
    for key, kind in KEYS.items():
        if key not in entry and key != "note":
            raise UserError(f"{where}: {key} is missing")
        if not isinstance(entry.get(key, "none"), kind) or not entry.get(key, "none"):
            raise UserError(f"{where}: {key} must be a {'text' if kind is str else 'list'} and not empty")
    for key in LISTS:
        if wrong := [each for each in entry[key] if not isinstance(each, str) or not each]:
            raise UserError(f"{where}: {key} has {wrong[0]!r}, which is no text")
    if entry["years"] != [year for year in COURSE_YEARS if year in entry["years"]]:
        raise UserError(f"{where}: years are {entry['years']}, not some of {list(COURSE_YEARS)} in order")
    if entry["chapter"] not in CHAPTERS:
        raise UserError(f"{where}: no chapter is called {entry['chapter']!r}; there are {', '.join(CHAPTERS)}")
    return Problem(
        id=entry["id"],
        asks=entry["asks"],
        years=tuple(entry["years"]),
        chapter=entry["chapter"],
        code=tuple(_place(where, text) for text in entry["code"]),
        commands=tuple(entry["commands"]),
        tests=tuple(entry["tests"]),
        note=entry.get("note", ""),
    )


def _place(where: str, text: str) -> Place:
    """`FILE: NAME` or `FILE`."""
    if not (found := _CODE.fullmatch(text)):
        raise UserError(f"{where}: code has {text!r}, which is neither FILE nor FILE: NAME")
    return Place(found["file"], found["name"])
