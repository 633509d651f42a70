"""A table of the write-up: Markdown, then its machine, its age, and the meaning of its marks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import summarise
from benchmarks.records import Record
from cs336_systems.host.text import markdown_code, markdown_text, printable
from writeup.book import Book, Citation, place_of
from writeup.cells import DOUBTFUL, NOISY
from writeup.plausibility_figures import label

MARKED = re.compile(r"([^⟦⟧\[\]]*)⟦(\S*) (\d+)⟧")  # a figure, the commit and the id of its record: see `cells.marks`
MEASURED = re.compile(r"\[([^\[\]]*)\]\{\.measured [^{}]*\}")  # what becomes of it
ON_GPU = "python -m benchmarks.all"  # what to run for figures that only a GPU gives


@dataclass
class Table:
    """Rows of Markdown cells by the head of their column; `cited` says what they were made of.

    A head that begins with `<` is that of text, to the left; others are of figures, to the right. Of two equal heads
    the second ends in a space. `notes` are paragraphs below a table that has rows. If nothing that was cited exists,
    the table says what to run instead; without citations it is always shown. Foreign text in cells must have passed
    through `cs336_systems.host.text.markdown_text` or `markdown_code`.
    """

    book: Book
    rows: Sequence[Mapping[str, str]]
    cited: Citation | Sequence[Citation] = ()
    notes: Sequence[str] = ()
    caption: str = ""

    @property
    def citations(self) -> list[Citation]:
        """The citations, as a list."""
        return [self.cited] if isinstance(self.cited, Citation) else list(self.cited)

    @property
    def records(self) -> list[Record]:
        """All records cited."""
        return [record for citation in self.citations for record in citation]

    @property
    def cells(self) -> list[str]:
        """All cells, row by row."""
        return [cell for row in self.rows for cell in row.values()]

    def __str__(self) -> str:
        parts = [missing(self.citations)]
        if self.records or not self.citations:
            letters = self._letters()
            with_record = partial(_with_record, letters, {str(id(record)): record for record in self.records})
            rows = [{head: MARKED.sub(with_record, cell) for head, cell in row.items()} for row in self.rows]
            note = provenance(self.book, self.records, letters, any(NOISY in cell for cell in self.cells))
            caption = f"\n\n: {self.caption}" if self.caption and rows else ""
            notes = self.notes if rows else ()
            parts = [markdown(rows) + caption, note, *self._doubts(), *notes, *parts]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _letters(self) -> dict[str, str]:
        """Superscripts for commits, where the cells come from several."""
        found = dict.fromkeys(each for cell in self.cells for _, each, _ in MARKED.findall(cell))
        return {commit: f"^{chr(ord('a') + place)}^" for place, commit in enumerate(found)} if len(found) > 1 else {}

    def _doubts(self) -> list[str]:
        """Reference to the reasons why figures of others are marked."""
        marked = any(DOUBTFUL in cell for cell in self.cells)
        ours = any(self.book.suspicions(record) for record in self.records)
        if not marked or ours:
            return []
        where = "[Published figures](#plausibility) says which, and why"
        return [f"::: source\n{DOUBTFUL} impossible, or inconsistent with its neighbours: {where}.\n:::"]


def _with_record(letters: Mapping[str, str], records: Mapping[str, Record], found: re.Match[str]) -> str:
    """A figure with its record, for the page, and the letter of its commit."""
    figure, commit, number = found.groups()
    known = figure and number in records
    shown = f'[{figure}]{{.measured tabindex="-1" record="{about(records[number])}"}}' if known else figure
    return shown + letters.get(commit, "")


def about(record: Record) -> str:
    """Record of a figure in words, as the page shows it when the figure is pointed at."""
    found, where = summarise(record.samples_ms) if record.samples_ms else {}, record.environment
    words = f"{record.benchmark}: {label(record.config)}; commit {str(where.get('commit'))[:7]}, {where.get('date')}"
    if found:
        words += f"; {len(record.samples_ms)} samples, {found['min_ms']:.4g} to {found['max_ms']:.4g} ms"
    return re.sub(r"[^\w .,:;=/()+-]+", " ", words)


def plain(text: str) -> str:
    """Text without the records of figures."""
    return MEASURED.sub(r"\1", text)


def not_measured(command: str) -> str:
    """Box in place of a table whose records are missing."""
    where = "Needs a GPU; run there" if command == ON_GPU else "Not measured on this machine. Run"
    return f"::: missing\n{where}: {markdown_code(command)}\n:::"


def missing(citations: Iterable[Citation]) -> str:
    """Commands to run for the missing records, each once; nothing if there is a record of each."""
    return "\n\n".join(dict.fromkeys(not_measured(citation.command) for citation in citations if not citation))


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A pipe table of cells by the head of their column, as `Table` has them; nothing without rows."""
    heads = list(rows[0]) if rows else []
    assert all([*row] == heads for row in rows), f"{heads} has rows of other columns"
    rule = [":--" if head.startswith("<") else "--:" for head in heads]
    lines = [[head.removeprefix("<").rstrip() for head in heads], rule, *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def provenance(book: Book, records: Sequence[Record], letters: Mapping[str, str], noisy: bool) -> str:
    """Text under a table: hardware, versions, commits, dates, runs, meaning of the marks; nothing without records."""
    if not records:
        return ""
    lines = list(dict.fromkeys(_where(book, record) for record in records))
    commits: dict[str, str] = {}
    for record in records:
        commits.setdefault(str(record.environment["commit"])[:7], str(record.environment["date"])[:10])
    lines[-1] += "; " + ", ".join(
        f"{letters.get(commit, '')}{' ' * (commit in letters)}commit {markdown_text(commit)} ({markdown_text(date)})"
        for commit, date in commits.items()
    )
    several = sum(len(book.runs(record)) > 1 for record in records if record.status == "ok" and record.samples_ms)
    if several:
        lines.append("In brackets after a time: the lowest and highest median of all runs; no brackets: one run")
    reasons = [f"{suspect.text}: {suspect.why}" for record in records for suspect in book.suspicions(record)]
    lines += [f"{DOUBTFUL} {markdown_text(reason)}" for reason in dict.fromkeys(reasons)]
    if noisy:
        measured = (record for record in records if record.status == "ok")
        kinds = dict.fromkeys(flag.split(":")[0].split(" by ")[0] for record in measured for flag in record.flags)
        lines.append(f"{NOISY} flagged when it was measured: {markdown_text(', '.join(kinds))}")
    return "::: source\n" + ".\n".join(lines) + ".\n:::"


def _where(book: Book, record: Record) -> str:
    where, count = record.environment, record.environment.get("threads")
    kind = "GPU" if where.get("device_type") == "cuda" else "CPU"
    device = markdown_text(printable(f"{where['device']}, {where['cores']} cores"))
    named = len(book.places) == 1  # with its software, in the introduction
    place = f"the {kind} [{device}](#introduction)" if named else f"a {kind}: {markdown_text(place_of(record))}"
    threads = f", {count} thread{'s' * (count != 1)} per process" if count else ""
    return f"Measured on {place}{threads}{'; the allocator keeps freed pages' * bool(where.get('pages_kept'))}"
