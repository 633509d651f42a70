"""The accounting questions of the course's three editions as worked calculations: words, symbols, numbers.

`question("buckets")` is one `Answer`, `question("rings", N=16)` the same with another number, `markdown()` all of them.
"""

from cs336_systems.cost.course.answers import Answer, Step, Symbol
from cs336_systems.cost.course.questions import ANSWERS, contents, defaults, markdown, parse_numbers, question

__all__ = ["ANSWERS", "Answer", "Step", "Symbol", "contents", "defaults", "markdown", "parse_numbers", "question"]
