"""Times of others in float32 and in bfloat16, and the factor between the two."""

from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text
from writeup.book import Book
from writeup.ceilings import original_seconds
from writeup.cells import NONE, quoted
from writeup.publications import ORIGINAL, Published
from writeup.tables import Table

SOURCE, STUDENT = ORIGINAL, "brandon-snider"
Times = tuple[Published | None, Published | None]  # in fp32, in bf16


def original_times(book: Book) -> dict[tuple[str, str], Times]:
    """The original's times in both precisions, by size and pass."""
    high, low = (book.published.table(SOURCE, name) for name in ("benchmarking, 1 warm-up step", "mixed precision"))
    cells = [(str(row.keys["size"]), str(row.keys["pass"])) for row in low.rows]
    return {cell: (high.value(size=cell[0], pass_=cell[1]), low.value(size=cell[0], pass_=cell[1])) for cell in cells}


def student_times(book: Book) -> dict[tuple[str, str], Times]:
    """A student's times in both precisions, by size and pass."""
    table = book.published.table(STUDENT, "mixed precision")
    cells = dict.fromkeys((str(row.keys["size"]), str(row.keys["pass"])) for row in table.rows)
    return {
        (size, what): (
            table.value(size=size, pass_=what, precision="fp32"),
            table.value(size=size, pass_=what, precision="bf16"),
        )
        for size, what in cells
    }


def factor(both: Times) -> float | None:
    """The time in fp32 over that in bf16."""
    return both[0].value / both[1].value if both[0] and both[1] else None


def original_shares(book: Book) -> dict[tuple[str, str], str]:
    """The original's fp32 over bf16 as cells, by size and pass."""
    return {where: f"{found:.2f}" for where, both in original_times(book).items() if (found := factor(both))}


def published(book: Book) -> Table:
    """Times of the original and of a student in both precisions, with the prediction for the original."""
    rows = []
    for who, times_of in (("2024", original_times(book)), (STUDENT, student_times(book))):
        for (size, what), both in times_of.items():
            found, wanted = factor(both), [NONE] * 3
            if who != STUDENT:
                seconds = [original_seconds(size, what, precision) for precision in ("fp32", "bf16")]
                wanted = [*map(format_seconds, seconds), f"{seconds[0] / seconds[1]:.2f}"]
            cells = [f"{quoted(book, cell, 'ms')} ({wish})" for cell, wish in zip(both, wanted, strict=False)]
            rows.append([who, size, what, *cells, f"{f'{found:.2f}' if found else NONE} ({wanted[2]})"])
    heads = ("<who", "<size", "<pass", "fp32 (predicted)", "bf16 (predicted)", "fp32 / bf16 (predicted)")
    hardware = markdown_text(book.published.sources[STUDENT].hardware)
    note = (
        "Predicted by the large cost model, for an H100 with fp32 in TF32. "
        f"{STUDENT}: {hardware}; batch and context are not published, so nothing is predicted."
    )
    return Table(book, heads, rows, notes=[note])
