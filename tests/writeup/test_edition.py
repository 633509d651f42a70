"""Editions of the write-up: chosen chapters, and no answers that a student should find out."""

import re

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is in the extra `writeup`")
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from writeup import edition
from writeup.__main__ import main
from writeup.book import Book, choose_machine
from writeup.chapters import introduction
from writeup.compose import chapter, compose
from writeup.edition import CHAPTERS

BOOK = Book(machine=choose_machine(Book().results, None))


def test_a_chapter_that_does_not_exist_is_named_before_anything_is_built(capsys, tmp_path):
    assert run_command(main, ["--chapters", "nors", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: there is no chapter 'nors': choose from introduction, equality")
    assert not (tmp_path / "out").exists()


def test_chosen_chapters_keep_their_order_and_part():
    assert sum(map(len, edition.parts(()).values())) == len(CHAPTERS)
    assert edition.parts(("memory", "step")) == {"One device": ("step", "memory")}
    with pytest.raises(UserError):
        edition.parts(("Step",))


def test_links_out_of_the_edition_are_words():
    text = "## A {#a}\n\n[here](#a), [there](#b), [](#table-x), [paper](https://arxiv.org/abs/1910.02054)"
    shown = "## A {#a}\n\n[here](#a), there, another chapter, [paper](https://arxiv.org/abs/1910.02054)"
    assert edition.unlinked(text) == shown


@pytest.mark.parametrize("name", ["norms", "gallery"])
def test_questions_figures_and_tables_stay_and_solutions_do_not(name, undrawn):
    whole, _ = chapter(BOOK, name)
    shorn = edition.without_solutions(whole)
    assert shorn.startswith(whole[: whole.index("\n")])
    for kept in (r"^\|.*\|$", r"\{#figure-", r"^\*[A-Z][^*]*\?\*$"):
        assert len(re.findall(kept, shorn, re.M)) == len(re.findall(kept, whole, re.M))
    solutions = "^::: answer", "^~~~~ diff", r"`(cs336_systems|kernels)/[\w/]+\.py`", r"\bCode:", r"!\[\*\*", r"\$\$"
    assert any(re.search(each, whole, re.M) for each in solutions)
    assert not [each for each in solutions if re.search(each, shorn, re.M)]
    assert len(re.findall("^::: ", shorn, re.M)) == len(re.findall("^:::$", shorn, re.M)), "what is opened is closed"


def test_an_edition_says_that_it_is_one():
    text = compose(BOOK, chosen=("introduction",), solutions=False).text
    assert text.startswith("*Edition without solutions: ")
    assert "MIT licence; records measured from 20" in " ".join(text.split())
    assert "](#norms)" not in text
    assert introduction.dates([]) is None
