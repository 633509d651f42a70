"""Assembly of the chapters: each is a Jinja2 template in Markdown, filled by the Python file of the same name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

from cs336_systems.errors import UserError
from writeup.book import Book
from writeup.edition import SAID, parts, unlinked, without_solutions
from writeup.errors import CitationError
from writeup.figures import Figure, plain_settings
from writeup.tables import Table

FOLDER = Path(__file__).parent / "chapters"
# What a chapter's code raises when a record is not as its benchmark writes it today.
MISFITS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


@dataclass
class Manuscript:
    """The whole text in pandoc's Markdown, and its pictures by the name of their file."""

    text: str = ""
    figures: dict[str, str] = field(default_factory=dict)


def compose(
    book: Book,
    progress: Callable[[str], None] = lambda chapter: None,
    chosen: Sequence[str] = (),
    solutions: bool = True,
) -> Manuscript:
    """Compose all chapters, or those chosen, in the order of the contents, with or without solutions.
    Raises CitationError for a citation of what does not exist, and UserError for a chapter that does not."""
    manuscript = Manuscript(text="" if solutions else f"{SAID}\n\n")
    for part, chapters in parts(chosen).items():
        if part:
            manuscript.text += f"# {part} {{.part .unnumbered}}\n\n"
        for name in chapters:
            progress(name)
            text, figures = chapter(book, name)
            if clash := figures.keys() & manuscript.figures.keys():
                raise CitationError(f"chapter {name}: there are two figures called {', '.join(sorted(clash))}")
            manuscript.text += (text if solutions else without_solutions(text)).rstrip() + "\n\n"
            manuscript.figures |= figures
    if chosen:
        manuscript.text = unlinked(manuscript.text)
    return manuscript


def chapter(book: Book, name: str) -> tuple[str, dict[str, str]]:
    """One chapter's Markdown and its pictures. Raises CitationError."""
    book.chapter = name
    file = name.replace("-", "_")
    try:
        with plain_settings():
            content: dict[str, Any] = import_module(f"writeup.chapters.{file}").content(book)
            text = _environment(book).get_template(f"{file}.md").render(content)
    except UndefinedError as error:
        raise CitationError(f"chapter {name}: {error.message}") from None
    except CitationError as error:
        raise CitationError(f"chapter {name}: {error}") from None
    except UserError:
        raise
    except MISFITS as error:
        raise CitationError(f"chapter {name}: {_misfit(error)}") from error
    if not re.match(rf"## .*\{{#{re.escape(name)}[ }}]", text):
        raise CitationError(f"chapter {name} must begin with its heading, '## Title {{#{name}}}'")
    return text, {
        figure.name: figure.svg for figure in _figures(content.values()) if f"figures/{figure.name}.svg" in text
    }


def _misfit(error: Exception) -> str:
    """Error message with the line of the template, since the line tells which record has the figure."""
    place = extract_tb(error.__traceback__)[-1]
    what = f"there is no {error}" if isinstance(error, LookupError) else f"{error}"
    return f"a record does not fit, {type(error).__name__}: {what} ({Path(place.filename).name}:{place.lineno})"


def _figures(values: Any) -> list[Figure]:
    found: list[Figure] = []
    for value in values:
        if isinstance(value, Figure):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _figures(value)
        elif isinstance(value, dict):
            found += _figures(value.values())
    return found


def claim(book: Book, condition: object, caller: Callable[[], str]) -> str:
    """Return a hand-written sentence if its condition holds for the records.

    It must hold for the committed records: raises CitationError with the sentence. For another machine's records, the
    text says that it does not hold there.
    """
    said = caller().strip()
    if condition:
        return f"{said}\n"
    if book.is_edition:
        raise CitationError(f"the records do not bear out this sentence, write it anew: {said}")
    return f"*Not so in these records:* {said}\n"


def finding(book: Book, figure: Figure, condition: object, title: str) -> str:
    """A figure under a title that states its finding, which is tested against the records as in `claim`."""
    words = claim(book, condition, lambda: title).strip()
    return str(replace(figure, caption=f"**{words}** {figure.caption}"))


def captioned(table: Table, title: str, name: str) -> str:
    """A table with a caption, which `[](#table-NAME)` refers to by its number."""
    table.caption = f"[]{{#table-{name}}}{title}"
    return str(table)


def _environment(book: Book) -> Environment:
    # The text is Markdown, in which what is foreign was escaped where it was put into a cell or a sentence. `{#` begins
    # the name of a heading there, and so no comment here.
    environment = Environment(
        loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, comment_start_string="{##", comment_end_string="##}",
    )  # fmt: skip
    environment.globals |= {"claim": partial(claim, book), "finding": partial(finding, book), "captioned": captioned}
    environment.globals["code"] = lambda path: f"`{path}`"
    return environment
