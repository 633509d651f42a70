"""The accounting questions of the course's three editions as worked calculations: words, symbols, numbers.

`question("buckets")` is one `Answer`, `question("rings", N=16)` the same with another number, `markdown()` all of them.
The words are in `templates/`, one file per question.
"""

from cs336_systems.cost.course.answers import Answer, Question
from cs336_systems.cost.course.questions import (
    ANSWERS,
    QUESTIONS,
    contents,
    defaults,
    markdown,
    parse_numbers,
    question,
)

__all__ = [
    "ANSWERS",
    "QUESTIONS",
    "Answer",
    "Question",
    "contents",
    "defaults",
    "markdown",
    "parse_numbers",
    "question",
]
