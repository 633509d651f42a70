"""Cells of tables: a measured figure with its spread and marks, a prediction, a ratio."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median, quantiles

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.host.text import markdown_text
from writeup.book import Book, metric
from writeup.plausibility import KINDS, Suspect
from writeup.publications import Key, Published, PublishedTable

NONE = "-"
FEW = 3  # samples below which a deviation says nothing
DOUBTFUL, NOISY = "⚠", "\\*"
STATUS = {"out-of-memory": "does not fit", "unsupported": "not supported here"}


def quartiles(samples: list[float]) -> tuple[float, float]:
    """The first and the third quartile, by linear interpolation between samples."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high


def median_ms(record: Record) -> float:
    """The median of the samples in milliseconds."""
    return float(metric(record, "median_ms"))


def marks(book: Book, record: Record) -> str:
    """Signs behind a figure, which the table explains: its commit (which becomes a letter) and its record, implausible,
    noisy."""
    signs = [DOUBTFUL] * bool(book.suspicions(record)) + [NOISY] * bool(record.flags)
    return "".join([f"⟦{str(record.environment.get('commit'))[:7]} {id(record)}⟧", *signs])


def absent(record: Record | None) -> str:
    """Cell of what was not measured: a dash, or why there is no figure."""
    return STATUS[record.status] if record else NONE


def timing(book: Book, record: Record | None) -> str:
    """`22.1 ms (21.2 to 24.0)`: the newest run's median, the lowest and the highest of all runs of the same settings if
    there were several, and marks; or why there is none."""
    if record is None or record.status != "ok":
        return absent(record)
    runs, (middle, unit) = book.runs(record), _digits(median_ms(record))
    spread = f" ({_digits(min(runs), unit)[0]} to {_digits(max(runs), unit)[0]})" if len(runs) > 1 else ""
    return f"{middle} {unit}{spread}{marks(book, record)}"


def mean_and_deviation(book: Book, record: Record | None) -> str:
    """`22.1 ms ± 0.4 ms`, as the course asks for it, with marks; the mean alone of fewer than `FEW` samples."""
    if record is None or record.status != "ok":
        return absent(record)
    deviation = f" ± {format_seconds(metric(record, 'std_ms') / 1e3)}" if len(record.samples_ms) >= FEW else ""
    return f"{format_seconds(metric(record, 'mean_ms') / 1e3)}{deviation}{marks(book, record)}"


def _digits(value_ms: float, unit: str = "") -> tuple[str, str]:
    """A time with three digits, more than are shown elsewhere so that a spread can be seen, and its unit."""
    unit = unit or ("ms" if value_ms < 999.5 else "s")
    value = value_ms / 1e3 if unit == "s" else value_ms
    return f"{value:.{max(0, 2 - floor(log10(max(value, 1e-6))))}f}" if value < 100 else f"{value:.0f}", unit


def predicted_ms(record: Record) -> float | None:
    """The predicted time in milliseconds, of the day of the measurement, if there is one."""
    found = record.predicted.get("median_ms", record.predicted.get("mean_ms"))
    return None if found is None else float(found)


def prediction(record: Record | None) -> str:
    """`23.4 ms (0.76)`: the predicted time, and in brackets its share of the measured one."""
    expected = predicted_ms(record) if record else None
    if record is None or expected is None:
        return NONE
    share = f" ({expected / median_ms(record):.2f})" if record.status == "ok" and "median_ms" in record.metrics else ""
    return f"{format_seconds(expected / 1e3)}{share}"


def memory(book: Book, record: Record | None, name: str = "peak_memory_bytes") -> str:
    """A metric in bytes, with marks."""
    if record is None or record.status != "ok":
        return absent(record)
    found = metric(record, name)
    return NONE if found is None else f"{format_bytes(found)}{marks(book, record)}"


def predicted_memory(record: Record | None, name: str = "peak_memory_bytes") -> str:
    """A predicted metric in bytes, and predicted over measured."""
    expected = record.predicted.get(name) if record else None
    if record is None or expected is None:
        return NONE
    found = record.metrics.get(name)
    return format_bytes(expected) + (f" ({expected / found:.2f})" if found else "")


def quoted(book: Book, found: Published | None, unit: str) -> str:
    """A published figure in a unit, with a mark if it is implausible."""
    if found is None:
        return NONE
    space = "" if unit == "%" else " "
    return f"{found.shown(unit)}{space}{unit}{DOUBTFUL if book.doubts(found) else ''}"


def over(ratios: Sequence[float]) -> str:
    """`0.96 (0.93 to 1.02)`: the median of ratios, turn by turn, and their quartiles; see `words.pair_ratios`."""
    low, high = quartiles([*ratios])
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})" if len(ratios) > 1 else f"{ratios[0]:.2f}"


def ratio(record: Record | None, prefix: str = "ratio") -> str:
    """`0.96 (0.93 to 1.02)`: the median of the pairwise ratios that the record keeps, and their quartiles."""
    if record is None or f"{prefix}_median" not in record.metrics:
        return NONE
    middle, low, high = (record.metrics[f"{prefix}_{name}"] for name in ("median", "low", "high"))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def joined(parts: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    *most, end = list(parts)
    return f"{', '.join(most)} {last} {end}" if most else end


def times(factor: float) -> str:
    """A factor as one would say it: `1.3 times`, `12 times`; `1.02 times`, where one digit more matters."""
    return f"{factor:.{3 if factor < 1.1 else 2}g} times" if factor < 10 else f"{factor:,.0f} times"


def in_turn(a: Record, b: Record) -> bool:
    """True if two records come from one run of their benchmark, so that their samples are pairs."""
    same = a.benchmark == b.benchmark and a.environment["date"] == b.environment["date"]
    return same and len(a.samples_ms) == len(b.samples_ms) > 1


def pair_ratios(a: Record, b: Record) -> list[float]:
    """The time of `a` over that of `b`, turn by turn; of their medians alone if they did not take turns."""
    if not in_turn(a, b):
        return [median_ms(a) / median_ms(b)]
    return [x / y for x, y in zip(a.samples_ms, b.samples_ms, strict=True)]


def span(values: Iterable[float], form: str = "{:.2g}") -> str:
    """`2.7 to 3.1`, from the least to the greatest; one number where both look the same."""
    ordered = sorted(values)
    low, high = form.format(ordered[0]), form.format(ordered[-1])
    return low if low == high else f"{low} to {high}"


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
