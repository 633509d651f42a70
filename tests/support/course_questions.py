"""Sources of the accounting's questions, which the third line of each template names."""

import re

from cs336_systems.cost.course.answers import Question


def years_of(asked: Question) -> tuple[int, ...]:
    """Editions of the course that ask it."""
    return tuple(int(year) for year in re.findall(r"\b20\d\d\b", _origin(asked).partition(":")[0]))


def problems_of(asked: Question) -> list[str]:
    """Names of its problems in the handouts."""
    return re.split(r", (?!\()", _origin(asked).partition(": ")[2])


def _origin(asked: Question) -> str:
    return asked.template.splitlines()[2]
