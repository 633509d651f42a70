"""One published table as cells for comparison with ours, and the reasons why some of its figures are suspect."""

from dataclasses import dataclass

from cs336_systems.host.text import markdown_text
from writeup.book import Book
from writeup.cells import DOUBTFUL, quoted
from writeup.plausibility import KINDS, Suspect
from writeup.publications import Key, Published, PublishedTable

LISTED = 2  # reasons given below a table; the rest stand in the chapter on plausibility


@dataclass(frozen=True)
class Beside:
    """A published table, and the unit that its cells are shown in."""

    book: Book
    table: PublishedTable
    unit: str

    def value(self, column: str = "", /, **keys: Key) -> Published | None:
        """The figure with these keys, or None. Raises CitationError for a key that the table does not have."""
        return self.table.value(column, **keys)

    def cell(self, column: str = "", /, **keys: Key) -> str:
        """`202 ms`, with a mark if it is suspect, or a dash. Raises CitationError as `value` does."""
        return quoted(self.book, self.value(column, **keys), self.unit)

    @property
    def suspects(self) -> list[Suspect]:
        """Reasons why figures of the table are suspect, shared reasons first; none for an empty table."""
        cells = {id(figure) for row in self.table.rows for figure in row.values.values()}
        found = [each for each in self.book.published_suspects if any(id(one) in cells for one in each.quoted)]
        return sorted(found, key=lambda each: -len(each.quoted))

    @property
    def notes(self) -> list[str]:
        """The first reasons as a paragraph for below a table, or nothing."""
        if not self.suspects:
            return []
        first = self.suspects[:LISTED]
        lines = [markdown_text(f"{DOUBTFUL} {each.text} ({KINDS[each.kind]}): {each.why}") for each in first]
        more = len(self.suspects) - LISTED
        rest = f" {more} more are in the chapter on [plausibility](#plausibility)." if more > 0 else ""
        source = f"Write-up of {self.table.source.when}, {self.table.where or self.table.name}"
        return ["::: source\n" + f"{source}: " + ".\n".join(lines) + f".{rest}\n:::"]


def beside(book: Book, source: str, name: str, unit: str) -> Beside:
    """A published table of one source. Raises CitationError for one that does not exist."""
    return Beside(book, book.published.table(source, name), unit)
