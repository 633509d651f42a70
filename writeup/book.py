"""Sources that a chapter may cite: records of one machine, published figures, predictions. Nothing here measures."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.lib.running import CPU, Benchmark
from benchmarks.records import RESULTS, Record, every_record, read_records
from cs336_systems.errors import UserError
from cs336_systems.host.text import printable
from writeup.errors import CitationError, Unmeasured
from writeup.plausibility import Suspect, suspects_of_published, suspects_of_records
from writeup.publications import Publications, Published, publications

BENCHMARKS = tuple(dict.fromkeys(run.name for run in CPU))  # that the chapters cite
EDITION = "amd-epyc"  # the machine whose records the write-up's sentences speak of
Wanted = Any  # a value; several to choose from, in a tuple, list or set; or a function that says whether one is wanted


@dataclass(frozen=True)
class Citation:
    """The records that a chapter asked for, the newest of each configuration, and the command that measures them."""

    benchmark: str
    command: str
    records: tuple[Record, ...] = ()
    keys: frozenset[str] = frozenset()  # all that records of this benchmark have; none where nobody has measured it

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def only(self, config: Mapping[str, Wanted] | None = None, /, **more: Wanted) -> "Citation":
        """Select records by settings. Raises CitationError for a setting that no record of the benchmark has."""
        wanted = {**(config or {}), **more}
        for key in wanted:
            if self.keys and key not in self.keys:
                raise CitationError(
                    f"records of {self.benchmark} have no setting {key!r}; they have {', '.join(sorted(self.keys))}"
                )
        chosen = (each for each in self.records if all(_is(each.config.get(key), wanted[key]) for key in wanted))
        return Citation(self.benchmark, self.command, tuple(chosen), self.keys)

    def one(self, config: Mapping[str, Wanted] | None = None, /, **more: Wanted) -> Record | None:
        """The one with these settings, or None. Raises CitationError if there are several."""
        found = self.only(config, **more)
        if len(found) > 1:
            raise CitationError(
                f"{len(found)} records of {self.benchmark} have { ({**(config or {}), **more}) }, not one"
            )
        return found.records[0] if found else None

    def need(self, config: Mapping[str, Wanted] | None = None, /, **more: Wanted) -> Record:
        """The measured one with these settings, the newest of several. Raises Unmeasured where there is none."""
        found = self.measured.only(config, **more).records
        if not found:
            raise Unmeasured(self.command)
        return max(found, key=lambda each: str(each.environment.get("date")))

    def values(self, key: str) -> list[Any]:
        """The different values of a setting, in the order of the records."""
        self.only({key: lambda value: True})
        return list(dict.fromkeys(each.config.get(key) for each in self.records))

    @property
    def measured(self) -> "Citation":
        """Select records that were measured, not those that did not fit or are not supported here."""
        return Citation(self.benchmark, self.command, tuple(r for r in self.records if r.status == "ok"), self.keys)


def _is(value: Any, wanted: Wanted) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    if isinstance(wanted, tuple | list | set | frozenset):
        return value in wanted
    return bool(value == wanted)


def benchmark(name: str) -> Benchmark:
    """The first run of that name. Raises CitationError for a name that no benchmark has."""
    if name not in BENCHMARKS:
        raise CitationError(f"no benchmark is called {name!r}; there are {', '.join(sorted(BENCHMARKS))}")
    return next(each for each in CPU if each.name == name)


def identity(record: Record) -> str:
    """A key of the measurement: its settings, and whether the allocator kept its pages."""
    settings = [record.config, record.environment.get("pages_kept", False)]
    return json.dumps(settings, sort_keys=True, allow_nan=False)


def facts(of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Values that a chapter's sentences quote; empty if a record that they need was not measured."""
    try:
        return of()
    except Unmeasured:
        return {}


def sections(book: "Book", *modules: Any) -> dict[str, Any]:
    """Values of the sections of a chapter, each under `NAME_KEY` with the name of its module."""
    named = {module.__name__.rpartition(".")[2]: module.content(book) for module in modules}
    return {f"{name}_{key}": value for name, content in named.items() for key, value in content.items()}


def metric(record: Record, name: str) -> Any:
    """A metric of a record. Raises CitationError if it has none of that name."""
    if name not in record.metrics:
        known = ", ".join(sorted(record.metrics))
        raise CitationError(f"a record of {record.benchmark} has no metric {name!r}; it has {known or 'none'}")
    return record.metrics[name]


def machines(results: Path) -> list[str]:
    """The folders of records, those with the most records first. Raises UserError where they cannot be read."""
    size: dict[str, int] = {}
    try:
        for file in sorted(results.glob("*/*.jsonl")):
            size[file.parent.name] = size.get(file.parent.name, 0) + len(file.read_bytes().splitlines())
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    return sorted(size, key=lambda name: -size[name])


def choose_machine(results: Path, wanted: str | None) -> str | None:
    """The folder that is wanted, by a part of its name, or else the one with the most records; None if there is none.

    Raises UserError for a name that fits no folder, or several, and where folders cannot be read.
    """
    there = machines(results)
    if wanted is None:
        return there[0] if there else None
    fitting = [wanted] if wanted in there else [name for name in there if wanted.lower() in name]
    if len(fitting) != 1:
        which = f"{len(fitting)} machines, {', '.join(fitting)}" if fitting else "no machine"
        have = f"there are records of {', '.join(there)}" if there else "there are no records at all"
        raise UserError(f"--machine {wanted} names {which} in {results}; {have}")
    return fitting[0]


def place_of(record: Record) -> str:
    """`AMD EPYC, 2 cores; torch 2.13.0, Triton 3.8.0, Python 3.11.7` of a record."""
    where = record.environment
    software = [f"{name} {where[name.lower()]}" for name in ("torch", "Triton", "Python") if where.get(name.lower())]
    return printable(f"{where['device']}, {where['cores']} cores; {', '.join(software)}")


@dataclass
class Book:
    """The records of one machine."""

    results: Path = RESULTS
    machine: str | None = None
    chapter: str = ""
    known: dict[str, frozenset[str]] = field(default_factory=dict)  # settings by benchmark, on any machine

    @cached_property
    def published(self) -> Publications:
        """Published figures of others."""
        return publications()

    def cite(
        self, name: str, config: Mapping[str, Wanted] | None = None, /, *, command: str = "", **more: Wanted
    ) -> Citation:
        """Records of a benchmark with these settings, and what to run where there are none.

        Raises CitationError for a benchmark or a setting that does not exist.
        """
        source = benchmark(name)
        return Citation(name, command or source.command, self._records[name], self._keys(name)).only(config, **more)

    def runs(self, record: Record) -> list[float]:
        """The median, in milliseconds, of every run of a record's configuration, its own among them."""
        return self._runs.get((record.benchmark, identity(record)), [metric(record, "median_ms")])

    def history(self, name: str) -> list[Record]:
        """Every record of a benchmark on this machine, oldest first."""
        path = self.results / (self.machine or "") / f"{name}.jsonl"
        return every_record(path) if self.machine and path.exists() else []

    @property
    def between_runs(self) -> list[float]:
        """Highest over lowest median, for every configuration that was measured more than once; ascending."""
        return sorted(max(found) / min(found) for found in self._runs.values() if len(found) > 1)

    @property
    def is_edition(self) -> bool:
        """True for the committed records that the hand-written sentences are about."""
        return self.machine == EDITION and self.results == RESULTS

    @cached_property
    def _runs(self) -> dict[tuple[str, str], list[float]]:
        found: dict[tuple[str, str], list[float]] = {}
        for name in BENCHMARKS:
            for record in self.history(name):
                if record.status == "ok" and record.metrics.get("median_ms"):
                    key = record.benchmark, identity(record)
                    found.setdefault(key, []).append(float(record.metrics["median_ms"]))
        return found

    def suspicions(self, record: Record) -> list[Suspect]:
        """Reasons why a record is implausible."""
        return self._suspects.get(id(record), [])

    @cached_property
    def suspects(self) -> list[Suspect]:
        """Every implausible figure among the records of the machine."""
        return suspects_of_records(self.everything)

    @cached_property
    def everything(self) -> list[Record]:
        """Every record of the machine."""
        return [record for records in self._records.values() for record in records]

    @cached_property
    def places(self) -> Counter[str]:
        """The devices and the software of the records, with the number of records of each."""
        return Counter(map(place_of, self.everything))

    @cached_property
    def published_suspects(self) -> list[Suspect]:
        """Every implausible figure among the published ones."""
        return suspects_of_published(self.published)

    def doubts(self, quoted: Published) -> list[Suspect]:
        """Reasons why a published figure is implausible."""
        return [suspect for suspect in self.published_suspects if any(each is quoted for each in suspect.quoted)]

    @cached_property
    def _suspects(self) -> dict[int, list[Suspect]]:
        found: dict[int, list[Suspect]] = {}
        for suspect in self.suspects:
            for record in suspect.of:
                found.setdefault(id(record), []).append(suspect)
        return found

    @cached_property
    def _records(self) -> dict[str, tuple[Record, ...]]:
        """The newest record of each configuration, by benchmark."""
        paths = {name: self.results / (self.machine or "") / f"{name}.jsonl" for name in BENCHMARKS}
        return {
            name: tuple(read_records(path) if self.machine and path.exists() else ()) for name, path in paths.items()
        }

    def _keys(self, name: str) -> frozenset[str]:
        """Settings that records of a benchmark have, on any machine."""
        if name not in self.known:
            paths = {*RESULTS.glob(f"*/{name}.jsonl"), *self.results.glob(f"*/{name}.jsonl")}
            records = (record for path in paths for record in read_records(path))
            self.known[name] = frozenset(key for record in records for key in record.config)
        return self.known[name]
