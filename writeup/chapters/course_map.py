"""Questions of the course and the place of each answer: `course.toml` as a table of editions and a list by chapter."""

from typing import Any

from cs336_systems.host.text import markdown_code, markdown_text
from cs336_systems.presets import COURSE_YEARS
from writeup.book import Book
from writeup.contents import CHAPTERS
from writeup.course import Problem, course_map
from writeup.tables import markdown

ASKED = "●"


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
    return markdown_code(problem.id) if problem.is_named else markdown_text(problem.id)
