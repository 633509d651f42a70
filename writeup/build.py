"""All chapters, then both formats, with progress."""

from pathlib import Path

from cs336_systems import console
from cs336_systems.errors import UserError
from cs336_systems.text import printable
from writeup.book import Book
from writeup.compose import compose
from writeup.contents import CHAPTERS
from writeup.render import write_figures, write_html, write_pdf


def build(book: Book, out: Path) -> None:
    """Write index.html, writeup.pdf, writeup.md and figures/ into a folder. Raises UserError where that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with console.progress("writing", len(CHAPTERS) + 2) as advance:
            manuscript = compose(book, progress=advance)
            (out / "writeup.md").write_text(manuscript.text)
            write_figures(manuscript, out)
            write_html(manuscript, out / "index.html")
            advance("HTML")
            write_pdf(manuscript, (out / "writeup.pdf").resolve())
            advance("PDF")
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror}; name another folder with --out") from None
    screen = console.console()
    screen.print(printable(f"records of {book.machine or 'no machine'}: {out / 'index.html'}, {out / 'writeup.pdf'}"))
