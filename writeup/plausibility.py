"""Implausible figures, ours and published: the rule that applies to each figure, and its neighbours for comparison.

The physics is in `writeup.plausibility_rules`, what a figure stands for in `writeup.plausibility_figures`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_seconds
from writeup import plausibility_rules as rules
from writeup.plausibility_figures import (
    Ceilings,
    Figure,
    data_sheet,
    label,
    measured_ceilings,
    memory_figure,
    number_type,
    published_figures,
    time_figure,
)
from writeup.publications import Publications, Published, PublishedTable

AXES = ("size", "bytes", "columns", "seq")  # along which neighbours stand
Kind = Literal["limit", "neighbour", "empty"]
KINDS: dict[Kind, str] = {"limit": "impossible", "neighbour": "inconsistent", "empty": "empty"}


@dataclass(frozen=True)
class Suspect:
    """A figure that is not what its label says: its place, its text, and the reason.

    Of kind "limit" it breaks a limit of physics, whatever stands beside it; of kind "neighbour" it contradicts what
    does, or itself. `of` has the records that it is made of, `quoted` the published figures.
    """

    where: str
    text: str
    why: str
    of: tuple[Record, ...] = ()
    quoted: tuple[Published, ...] = ()
    kind: Kind = "neighbour"


def suspects_of_published(publications: Publications) -> list[Suspect]:
    """Every suspect figure of the published tables, in their order; then what only two tables together show."""
    found: list[Suspect] = []
    sources: dict[str, list[tuple[PublishedTable, list[Figure]]]] = {}
    for table in publications.tables.values():
        where = ", ".join(part for part in (table.source.id, table.where, f'"{table.name}"') if part)
        if not table.rows:
            found.append(Suspect(where, "an empty table", table.note or "it has columns and no figure", kind="empty"))
        figures = list(published_figures(table, where))
        found += [_suspect(each, why) for each in figures if (why := _doubtful_mean(each))]
        found += _suspects(figures, data_sheet(table.system, table.fixed.get("nodes", 1) == 1))
        sources.setdefault(table.source.id, []).append((table, figures))
    for tables in sources.values():
        found += _repeated(tables)
        found += _too_wide([figure for _, figures in tables for figure in figures])
    return found


def suspects_of_records(records: Sequence[Record]) -> list[Suspect]:
    """Every suspect median or peak among records of one machine, all benchmarks together: they share its ceilings."""
    found: list[Suspect] = []
    ceilings = measured_ceilings(records)
    for name in dict.fromkeys(record.benchmark for record in records):
        measured = [record for record in records if record.benchmark == name and record.status == "ok"]
        found += _suspects([each for record in measured if (each := time_figure(record))], ceilings)
        found += _too_wide([each for record in measured if (each := memory_figure(record))])
    return found


def doubtful_means(records: Sequence[Record]) -> list[Suspect]:
    """Records whose median may be quoted and whose mean may not: a few samples hold most of it."""
    found = []
    for record in records:
        figure = time_figure(record)
        if figure and figure.settings.get("warmup") != 0:
            mean = record.metrics.get("mean_ms", 0.0)
            shown = f"{label(record.config)}: mean {format_seconds(mean / 1e3)}"
            deviation = rules.deviation_over_mean(mean, record.metrics.get("std_ms", 0.0))
            if why := deviation or rules.slow_start(record.samples_ms):
                found.append(Suspect(figure.where, shown, why, (record,)))
    return found


def let_pass(publications: Publications) -> list[str]:
    """Published means that a start-up holds most of, in words, where it was to be shown: measured without warm-up."""
    figures = [each for table in publications.tables.values() for each in published_figures(table, table.source.id)]
    cold = [each for each in figures if each.settings.get("warmup") == 0]
    return [each.shown for each in cold if rules.deviation_over_mean(each.value, each.std)]


def _suspect(figure: Figure, why: str) -> Suspect:
    return Suspect(figure.where, figure.shown, why, *_made_of([figure]))


def _together(line: Sequence[Figure], axis: str, why: str) -> Suspect:
    """Several figures that are suspect as one."""
    first, last = line[0], line[-1]
    same = {name: value for name, value in first.settings.items() if all(e.settings[name] == value for e in line)}
    span = f"{label({axis: first.settings[axis]})} to {label({axis: last.settings[axis]})}"
    return Suspect(first.where, f"{label(same)}, {span}: {len(line)} figures", why, *_made_of(line))


def _made_of(figures: Sequence[Figure]) -> tuple[tuple[Record, ...], tuple[Published, ...]]:
    records = tuple(each.record for each in figures if each.record)
    return records, tuple(each.quoted for each in figures if each.quoted)


def _doubtful_mean(figure: Figure) -> str:
    """Without warm-up, a start-up is what was to be shown: `let_pass` lists what this excuses."""
    return "" if figure.settings.get("warmup") == 0 else rules.deviation_over_mean(figure.value, figure.std)


def _suspects(figures: list[Figure], ceilings: Ceilings) -> list[Suspect]:
    """Findings on each figure of a table, alone and beside its neighbours."""
    found = [replace(_suspect(each, why), kind="limit") for each in figures for why in _alone(each, ceilings) if why]
    for axis in AXES:
        for series in _series(figures, axis):
            found += _along(sorted(series, key=lambda each: each.place(axis)), axis, ceilings)
    return [*found, *_passes(figures), *_with_more_in_the_way(figures)]


def _alone(figure: Figure, ceilings: Ceilings) -> Iterator[str]:
    settings = figure.settings
    if figure.unit != "s":
        return
    if ceilings.link and {"bytes", "ranks"} <= settings.keys() and settings.get("device") == "cuda":
        nbytes = settings["bytes"]
        link = rules.over_link(nbytes, settings["ranks"], figure.value, ceilings.link)
        memory = rules.over_memory(2 * nbytes, figure.value, ceilings.memory)  # each rank reads its numbers, and writes
        yield "; ".join(why for why in (link, memory) if why)
    if ceilings.memory and figure.moved:
        yield rules.over_memory(figure.moved, figure.value, ceilings.memory)
    if figure.flops and (peak := ceilings.peak.get(number_type(settings))):
        yield rules.over_peak(figure.flops, figure.value, peak)


def _along(line: list[Figure], axis: str, ceilings: Ceilings) -> Iterator[Suspect]:
    """Neighbours, ordered by size."""
    places = [each.place(axis) for each in line]
    for index, expected in rules.misplaced([(at, each.value) for at, each in zip(places, line, strict=True)]).items():
        factor = line[index].value / expected
        shown = format_seconds(expected) if line[index].unit == "s" else format_bytes(expected)
        away = f"{factor:.1f} times too much" if factor > 1 else f"{1 / factor:.1f} times too little"
        yield _suspect(line[index], f"its neighbours put it at {shown}: {away}")
    points = [(at, each.value, each.std) for at, each in zip(places, line, strict=True)]
    for index, why in rules.smaller_yet_slower(points).items():
        yield _suspect(line[index], why)
    if axis == "bytes" and ceilings.link and line[0].settings.get("device") == "cuda":
        why = rules.no_growth({at: each.value for at, each in zip(places, line, strict=True)}, ceilings.link)
        if why:
            yield _together(line, axis, why)


def _series(figures: list[Figure], axis: str) -> list[list[Figure]]:
    """Groups of figures that differ in one setting and in nothing else."""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        if axis in figure.settings and (axis != "size" or figure.model):
            groups.setdefault(figure.without(axis), []).append(figure)
    return [group for group in groups.values() if len(group) == len({str(each.settings[axis]) for each in group}) > 1]


def _passes(figures: list[Figure]) -> Iterator[Suspect]:
    for axis in ("pass", "mode"):
        for group in _series(figures, axis):
            found = {each.settings[axis]: each for each in group if each.settings.get("warmup") != 0}
            part, whole = found.get("forward"), found.get("forward-backward")
            if part and whole and (why := rules.not_slower(part.value, whole.value)):
                yield _suspect(whole, why)


def _with_more_in_the_way(figures: list[Figure]) -> list[Suspect]:
    """The rows of one kind together: on one node, and on two."""
    pairs: dict[tuple[str, str], list[tuple[Figure, Figure]]] = {}
    for group in _series(figures, "nodes"):
        found = {each.settings["nodes"]: each for each in group}
        axis = next((axis for axis in AXES if axis in group[0].settings), "")
        if axis and found.keys() >= {1, 2}:
            pairs.setdefault((axis, found[1].without("nodes", axis)), []).append((found[1], found[2]))
    return [
        _together([two for _, two in kind], axis, why)
        for (axis, _), kind in pairs.items()
        if (why := rules.always_faster([(one.value, two.value) for one, two in kind]))
    ]


def _repeated(tables: list[tuple[PublishedTable, list[Figure]]]) -> Iterator[Suspect]:
    """A table with the backward pass beside the last one before it without, of the same keys."""
    forward: dict[tuple[str, ...], tuple[str, list[Figure]]] = {}
    for table, figures in tables:
        if table.fixed.get("pass") == "forward":
            forward[table.keys] = table.name, figures
        elif table.fixed.get("pass") == "forward-backward" and table.keys in forward:
            name, before = forward[table.keys]
            parts = {each.without("pass"): each for each in before}
            both = [(parts[key], each) for each in figures if (key := each.without("pass")) in parts]
            why = rules.repeats(
                [(part.value, part.digit) for part, _ in both], [(whole.value, whole.digit) for _, whole in both]
            )
            if why:
                yield Suspect(figures[0].where, "the whole table", f'{why}, in "{name}"', *_made_of(figures))


def _too_wide(figures: list[Figure]) -> Iterator[Suspect]:
    """Memory in 16 bits beside the same in 32."""
    sizes = [each for each in figures if each.unit == "bytes"]
    for group in _series(sizes, "precision"):
        found = {each.settings["precision"]: each for each in group}
        wide, narrow = found.get("fp32"), found.get("bf16")
        if wide and narrow and (why := rules.narrow_above_wide(wide.value, narrow.value)):
            yield _suspect(narrow, why)
