"""The text of all chapters as the committed records make it: what readers are to type, and what was never measured."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="jinja2 is in the extra `writeup`")
pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")

from benchmarks.records import RESULTS
from tests.support.command_lines import problem_of
from writeup.book import Book, Citation, choose_machine
from writeup.compose import compose

COMMAND = re.compile(r"(`+)((?:python|torchrun|sbatch|make) [^`]+)\1")
MACHINE = "amd-epyc"  # whose records are committed
# What has not been measured there, and why; an empty citation that is not listed here has a misspelt value.
NOT_MEASURED = {
    ("introduction", "leaderboard"): "a GPU's",
    ("flash-attention", "attention"): "its grid keeps nothing of our kernels on a CPU",
}


@dataclass
class Asked(Book):
    """A book that keeps what it has no record of."""

    empty: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def cite(self, name: str, config: Any = None, /, *, command: str = "", **more: Any) -> Citation:
        found = super().cite(name, config, command=command, **more)
        if not found:
            self.empty.append((self.chapter, name, {**(config or {}), **more}))
        return found


def test_every_printed_command_could_run_and_every_citation_that_is_empty_is_known():
    book = Asked(RESULTS, choose_machine(RESULTS, MACHINE))
    text = re.sub(r"\s+", " ", compose(book).text)
    commands = list(dict.fromkeys(found[1] for found in COMMAND.findall(text)))
    assert len(commands) > 40
    problems = {command: wrong for command in commands if (wrong := problem_of(command.replace("FOLDER", ".")))}
    assert problems == {}
    unknown = [each for each in book.empty if each[:2] not in NOT_MEASURED]
    assert unknown == [], "no record has these settings: one of them is misspelt, or was not measured"
    found = {(chapter, name) for chapter, name, _ in book.empty}
    assert found == NOT_MEASURED.keys(), "what is listed here has been measured"
