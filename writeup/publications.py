"""Published figures for comparison with ours: tables by source, each number with the digits that were printed.

A file of `writeup/published/` is TOML with entries `[[source]]` (who, when, on which hardware) and `[[table]]`. A table
names its source, the course's `problem`, its `keys` and its `values` with a unit each, and in `fixed` the settings that
all its rows share; a row is its keys, in this project's own words, then its values. A value is a number in its column's
unit, or text with another, "698.99 MiB".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal, InvalidOperation
from functools import cache
from pathlib import Path

from cs336_systems.errors import UserError
from writeup.entries import Fields, made, read_entries
from writeup.errors import CitationError

PUBLISHED = Path(__file__).resolve().parent / "published"
ORIGINAL = "rod-2024"  # the hand-typed write-up that this one succeeds
Key = str | int | bool
# unit: (what it measures, how much of that one is)
UNITS = {
    "s": ("s", Decimal(1)),
    "ms": ("s", Decimal("1e-3")),
    "B": ("bytes", Decimal(1)),
    "MiB": ("bytes", Decimal(2**20)),
    "GiB": ("bytes", Decimal(2**30)),
    "MB": ("bytes", Decimal(10**6)),
    "GB": ("bytes", Decimal(10**9)),
    "%": ("1", Decimal("1e-2")),
    "x": ("1", Decimal(1)),
    "1": ("1", Decimal(1)),
}
TEXT = "text"  # the unit of words, such as the name of a type
LISTS = ("keys", "values", "units")


@dataclass(frozen=True)
class Source:
    """Origin of figures; `system` is the hardware's name in `cs336_systems.cost.machines`, if it has one.

    The year of an undated source is 0.
    """

    id: str
    title: str
    author: str
    hardware: str
    where: str
    year: int = 0
    system: str = ""
    note: str = ""

    @property
    def when(self) -> str:
        """The year, in words."""
        return str(self.year or "undated")


@dataclass(frozen=True)
class Published:
    """One figure: `value` in seconds, bytes or a plain number (0 for words), and `text` as printed, with its unit."""

    value: float
    text: str
    source: Source

    @property
    def ms(self) -> float:
        """Milliseconds, of a time in seconds."""
        return 1e3 * self.value

    @property
    def resolution(self) -> float:
        """Value of one unit of the last printed digit; 0 for words."""
        number, _, unit = self.text.partition(" ")
        if unit not in UNITS:
            return 0.0
        exponent = Decimal(number).as_tuple().exponent
        return float(Decimal(1).scaleb(int(exponent)) * UNITS[unit][1])

    def shown(self, unit: str) -> str:
        """The number in another unit of the same kind, with the digits that were printed and no more: "13.6" of
        "1.36e-2 s" in ms. Raises CitationError for a unit of another kind."""
        number, _, own = self.text.partition(" ")
        if unit not in UNITS or own not in UNITS or UNITS[unit][0] != UNITS[own][0]:
            raise CitationError(f"{self.text!r} of {self.source.id} has no figure in {unit!r}")
        printed = Decimal(number)
        digits = Context(prec=max(1, len(printed.as_tuple().digits)))
        return f"{digits.divide(digits.multiply(printed, UNITS[own][1]), UNITS[unit][1]):f}"


@dataclass(frozen=True)
class Row:
    """The keys of one row by name, and its figures by column; a column that the source left empty is not there."""

    keys: dict[str, Key]
    values: dict[str, Published]


@dataclass(frozen=True)
class PublishedTable:
    """One table of a source, of one problem of the course. No rows: the source has the table and left it empty."""

    source: Source
    name: str
    problem: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    units: tuple[str, ...]
    rows: tuple[Row, ...]
    fixed: dict[str, Key] = field(default_factory=dict)
    where: str = ""  # in the source
    hardware: str = ""
    system: str = ""
    note: str = ""

    def value(self, column: str = "", **keys: Key) -> Published | None:
        """The figure of the row with these keys, all of them (`pass_` for `pass`, which Python keeps for itself), in
        the first column unless another is named; what is `fixed` may be given too. None where the source has none.

        Raises CitationError for a key or column that the table does not have.
        """
        asked = {name.removesuffix("_"): key for name, key in keys.items()}
        if any(asked.pop(name, key) != key for name, key in self.fixed.items()):
            return None
        if set(asked) != set(self.keys):
            given = ", ".join(sorted(asked)) or "none"
            known = ", ".join(self.keys)
            raise CitationError(f"{self.source.id}, table {self.name!r}, needs the keys {known}, not {given}")
        if column and column not in self.values:
            raise CitationError(
                f"{self.source.id}, table {self.name!r}, has the columns {', '.join(self.values)}, not {column}"
            )
        found = next((row for row in self.rows if row.keys == asked), None)
        return found.values.get(column or self.values[0]) if found else None


@dataclass(frozen=True)
class Publications:
    """Every published table, by source and name, in the order of the files."""

    sources: dict[str, Source]
    tables: dict[tuple[str, str], PublishedTable]

    def table(self, source: str, name: str) -> PublishedTable:
        """Raises CitationError for a source or a table that does not exist, listing those that do."""
        if source not in self.sources:
            raise CitationError(f"no source is called {source!r}; there are {', '.join(self.sources)}")
        if (source, name) not in self.tables:
            known = ", ".join(repr(table) for owner, table in self.tables if owner == source)
            raise CitationError(f"{source} has no table {name!r}; it has {known}")
        return self.tables[source, name]

    def value(self, source: str, name: str, /, column: str = "", **keys: Key) -> Published | None:
        """One figure, as `PublishedTable.value` finds it."""
        return self.table(source, name).value(column, **keys)


@cache
def publications(folder: Path = PUBLISHED) -> Publications:
    """Read every file of a folder. Raises UserError, naming file and entry, for what is malformed."""
    found = Publications({}, {})
    for path in sorted(folder.glob("*.toml")):
        content = read_entries(path, "source", "table", parse_float=str)  # text keeps the digits: 1.10 is not 1.1
        for entry, fields in content["source"]:
            source = made(entry, Source, fields)
            if source.id in found.sources:
                raise UserError(f"{entry}: the source {source.id!r} is there already")
            found.sources[source.id] = source
        for entry, fields in content["table"]:
            table = _table(entry, fields, found.sources)
            if (table.source.id, table.name) in found.tables:
                raise UserError(f"{entry}: {table.source.id} has a table of this name already")
            found.tables[table.source.id, table.name] = table
    return found


def _table(entry: str, fields: Fields, sources: Mapping[str, Source]) -> PublishedTable:
    if (source := sources.get(fields.get("source", ""))) is None:
        raise UserError(f"{entry}: no source is called {fields.get('source')!r}; put its [[source]] in this file")
    own = {"hardware": source.hardware} | ({} if "hardware" in fields else {"system": source.system})
    given: Fields = own | fields | {name: tuple(fields.get(name, ())) for name in LISTS}
    table = made(entry, PublishedTable, given | {"source": source})
    if not table.values or len(table.values) != len(table.units):
        raise UserError(f"{entry}: {len(table.values)} values need as many units, not {len(table.units)}")
    for unit in table.units:
        if unit not in UNITS and unit != TEXT:
            raise UserError(f"{entry}: unit {unit!r} is not known; there are {', '.join((*UNITS, TEXT))}")
    return replace(table, rows=_rows(entry, fields, source))


def _rows(entry: str, fields: Fields, source: Source) -> tuple[Row, ...]:
    keys, values, rows = fields["keys"], fields["values"], fields["rows"]
    found: list[Row] = []
    for number, row in enumerate(rows, 1):
        at = f"{entry}, row {number}"
        if not isinstance(row, list) or len(row) != len(keys) + len(values):
            raise UserError(f"{at}: needs {len(keys)} keys and {len(values)} values in a list, not {row!r}")
        named = dict(zip(keys, row[: len(keys)], strict=True))
        if any(other.keys == named for other in found):
            raise UserError(f"{at}: its keys {row[: len(keys)]!r} are those of a row before it")
        cells = zip(values, fields["units"], row[len(keys) :], strict=True)
        found.append(Row(named, {column: _cell(at, cell, unit, source) for column, unit, cell in cells if cell != ""}))
    return tuple(found)


def _cell(at: str, cell: object, unit: str, source: Source) -> Published:
    if unit == TEXT:
        return Published(0.0, str(cell), source)
    number, _, own = str(cell).partition(" ")
    own = own or unit
    try:
        printed = Decimal(number)
    except InvalidOperation:
        raise UserError(f"{at}: {cell!r} is not a number, or a number and a unit") from None
    if isinstance(cell, bool) or not printed.is_finite() or printed < 0:
        raise UserError(f"{at}: {cell!r} is no figure that anything measures")
    if own not in UNITS or UNITS[own][0] != UNITS[unit][0]:
        raise UserError(f"{at}: {cell!r} is not in a unit like its column's, {unit}")
    return Published(float(printed * UNITS[own][1]), f"{number} {own}", source)
