"""A table of the write-up: Markdown, then what it was measured on, how old it is, and what its marks mean."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.records import Record
from cs336_systems.host.text import markdown_code, markdown_text, printable
from writeup.book import Book, Citation
from writeup.cells import DOUBTFUL, FEW, NOISY, STALE, marks

SHOWN = 3  # files named of those that changed


@dataclass
class Table:
    """Rows of Markdown cells under columns; `cited` says what they were made of.

    A column whose name begins with `<` is text, to the left; others are figures, to the right. `notes` are paragraphs
    below. If nothing was cited that exists, the table says what to run instead. Foreign text in cells must have passed
    through `cs336_systems.host.text.markdown_text` or `markdown_code`.
    """

    book: Book
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    cited: Citation | Sequence[Citation] = ()
    notes: list[str] = field(default_factory=list)
    caption: str = ""
    always: bool = False  # shown although nothing was measured, for what it predicts or quotes

    def __bool__(self) -> bool:
        return bool(self.records)

    @property
    def citations(self) -> list[Citation]:
        """The citations, as a list."""
        return [self.cited] if isinstance(self.cited, Citation) else list(self.cited)

    @property
    def records(self) -> list[Record]:
        """All records cited."""
        return [record for citation in self.citations for record in citation]

    def __str__(self) -> str:
        parts = [missing(self.citations)]
        if self.records or self.always or not self.citations:
            everywhere = self._everywhere()
            rows = [[_without(everywhere, cell) for cell in row] for row in self.rows]
            shown = {sign for sign in (STALE, NOISY) for row in rows for cell in row if sign in cell}
            note = provenance(self.book, self.records, everywhere, shown) if self.records else ""
            caption = f"\n\n: {self.caption}" if self.caption else ""
            parts = [markdown(self.columns, rows) + caption, note, *self._doubts(), *self.notes, *parts]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _everywhere(self) -> list[str]:
        """Marks that all figures bear, which are then said once, below."""
        signs = [marks(self.book, record) for record in self.records if record.status == "ok"]
        return [sign for sign in (STALE, NOISY) if len(signs) > 1 and all(sign in each for each in signs)]

    def _doubts(self) -> list[str]:
        """Where it is said why figures of others are marked."""
        marked = any(DOUBTFUL in cell for row in self.rows for cell in row)
        ours = any(self.book.suspicions(record) for record in self.records)
        if not marked or ours:
            return []
        where = "the chapter on [plausibility](#plausibility) says which, and why"
        return [f"::: source\n{DOUBTFUL} cannot be, or does not fit its neighbours: {where}.\n:::"]


def _without(signs: Iterable[str], cell: str) -> str:
    for sign in signs:
        cell = cell.replace(sign, "")
    return cell


def not_measured(command: str) -> str:
    """Text of a cell whose record is missing."""
    return f"::: missing\nNot measured on this machine. Run: {markdown_code(command)}\n:::"


def missing(citations: Iterable[Citation]) -> str:
    """Commands to run for the missing records, each once; nothing if there is a record of each."""
    return "\n\n".join(dict.fromkeys(not_measured(citation.command) for citation in citations if not citation))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table."""
    heads = [name.removeprefix("<") for name in columns]
    rule = [":--" if name.startswith("<") else "--:" for name in columns]
    lines = [heads, rule, *rows]
    assert all(len(line) == len(heads) for line in lines), f"{heads} has rows of other lengths"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(
    book: Book, records: Sequence[Record], everywhere: Collection[str] = (), shown: Collection[str] = ()
) -> str:
    """Under a table: hardware, versions, commits, dates, samples, and what the marks mean that are `shown` in it, or
    that all figures bear, `everywhere`."""
    lines = list(dict.fromkeys(_where(record) for record in records))
    counts = sorted({len(record.samples_ms) for record in records if record.samples_ms})
    if counts:
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        spread = "the range" if counts[-1] < FEW else "the quartiles"
        spread += f", or the range of fewer than {FEW}" if counts[0] < FEW <= counts[-1] else ""
        lines.append(f"{span} sample{'s' * (counts[-1] > 1)} a figure; in brackets {spread}")
    which = {**dict.fromkeys(shown, ""), **dict.fromkeys(everywhere, " all")}
    lines += _age(book, records, f"{STALE}{which[STALE]}" if STALE in which else "some are")
    reasons = [f"{suspect.where}: {suspect.why}" for record in records for suspect in book.suspicions(record)]
    lines += [f"{DOUBTFUL} {markdown_text(reason)}" for reason in dict.fromkeys(reasons)]
    if NOISY in which:
        kinds = dict.fromkeys(flag.split(":")[0] for record in records for flag in record.flags)
        lines.append(f"{NOISY}{which[NOISY]} flagged when it was measured: {markdown_text(', '.join(kinds))}")
    return "::: source\n" + ".\n".join(lines) + ".\n:::"


def _where(record: Record) -> str:
    where = record.environment
    device = f"{where['device']}, {where['cores']} cores" + (
        f" ({where['threads']} thread{'s' * (where['threads'] != 1)} a process)" if where.get("threads") else ""
    )
    software = ", ".join(
        f"{name} {where[key]}"
        for name, key in (("torch", "torch"), ("Triton", "triton"), ("Python", "python"))
        if where.get(key)
    )
    commit = f"commit {str(where['commit'])[:7]}" + (" with changes that are in no commit" if where["dirty"] else "")
    kind = "on a CPU" if where.get("device_type") == "cpu" else "on a GPU"
    return markdown_text(printable(f"Measured {kind}: {device}; {software}; {commit}, {str(where['date'])[:10]}"))


def _age(book: Book, records: Sequence[Record], which: str) -> list[str]:
    """Which files have changed since the records were made, or since `which` of them."""
    ages = [book.stale(record) for record in records]
    lines = []
    if any(age is None for age in ages):
        lines.append("How old this is cannot be known: the commit that was measured is not in this copy's history")
    changed = sorted({file for age in ages for file in age or ()})
    if changed:
        named = ", ".join(f"`{file}`" for file in changed[:SHOWN])
        more = f" and [{len(changed) - SHOWN} more](#sources)" if len(changed) > SHOWN else ""
        lines.append(f"{which} older than the last change of what its benchmark exercises: {named}{more}")
    return lines
