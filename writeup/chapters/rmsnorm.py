"""RMSNorm as one kernel: its two gradients derived, its speed of light, and what others reached."""

from typing import Any

from cs336_systems.console import format_bytes, format_seconds
from cs336_systems.cost.large.systems import System, system_preset
from writeup.book import Book, Citation
from writeup.ceilings import COURSE_ROWS, floored, norm_bytes, norm_floor
from writeup.cells import DOUBTFUL, prediction, quoted, ratio, timing
from writeup.chapters.layernorm import ROD
from writeup.figures import Figure, draw, logarithmic
from writeup.publications import Published
from writeup.tables import Table
from writeup.words import joined, times

STUDENT = "go-akshit"
NORMS = {"rmsnorm": "RMSNorm, eager", "layernorm": "LayerNorm", "rmsnorm triton": "RMSNorm, Triton"}
AUTHORS = {"Rød": (ROD, "norms with triton"), STUDENT: (STUDENT, "norms")}
SECTIONS = {"2.2.4": "norms, forward-backward", "2.3.1": "compiled norms, forward-backward"}
COLUMNS = (1024, 2048, 4096, 8192)
FORWARD, BOTH = "forward", "forward-backward"


def content(book: Book) -> dict[str, Any]:
    """Tables of what others published, our own where it was measured, and the speed of light."""
    system = system_preset("H100")
    ours = book.cite("norms", candidate="ours", dtype="fp32", command="python -m benchmarks.gpu_suite")
    return {
        "ours": kernel(book, ours),
        "forward": forward(book, system),
        "picture": picture(book, system),
        "both": both(book, system),
        "models": models(book),
        "rows": f"{COURSE_ROWS:,}",
        "example": example(system),
        "best": best(book, system),
        "crossing": crossing(book),
        "repeated": repeated(book),
        "impossible": impossible(book, system),
    }


def kernel(book: Book, ours: Citation) -> Table:
    """This project's kernel, where a GPU has timed it."""
    rows = [
        [
            f"{r.config['rows']} x {r.config['columns']}", r.config["pass"], timing(book, r), prediction(r),
            ratio(r, "copy_fraction"),
        ]
        for r in ours
    ]  # fmt: skip
    return Table(
        book, ("<rows x columns", "<pass", "median (quartiles)", "predicted", "a copy's time over it"), rows, ours
    )


def forward(book: Book, system: System) -> Table:
    """Published forward times, each with the share of the H100's bandwidth that it means."""
    rows = []
    for columns in COLUMNS:
        floor = norm_floor(columns, FORWARD, system)
        for who, source in AUTHORS.items():
            found = [book.published.value(*source, "", candidate=name, columns=columns) for name in NORMS]
            rows.append([f"{columns:,}", format_seconds(floor), who, *(floored(each, floor) for each in found)])
    return Table(book, ("<columns", f"least on an {system.name}", "<who", *NORMS.values()), rows)


def picture(book: Book, system: System) -> Figure:
    """The share of the bandwidth over columns."""

    def into(axes: Any) -> None:
        for (who, where), line in zip(AUTHORS.items(), ("o-", "s--"), strict=True):
            for place, (name, title) in enumerate(NORMS.items()):
                found = [
                    (columns, book.published.value(*where, candidate=name, columns=columns)) for columns in COLUMNS
                ]
                known = [(columns, time) for columns, time in found if time]
                shares = [norm_floor(columns, FORWARD, system) / time.value for columns, time in known]
                axes.plot([columns for columns, _ in known], shares, line, color=f"C{place}", label=f"{who}: {title}")
        logarithmic(axes, COLUMNS, "columns", f"share of the {system.name}'s bandwidth")
        axes.set_yscale("linear")
        axes.set_ylim(0, 1)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(
        "rmsnorm-bandwidth", f"Published forward passes of norms, as a share of the bandwidth of an {system.name}.",
        "Lines of the share of bandwidth over columns for three norms of two authors", into,
    )  # fmt: skip


def both(book: Book, system: System) -> Table:
    """Forward with backward: the original's two tables, one of which repeats the forward pass."""
    rows, doubtful = [], False
    for columns in COLUMNS:
        floor = norm_floor(columns, BOTH, system)
        for section, table in SECTIONS.items():
            cells = []
            for name in NORMS:
                found = book.published.value(ROD, table, candidate=name, columns=columns)
                short = bool(found and found.value < floor)
                cells.append(floored(found, floor) + DOUBTFUL * short)
                doubtful |= short
            rows.append([f"{columns:,}", format_seconds(floor), section, *cells])
    note = f"{DOUBTFUL} less than the bytes of forward and backward take at the full bandwidth of an {system.name}."
    heads = ("<columns", f"least on an {system.name}", "<section", *NORMS.values())
    return Table(book, heads, rows, notes=[note] * doubtful)


def models(book: Book) -> Table:
    """The original's models with each norm."""
    table, rows = book.published.table(ROD, "models with each norm"), []
    for size, what in dict.fromkeys((row.keys["size"], row.keys["pass"]) for row in table.rows):
        found = [table.value("", size=size, candidate=name, **{"pass": what}) for name in NORMS]
        if eager_and_triton := _ends(found):
            eager, triton = eager_and_triton
            cells = [quoted(book, each, "ms") for each in found]
            rows.append([str(size), str(what), *cells, f"{triton.value / eager.value:.2f}"])
    return Table(book, ("<size", "<pass", *NORMS.values(), "Triton / eager"), rows)


def _ends(found: list[Published | None]) -> tuple[Published, Published] | None:
    first, last = found[0], found[-1]
    return (first, last) if first and last else None


def example(system: System) -> str:
    """The speed of light of the widest norm of the course, worked out."""
    columns = COLUMNS[-1]
    moved, floor = norm_bytes(columns, FORWARD, system), norm_floor(columns, FORWARD, system)
    back = norm_floor(columns, BOTH, system)
    return (
        f"{COURSE_ROWS:,} rows of {columns:,} columns in float32 are {format_bytes(moved)}, which the "
        f"{system.bandwidth / 1e9:,.0f} GB/s of an {system.name} move in {format_seconds(floor)}; with the backward "
        f"pass, which reads x and dy and writes dx, {format_seconds(back)}"
    )


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


def crossing(book: Book) -> str:
    """At which sizes the original's model is faster with the Triton norm, by pass."""
    table, said = book.published.table(ROD, "models with each norm"), []
    for what in dict.fromkeys(row.keys["pass"] for row in table.rows):
        gains = {}
        for size in dict.fromkeys(row.keys["size"] for row in table.rows):
            ends = _ends([table.value("", size=size, candidate=name, **{"pass": what}) for name in NORMS])
            if ends:
                gains[str(size)] = ends[0].value / ends[1].value
        wins = [size for size, gain in gains.items() if gain > 1]
        most = max(gains.values())
        at = f"at {joined(wins)} (at most {times(most)} as fast)" if wins else "nowhere"
        said.append(f"in the {what} pass the Triton norm wins {at}")
    return joined(said)


def repeated(book: Book) -> str:
    """How many figures of the original's table with backward are those of its forward table."""
    first, second = (book.published.table(ROD, name) for name in ("norms with triton", "norms, forward-backward"))
    pairs = [(first.value("", **row.keys), row.values["mean"]) for row in second.rows]
    same = sum(bool(a) and abs(a.value - b.value) <= 0.51 * max(a.resolution, b.resolution) for a, b in pairs if a)
    return f"{same} of {len(pairs)}"


def impossible(book: Book, system: System) -> str:
    """How many of them would need more than the bandwidth there is."""
    rows = book.published.table(ROD, "norms, forward-backward").rows
    short = sum(row.values["mean"].value < norm_floor(int(row.keys["columns"]), BOTH, system) for row in rows)
    return f"{short} of {len(rows)}"
