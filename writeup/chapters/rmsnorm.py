"""RMSNorm as one kernel: its two gradients derived, the lower bound of its time, and what others reached."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.cost.machines import System, system_preset
from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation
from writeup.ceilings import floored, norm_floor
from writeup.cells import NONE, median_ms, prediction, ratio, timing
from writeup.chapters.layernorm import ROD
from writeup.tables import ON_GPU, Table, not_measured

STUDENT = "go-akshit"
NORMS = {"rmsnorm": "RMSNorm, eager", "layernorm": "LayerNorm", "rmsnorm triton": "RMSNorm, Triton"}
OURS = {"eager": "RMSNorm, eager", "layernorm": "LayerNorm", "ours": "RMSNorm, Triton"}  # in our records
AUTHORS = {"2024": (ROD, "norms with triton"), STUDENT: (STUDENT, "norms")}
SECTIONS = {"2.2.4": "norms, forward-backward", "2.3.1": "compiled norms, forward-backward"}
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
    norms, rows = cited.only(candidate=list(OURS)), []
    for record in sorted(norms, key=lambda r: (str(r.config["pass"]), int(r.config["columns"]))):
        where = {key: record.config[key] for key in ("pass", "rows", "columns")}
        copy = cited.measured.one(where, candidate="copy")
        cells = [timing(book, record), format_seconds(median_ms(copy) / 1e3) if copy else prediction(record)]
        name = OURS[record.config["candidate"]]
        rows.append([f"{where['rows']} x {where['columns']}", where["pass"], name, *cells, share(record)])
    heads = ("<rows x columns", "<pass", "<norm", "median", "least: a copy in turn")
    return Table(book, (*heads, "of the copy's speed (quartiles)"), rows, norms)


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
