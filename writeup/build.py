"""Build of the write-up: all chapters, then both formats, with progress."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cs336_systems.host import console
from cs336_systems.host.text import printable
from writeup.book import Book, machines
from writeup.compose import compose
from writeup.edition import parts
from writeup.play.page import numbers_ahead
from writeup.render import write_figures, write_html, write_pdf
from writeup.tables import plain


def build(book: Book, out: Path, chosen: Sequence[str] = (), solutions: bool = True) -> None:
    """Write index.html, writeup.pdf, writeup.md and figures/ into a folder. Raises UserError where that fails."""
    count = sum(map(len, parts(chosen).values()))
    writing = f"write into {out}", "name another folder with --out"
    with console.os_errors(*writing):
        out.mkdir(parents=True, exist_ok=True)
    with console.progress("writing", count + 2) as advance, numbers_ahead() as numbers:
        manuscript = compose(book, advance, chosen, solutions)
        with console.os_errors(*writing), ThreadPoolExecutor(1) as other:
            (out / "writeup.md").write_text(plain(manuscript.text), encoding="utf-8")
            write_figures(manuscript, out)
            paper = other.submit(write_pdf, manuscript, (out / "writeup.pdf").resolve())
            write_html(manuscript, out / "index.html", numbers)
            advance("HTML")
            paper.result()
            advance("PDF")
    screen = console.console()
    others = ", ".join(name for name in machines(book.results) if name != book.machine)
    also = f" (also there: {others}; choose with --machine)" if others else ""
    said = f"records of {book.machine or 'no machine'}{also}: {out / 'index.html'}, {out / 'writeup.pdf'}"
    screen.print(printable(said), soft_wrap=True)
