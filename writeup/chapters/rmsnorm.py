"""RMSNorm as one kernel: its two gradients derived, the lower bound of its time, and what others reached."""

from collections.abc import Mapping
from typing import Any

from cs336_systems.cost.machines import System, system_preset
from cs336_systems.host.console import format_seconds
from writeup.book import Book
from writeup.ceilings import floored, norm_floor
from writeup.chapters.layernorm import BOTH, FORWARD, ROD
from writeup.tables import ON_GPU, Table, not_measured

STUDENT = "go-akshit"
NORMS = {"rmsnorm": "RMSNorm, eager", "layernorm": "LayerNorm", "rmsnorm triton": "RMSNorm, Triton"}
AUTHORS = {"2024": (ROD, "norms with triton"), STUDENT: (STUDENT, "norms")}
SECTIONS = {"2024, 2.2.4": (ROD, "norms, forward-backward"), "2024, 2.3.1": (ROD, "compiled norms, forward-backward")}
COLUMNS = (1024, 2048, 4096, 8192)


def content(book: Book) -> dict[str, Any]:
    """The command for a kernel that was not timed, and tables of published times beside the lower bound."""
    system = system_preset("H100")
    kernel = book.cite("norms", dtype="fp32").measured.only(candidate="ours")
    return {
        "kernel": "" if kernel else not_measured(ON_GPU),
        "forward": published(book, system, FORWARD, AUTHORS),
        "both": published(book, system, BOTH, SECTIONS),
    }


def published(book: Book, system: System, what: str, tables: Mapping[str, tuple[str, str]]) -> Table:
    """Published times of a pass by columns, each with the share of the GPU's bandwidth that it means."""
    rows = []
    for columns in COLUMNS:
        floor = norm_floor(columns, what, system)
        for who, table in tables.items():
            found = {
                title: floored(book, book.published.value(*table, candidate=name, columns=columns), floor)
                for name, title in NORMS.items()
            }
            row = {
                "<columns": f"{columns:,}",
                f"least on an {system.name}": format_seconds(floor),
                "<published in": who,
            }
            rows.append(row | found)
    note = f"Above 100% a time is impossible: at the full bandwidth of an {system.name} the bytes take longer."
    return Table(book, rows, notes=[note] if what == BOTH else [])
