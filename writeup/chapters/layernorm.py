"""LayerNorm, which PyTorch has fused, against RMSNorm written operator by operator: alone, and in the model."""

from dataclasses import replace
from datetime import datetime
from statistics import median
from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation, metric
from writeup.ceilings import original_seconds
from writeup.cells import NONE, median_ms, over, prediction, quoted, ratio, timing
from writeup.figures import Figure, draw, logarithmic
from writeup.model_pairs import cite, in_turn, size_and_pass, table
from writeup.publications import ORIGINAL
from writeup.tables import Table
from writeup.words import from_which, joined, pair_ratios, span

ROD = ORIGINAL
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
MODES = ("forward", "backward", "forward-backward")
MODEL = {"year": 2024, "precision": "fp32", "compile": False, "recompute": "none", "warmup": 2, "mode": MODES}
MODEL |= {"batch_size": 16, "context": 128}
PROFILE = "python -m benchmarks.profiling_run --size small --attention naive"
# Reads and writes of a tensor as large as x. Eager RMSNorm: square (read, write), mean (read), times 1 / rms (read,
# write), times the weight (read, write). Fused: read x, write y.
EAGER_TRIPS, FUSED_TRIPS = 7, 2


def content(book: Book) -> dict[str, Any]:
    """Both tables, the picture, and the values of the commentary."""
    norms = book.cite("norms", candidate=tuple(NORMS), dtype="fp32", **{"pass": "forward"})
    compared = cite(book, "norm=layernorm")
    pairs = in_turn(compared, "norm=layernorm")
    profiled = book.cite("profiling", wrapper="none", ranks=1, norm="rmsnorm", command=PROFILE)
    return {
        "alone": alone(book, norms),
        "picture": picture(norms) if norms.measured else None,
        "trips": f"{EAGER_TRIPS / FUSED_TRIPS:.2g}",
        "eager_trips": EAGER_TRIPS,
        "turns": table(book, compared, pairs, ("RMSNorm", "LayerNorm"), original_shares(book)),
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
    """Each norm by columns, and the original's beside it."""
    cited = norms.only(candidate=("layernorm", "eager", "torch"))
    base, copies, rows = by_columns(cited, "layernorm"), by_columns(norms, "copy"), []
    for record in sorted(cited, key=lambda each: int(each.config["columns"])):
        columns, name = record.config["columns"], record.config["candidate"]
        first = base.get(columns)
        share = over(pair_ratios(record, first)) if first and record.status == "ok" else NONE
        cells = [timing(book, record), least(record, copies.get(columns)), "1" if record is first else share]
        theirs = [NONE, NONE]
        if name in PUBLISHED:
            keys = {"candidate": PUBLISHED[name], "columns": columns}
            mean, printed = (book.published.value(ROD, "norms", column, **keys) for column in ("mean", "ratio"))
            theirs = [quoted(book, mean, "ms"), printed.shown("x") if printed else NONE]
        rows.append([f"{record.config['rows']} x {columns}", NORMS[name], *cells, *theirs])
    heads = ("<rows x columns", "<norm", "median", "least: a copy in turn (of measured)", "over LayerNorm")
    note = "A norm moves at least as many bytes as a copy of x to y. Ratios are in turn. 2024 used 50,000 rows."
    return Table(book, (*heads, "2024, one GPU", "over LayerNorm"), rows, cited, notes=[note] if rows else [])


def rates(cited: Citation) -> str:
    """The machine's fastest copy beside the one that took turns, where they are apart: a sentence."""
    found = [r for r in cited.measured.only(candidate="copy") if "bandwidth_bytes_per_s" in r.predicted]
    if not found:
        return ""
    fastest, turns = (
        median(each) / 1e9
        for each in zip(*((r.predicted["bandwidth_bytes_per_s"], r.metrics["bytes_per_s"]) for r in found), strict=True)
    )
    if fastest < 1.2 * turns:
        return ""
    return (
        f"The copy that took turns moves {turns:.0f} GB/s, the fastest of many copies in a row {fastest:.0f} GB/s. The "
        "first is a median and begins each time after the norms have filled the caches with other data, as a norm "
        "does; so it is the ceiling here, and the second that of the models' predictions."
    )


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


def which(cited: Citation) -> str:
    """State the faster of the two, and from which width on."""
    fused, eager = by_columns(cited, "layernorm"), by_columns(cited, "eager")
    return from_which("LayerNorm", fused, "eager RMSNorm", eager, "{:,g} columns") if fused and eager else ""


def ratios(cited: Citation) -> str:
    """Eager RMSNorm over LayerNorm, least to most."""
    fused, eager = by_columns(cited, "layernorm"), by_columns(cited, "eager")
    found = [median(pair_ratios(eager[size], fused[size])) for size in fused.keys() & eager.keys()]
    return span(found) if found else ""


def model(book: Book, models: dict[str, Citation], together: list[tuple[Record, Record]]) -> Table:
    """Every pass of the model with either norm, where both were measured within half an hour."""
    rows = [
        [*size_and_pass(swap), timing(book, plain), prediction(plain), timing(book, swap), prediction(swap)]
        for plain, swap in together
    ]
    heads = ("<size", "<pass", "RMSNorm", "predicted (of measured)", "LayerNorm", "predicted (of measured)")
    used = [
        replace(models[norm], records=tuple(pair[place] for pair in together))
        for place, norm in enumerate(("rmsnorm", "layernorm"))
    ]
    return Table(book, heads, rows, used, notes=["Each model was measured alone; see above for which is faster."])


def original_shares(book: Book) -> dict[tuple[str, str], str]:
    """The original's time with RMSNorm over the one with LayerNorm, by size and pass."""
    found = {}
    for row in book.published.table(ROD, "model with layernorm").rows:
        plain = book.published.value(ROD, "benchmarking, 1 warm-up step", "", **row.keys)
        if plain:
            found[str(row.keys["size"]), str(row.keys["pass"])] = f"{plain.value / row.values['mean'].value:.2f}"
    return found


def original_table(book: Book) -> Table:
    """The original's model with LayerNorm by size: the time, and RMSNorm's over it, of each pass; with predictions."""
    found, shares = book.published.table(ROD, "model with layernorm"), original_shares(book)
    rows = []
    for size in dict.fromkeys(str(row.keys["size"]) for row in found.rows):
        cells = []
        for what in MODES:
            wanted = format_seconds(original_seconds(size, what, norm="layernorm"))
            published = quoted(book, found.value(size=size, pass_=what), "ms")
            cells.append(f"{published} ({wanted}; {shares.get((size, what), NONE)})")
        rows.append([size, *cells])
    note = "In brackets: predicted for an H100; the original's time with RMSNorm over it."
    return Table(book, ("<2024, one GPU: LayerNorm", *MODES), rows, notes=[note])


def norms_share(profiled: Citation) -> str:
    """Share of a step that norms take, by the newest profile of each size."""
    inorder = sorted(profiled.measured, key=lambda each: datetime.fromisoformat(str(each.environment["date"])))
    newest = {record.config["size"]: record for record in inorder}
    shares = [f"{metric(record, 'share_RMSNorm'):.0%} at `{size}`" for size, record in newest.items()]
    return joined(shares) if shares else ""
