"""RMSNorm as one kernel: its two gradients derived, the lower bound of its time, and what others reached."""

from dataclasses import replace
from typing import Any

from benchmarks.records import Record
from cs336_systems.cost.machines import System, system_preset
from cs336_systems.host.console import format_seconds
from cs336_systems.presets import Norm
from writeup.book import Book, Citation
from writeup.ceilings import floored, norm_floor, original_seconds
from writeup.cells import NONE, median_ms, prediction, quoted, ratio, timing
from writeup.chapters.layernorm import ROD
from writeup.figures import Figure, draw, logarithmic
from writeup.publications import Published
from writeup.tables import ON_GPU, Table, not_measured
from writeup.words import joined

STUDENT = "go-akshit"
NORMS = {"rmsnorm": "RMSNorm, eager", "layernorm": "LayerNorm", "rmsnorm triton": "RMSNorm, Triton"}
OURS = {"eager": "RMSNorm, eager", "layernorm": "LayerNorm", "ours": "RMSNorm, Triton"}  # in our records
AUTHORS = {"2024": (ROD, "norms with triton"), STUDENT: (STUDENT, "norms")}
SECTIONS = {"2.2.4": "norms, forward-backward", "2.3.1": "compiled norms, forward-backward"}
NORMED: tuple[Norm, ...] = ("rmsnorm", "layernorm")  # that the cost model predicts
COLUMNS = (1024, 2048, 4096, 8192)
FORWARD, BOTH = "forward", "forward-backward"


def content(book: Book) -> dict[str, Any]:
    """Tables of what others published, our own beside it, and the lower bound."""
    system = system_preset("H100")
    here = book.cite("norms", {"candidate": (*OURS, "copy"), "dtype": "fp32", "pass": (FORWARD, BOTH)})
    kernel = here.only(candidate="ours")
    return {
        "kernel": ours(book, here) if kernel.measured else not_measured(ON_GPU),
        "floors": floors(),
        "forward": forward(book, system),
        "both": both(book, system),
    }


def ours(book: Book, cited: Citation) -> Table:
    """Times measured here: each norm by columns and pass, with its share of the speed of a copy."""
    rows = []
    for record in sorted(cited, key=lambda r: (str(r.config["pass"]), int(r.config["columns"]))):
        name = OURS.get(record.config["candidate"])
        where = {key: record.config[key] for key in ("pass", "rows", "columns")}
        if name:
            copy = cited.measured.one(where, candidate="copy")
            cells = [timing(book, record), format_seconds(median_ms(copy) / 1e3) if copy else prediction(record)]
            rows.append([f"{where['rows']} x {where['columns']}", where["pass"], name, *cells, share(record)])
    heads = ("<rows x columns", "<pass", "<norm", "median", "least: a copy in turn")
    used = replace(cited, records=tuple(r for r in cited if r.config["candidate"] in OURS))
    return Table(book, (*heads, "of the copy's speed (quartiles)"), rows, used)


def share(record: Record) -> str:
    """The time of the copy that took turns over the record's."""
    return ratio(record, "copy_fraction") if record.status == "ok" else NONE


def floors() -> Table:
    """The least time of each norm of the course by columns, by the data sheets of two GPUs."""
    heads = [f"{what}, {name}" for what in (FORWARD, BOTH) for name in ("H100", "H200")]
    rows = []
    for columns in COLUMNS:
        found = [norm_floor(columns, what, system_preset(n)) for what in (FORWARD, BOTH) for n in ("H100", "H200")]
        rows.append([f"{columns:,}", *map(format_seconds, found)])
    return Table(Book(machine=None), ("<columns", *heads), rows)


def forward(book: Book, system: System) -> Table:
    """Published forward times, each with the share of the H100's bandwidth that it means."""
    rows = []
    for columns in COLUMNS:
        floor = norm_floor(columns, FORWARD, system)
        for who, source in AUTHORS.items():
            found = [book.published.value(*source, "", candidate=name, columns=columns) for name in NORMS]
            rows.append([f"{columns:,}", format_seconds(floor), who, *(floored(book, each, floor) for each in found)])
    return Table(book, ("<columns", f"least on an {system.name}", "<who", *NORMS.values()), rows)


def picture(book: Book, system: System, here: Citation) -> Figure:
    """The share of the bandwidth over columns: published, and here of what a copy reaches."""

    def into(axes: Any) -> None:
        for (who, where), line in zip(AUTHORS.items(), ("o-", "s--"), strict=True):
            for place, (name, title) in enumerate(NORMS.items()):
                found = [
                    (columns, book.published.value(*where, candidate=name, columns=columns)) for columns in COLUMNS
                ]
                known = [(columns, time) for columns, time in found if time]
                shares = [norm_floor(columns, FORWARD, system) / time.value for columns, time in known]
                axes.plot([columns for columns, _ in known], shares, line, color=f"C{place}", label=f"{who}: {title}")
        for place, (name, title) in enumerate(OURS.items()):
            records = here.measured.only(candidate=name, **{"pass": FORWARD})
            found_here = {r.config["columns"]: r.metrics.get("copy_fraction_median") for r in records}
            points = sorted((columns, value) for columns, value in found_here.items() if value)
            if points:
                axes.plot(*zip(*points, strict=True), "^:", color=f"C{place}", label=f"here: {title}")
        logarithmic(axes, COLUMNS, "columns", "share of the ceiling")
        axes.set_yscale("linear")
        axes.set_ylim(0, 1)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(
        "rmsnorm-bandwidth", f"Forward passes of norms: the published ones as a share of the bandwidth of an "
        f"{system.name}, ours as a share of the speed of a copy that took turns with them.",
        "Lines of the share of bandwidth over columns for three norms of two authors and of this machine", into,
    )  # fmt: skip


def both(book: Book, system: System) -> Table:
    """Forward with backward: the original's two tables, one of which repeats the forward pass."""
    rows = []
    for columns in COLUMNS:
        floor = norm_floor(columns, BOTH, system)
        for section, table in SECTIONS.items():
            found = [book.published.value(ROD, table, candidate=name, columns=columns) for name in NORMS]
            cells = [floored(book, each, floor) for each in found]
            rows.append([f"{columns:,}", format_seconds(floor), section, *cells])
    note = f"Above 100% a time is impossible: at the full bandwidth of an {system.name} the bytes take longer."
    heads = ("<columns", f"least on an {system.name}", "<section", *NORMS.values())
    return Table(book, heads, rows, notes=[note])


def models(book: Book) -> Table:
    """The original's models with each norm."""
    table, rows = book.published.table(ROD, "models with each norm"), []
    for size, what in dict.fromkeys((row.keys["size"], row.keys["pass"]) for row in table.rows):
        found = [table.value("", size=size, candidate=name, **{"pass": what}) for name in NORMS]
        if eager_and_triton := _ends(found):
            eager, triton = eager_and_triton
            cells = [quoted(book, each, "ms") for each in found]
            for place, norm in enumerate(NORMED):
                cells[place] += f" ({format_seconds(original_seconds(str(size), str(what), norm=norm))})"
            rows.append([str(size), str(what), *cells, f"{triton.value / eager.value:.2f}"])
    note = "In brackets: predicted by the large cost model, for an H100 with products in TF32."
    return Table(book, ("<size", "<pass", *NORMS.values(), "Triton / eager"), rows, notes=[note])


def _ends(found: list[Published | None]) -> tuple[Published, Published] | None:
    first, last = found[0], found[-1]
    return (first, last) if first and last else None


def best(book: Book, system: System) -> str:
    """The largest share that each author's kernel reaches, and whether the narrowest norm reaches the smallest."""
    said, narrow = [], True
    for who, source in AUTHORS.items():
        found = {each: book.published.value(*source, "", candidate="rmsnorm triton", columns=each) for each in COLUMNS}
        shares = [(norm_floor(each, FORWARD, system) / time.value, each) for each, time in found.items() if time]
        share, columns = max(shares)
        said.append(f"{who}'s reaches {share:.0%} of an {system.name}'s bandwidth at {columns:,} columns")
        narrow &= min(shares)[1] == COLUMNS[0]
    why = " and the least at the narrowest, where a launch costs as much and moves less" if narrow else ""
    return f"{joined(said, last='and')}{',' * narrow}{why}"


def again(book: Book) -> str:
    """Number of forward cells in which the original's two sections agree, and the difference of the others."""
    names = ("models with each norm, forward", "models with each norm")
    one, other = (book.published.table(ROD, name) for name in names)
    pairs = [(row.values["mean"], found) for row in one.rows if (found := other.value("", **row.keys))]
    same = sum(a.value == b.value for a, b in pairs)
    apart = max(abs(b.value / a.value - 1) for a, b in pairs)
    return f"{same} of {len(pairs)} of its times stand there again, and no other is more than {apart:.1%} apart"
