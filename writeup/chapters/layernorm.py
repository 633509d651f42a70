"""LayerNorm, which PyTorch has fused, against RMSNorm written operator by operator: alone, and in the model."""

from datetime import datetime
from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, median_ms, over, prediction, quoted, ratio, timing
from writeup.figures import Figure, draw, logarithmic
from writeup.model_pairs import table
from writeup.publications import ORIGINAL
from writeup.tables import Table
from writeup.words import joined, pair_ratios

ROD = ORIGINAL
FORWARD, BOTH = "forward", "forward-backward"
ALONE = ("layernorm", "eager", "torch", "compiled", "ours")  # in the tables; the picture has them all
NORMS = {
    "layernorm": "LayerNorm",
    "eager": "RMSNorm, eager",
    "torch": "RMSNorm, torch's own",
    "compiled": "RMSNorm, compiled",
    "ours": "RMSNorm, Triton",
    "liger": "RMSNorm, Liger-Kernel",
    "quack": "RMSNorm, quack",
    "copy": "a copy",
}
PUBLISHED = {"layernorm": "layernorm", "eager": "rmsnorm", "compiled": "rmsnorm compiled", "ours": "rmsnorm triton"}
PROFILE = "python -m benchmarks.profiling_run --size small --attention naive"
# Reads and writes of a tensor as large as x. Eager RMSNorm: square (read, write), mean (read), times 1 / rms (read,
# write), times the weight (read, write). Fused: read x, write y.
EAGER_TRIPS, FUSED_TRIPS = 7, 2


def content(book: Book) -> dict[str, Any]:
    """Both tables, the picture, and the values of the commentary."""
    both = book.cite("norms", candidate=tuple(NORMS), dtype="fp32", **{"pass": BOTH})
    norms = book.cite("norms", candidate=tuple(NORMS), dtype="fp32", **{"pass": FORWARD})
    profiled = book.cite("profiling", wrapper="none", ranks=1, norm="rmsnorm", command=PROFILE)
    return {
        "alone": alone(book, norms),
        "both": alone(book, both),
        "picture": picture(norms) if norms.measured else None,
        "trips": f"{EAGER_TRIPS / FUSED_TRIPS:.2g}",
        "eager_trips": EAGER_TRIPS,
        "turns": table(book, "norm=layernorm", ("RMSNorm", "LayerNorm")),
        "share": norms_share(profiled),
    }


def by_columns(cited: Citation, candidate: str) -> dict[float, Record]:
    """The measured records of a candidate, by columns."""
    return {record.config["columns"]: record for record in cited.measured.only(candidate=candidate)}


def least(record: Record, copy: Record | None) -> str:
    """`3.3 ms (0.15)`: the time of the copy that took turns, which moves as many bytes, and its share of this one."""
    if copy is None or record.status != "ok":
        return prediction(record)
    return f"{format_seconds(median_ms(copy) / 1e3)} ({ratio(record, 'copy_fraction').split(' ')[0]})"


def alone(book: Book, norms: Citation) -> Table:
    """Each norm by columns in one pass, and the original's forward pass beside it."""
    cited = norms.only(candidate=lambda name: name in ALONE)
    base, copies, rows = by_columns(cited, "layernorm"), by_columns(norms, "copy"), []
    for record in sorted(cited, key=lambda each: int(each.config["columns"])):
        columns, name = record.config["columns"], record.config["candidate"]
        first = base.get(columns)
        share = over(pair_ratios(record, first)) if first and record.status == "ok" else NONE
        known = name in PUBLISHED and record.config["pass"] == FORWARD
        mean, printed = (
            book.published.value(ROD, "norms", column, candidate=PUBLISHED[name], columns=columns) if known else None
            for column in ("mean", "ratio")
        )
        rows.append({
            "<rows x columns": f"{record.config['rows']} x {columns}", "<norm": NORMS[name],
            "median": timing(book, record), "least: a copy in turn (of measured)": least(record, copies.get(columns)),
            "over LayerNorm": "1" if record is first else share,
            "2024, one GPU": quoted(book, mean, "ms"), "over LayerNorm ": printed.shown("x") if printed else NONE,
        })  # fmt: skip
    note = "A norm moves at least as many bytes as a copy of x to y. Ratios are in turn. 2024 used 50,000 rows."
    return Table(book, rows, cited, [note])


def picture(cited: Citation) -> Figure:
    """Bytes per second of every candidate by columns."""

    def into(axes: Any) -> None:
        for name in cited.measured.values("candidate"):
            found = sorted(by_columns(cited, name).items())
            rates = [record.metrics["bytes_per_s"] / 1e9 for _, record in found]
            axes.plot([columns for columns, _ in found], rates, "o-", label=NORMS[name])
        logarithmic(axes, cited.measured.values("columns"), "columns", "GB/s")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return draw(
        "layernorm-rates", "The forward pass of each norm as a rate: the bytes that it must move over its time.",
        "Lines of gigabytes per second over columns for each norm, and for a copy", into,
    )  # fmt: skip


def norms_share(profiled: Citation) -> str:
    """Share of a step that norms take, by the newest profile of each size."""
    inorder = sorted(profiled.measured, key=lambda each: datetime.fromisoformat(str(each.environment["date"])))
    newest = {record.config["size"]: record for record in inorder}
    shares = [f"{metric(record, 'share_RMSNorm'):.0%} at `{size}`" for size, record in newest.items()]
    return joined(shares) if shares else ""
