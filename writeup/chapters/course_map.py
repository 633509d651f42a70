"""The course map: for each problem of three editions, the code, the command, the chapter and the test that answer it.

The map is in `course.toml`; this file reads it, refuses an incomplete entry by name, and shows it as a table of
editions and a list by chapter.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.errors import UserError
from cs336_systems.host.text import markdown_code, markdown_text
from cs336_systems.presets import COURSE_YEARS
from writeup.book import Book
from writeup.edition import CHAPTERS
from writeup.entries import Fields, made, read_entries
from writeup.tables import markdown

MAP = Path(__file__).resolve().parents[1] / "course.toml"
ASKED = "●"
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
    if empty := [name for name, value in entry.items() if not value]:
        raise UserError(f"{where}: {', '.join(empty)} must not be empty")
    lists: Fields = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    code = tuple(_place(where, text) for text in lists.get("code", ()))
    problem = made(where, Problem, {**entry, **lists, "code": code})
    if list(problem.years) != [year for year in COURSE_YEARS if year in problem.years]:
        raise UserError(f"{where}: years are {list(problem.years)}, not some of {list(COURSE_YEARS)} in order")
    if problem.chapter not in CHAPTERS:
        raise UserError(f"{where}: no chapter is called {problem.chapter!r}; there are {', '.join(CHAPTERS)}")
    return problem


def _place(where: str, text: str) -> Place:
    """`FILE: NAME` or `FILE`."""
    if not (found := _CODE.fullmatch(text)):
        raise UserError(f"{where}: code has {text!r}, which is neither FILE nor FILE: NAME")
    return Place(found["file"], found["name"])


def content(book: Book) -> dict[str, Any]:
    """The table of problems and editions, and every problem under its chapter, in the order of the chapters."""
    problems = course_map()
    by_chapter = [(name, _entries([each for each in problems if each.chapter == name])) for name in CHAPTERS]
    return {
        "editions": f"{', '.join(map(str, COURSE_YEARS[:-1]))} and {COURSE_YEARS[-1]}",
        "overview": markdown(
            [
                {"<problem": _name(each)}
                | {f"<{year}": ASKED if year in each.years else "" for year in COURSE_YEARS}
                | {"<chapter": f"[{each.chapter}](#{each.chapter})"}
                for each in problems
            ],
        ),
        "chapters": [(name, entries) for name, entries in by_chapter if entries],
    }


def _entries(problems: list[Problem]) -> list[dict[str, str]]:
    """The problems of one chapter; a command that several share is printed with the first of them."""
    first: dict[str, Problem] = {}
    for problem in problems:
        for command in problem.commands:
            first.setdefault(command, problem)
    return [_entry(each, first) for each in problems]


def _entry(problem: Problem, first: dict[str, Problem]) -> dict[str, str]:
    """A problem as the template's words; `first` has whose entry prints a command."""
    code = [f"{markdown_code(file)}{f' {markdown_code(name)}' if name else ''}" for file, name in problem.code]
    own = [markdown_code(each) for each in problem.commands if first[each] is problem]
    others = dict.fromkeys(_name(first[each]) for each in problem.commands if first[each] is not problem)
    years = ", ".join(map(str, problem.years))
    return {
        "head": f"**{_name(problem)}** ({years}):",
        "asks": problem.asks,
        "note": f" {problem.note}" if problem.note else "",
        "code": ", ".join(code),
        "commands": "; ".join(own + [f"as for {name}" for name in others]),
        "tests": ", ".join(map(markdown_code, problem.tests)),
    }


def _name(problem: Problem) -> str:
    """The name that the handouts give a deliverable, as code; what they only ask for, in words."""
    return markdown_text(problem.id) if " " in problem.id else markdown_code(problem.id)
