"""LayerNorm, which PyTorch has fused, against RMSNorm written operator by operator: alone, and in the model."""

from dataclasses import replace
from typing import Any

from benchmarks.records import Record
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, median_ms, predicted_ms, prediction, quoted, timing
from writeup.figures import Figure, draw, logarithmic
from writeup.tables import Table
from writeup.words import apart, differ, faster, from_which, joined, span, times

ROD = "rod-2024"
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
# How often a tensor as large as x travels. Eager RMSNorm: square (read, write), mean (read), times 1 / rms (read,
# write), times the weight (read, write). Fused: read x, write y.
EAGER_TRIPS, FUSED_TRIPS = 7, 2


def content(book: Book) -> dict[str, Any]:
    """Both tables, the picture, and what the commentary is chosen from."""
    norms = book.cite("norms", candidate=tuple(NORMS), dtype="fp32", **{"pass": "forward"})
    models = {
        norm: unfused(
            book.cite("e2e", MODEL, norm=norm, command=f"python -m benchmarks.e2e --size small --norm {norm}")
        )
        for norm in ("rmsnorm", "layernorm")
    }
    profiled = book.cite("profiling", wrapper="none", ranks=1, norm="rmsnorm", command=PROFILE)
    return {
        "alone": alone(book, norms.only(candidate=("layernorm", "eager", "torch"))),
        "picture": picture(norms) if norms.measured else None,
        "which": which(norms),
        "ratios": ratios(norms),
        "torch_own": torch_own(norms),
        "trips": f"{EAGER_TRIPS / FUSED_TRIPS:.2g}",
        "eager_trips": EAGER_TRIPS,
        "rod": original_ratios(book),
        "model": model(book, models),
        "swapped": swapped(models),
        "share": norms_share(profiled),
        "explained": explained(norms),
        "rod_model": original_model(book),
    }


def unfused(cited: Citation) -> Citation:
    """Those whose norms and gates run in plain torch."""
    return replace(cited, records=tuple(r for r in cited if r.config.get("kernels", "torch") == "torch"))


def twin(record: Record, others: Citation) -> Record | None:
    """The record of the same size, pass and attention among others."""
    return others.one({key: record.config[key] for key in ("size", "mode", "attention")})


def by_columns(cited: Citation, candidate: str) -> dict[float, Record]:
    """The measured records of a candidate, by columns."""
    return {record.config["columns"]: record for record in cited.measured.only(candidate=candidate)}


def over(record: Record, base: Record | None) -> str:
    """A record's time over another's."""
    return f"{median_ms(record) / median_ms(base):.2f}" if base and record.status == "ok" else NONE


def alone(book: Book, cited: Citation) -> Table:
    """Each norm by columns, and the original's beside it."""
    base, rows = by_columns(cited, "layernorm"), []
    for record in sorted(cited, key=lambda each: int(each.config["columns"])):
        columns, name = record.config["columns"], record.config["candidate"]
        cells = [timing(book, record), prediction(record), over(record, base.get(columns))]
        theirs = [NONE, NONE]
        if name in PUBLISHED:
            keys = {"candidate": PUBLISHED[name], "columns": columns}
            mean, ratio = (book.published.value(ROD, "norms", column, **keys) for column in ("mean", "ratio"))
            theirs = [quoted(book, mean, "ms"), ratio.shown("x") if ratio else NONE]
        rows.append([f"{record.config['rows']} x {columns}", NORMS[name], *cells, *theirs])
    heads = ("<rows x columns", "<norm", "median (quartiles)", "predicted (of measured)", "over LayerNorm")
    note = (
        "Predicted: the least bytes, x read and y written once, over the rate of a large copy. Rød's rows are 50,000."
    )
    return Table(book, (*heads, "Rød, one GPU", "over LayerNorm"), rows, cited, notes=[note] if rows else [])


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
    """Which of the two is faster, from which width on."""
    fused, eager = by_columns(cited, "layernorm"), by_columns(cited, "eager")
    return from_which("LayerNorm", fused, "eager RMSNorm", eager, "{:,g} columns") if fused and eager else ""


def ratios(cited: Citation) -> str:
    """Eager RMSNorm over LayerNorm, least to most."""
    fused, eager = by_columns(cited, "layernorm"), by_columns(cited, "eager")
    found = [median_ms(eager[size]) / median_ms(fused[size]) for size in fused.keys() & eager.keys()]
    return span(found) if found else ""


def torch_own(cited: Citation) -> str:
    """How torch's own RMSNorm stands to the one written out, and what that says: a sentence."""
    own, eager = by_columns(cited, "torch"), by_columns(cited, "eager")
    sizes = own.keys() & eager.keys()
    if not sizes:
        return ""
    said = from_which("torch's own `rms_norm`", own, "the one written out", eager, "{:,g} columns")
    if any(median_ms(own[size]) < median_ms(eager[size]) and differ(own[size], eager[size]) for size in sizes):
        return f"{said}."
    return f"{said}: being one call does not make it one pass over memory."


def original_ratios(book: Book) -> str:
    """The original's ratios, least to most."""
    rows = book.published.table(ROD, "norms").rows
    found = sorted((row.values["ratio"] for row in rows if row.keys["candidate"] == "rmsnorm"), key=lambda x: x.value)
    return f"{found[0].shown('x')} to {found[-1].shown('x')}"


def model(book: Book, models: dict[str, Citation]) -> Table:
    """The model with either norm, by size and pass."""
    rows = []
    for record in models["layernorm"]:
        size, mode = record.config["size"], record.config["mode"]
        plain = twin(record, models["rmsnorm"])
        cells = [timing(book, plain), timing(book, record), prediction(record)]
        share = over(record, plain if plain and plain.status == "ok" else None)
        rows.append([size, mode, *cells, share, original(book, size, mode)])
    heads = ("<size", "<pass", "RMSNorm", "LayerNorm", "predicted (of LayerNorm)", "ratio", "Rød: LayerNorm (ratio)")
    used = models["rmsnorm"].only(size=models["layernorm"].values("size")) if rows else models["rmsnorm"]
    notes = ["Ratio: LayerNorm over RMSNorm."] if rows else []
    return Table(book, heads, rows, [used, models["layernorm"]], notes=notes)


def original(book: Book, size: str, mode: str) -> str:
    """The original's time with LayerNorm, and its share of the one with RMSNorm."""
    keys = {"size": size, "pass": mode}
    plain = book.published.value(ROD, "benchmarking, 1 warm-up step", **keys)
    swapped_in = book.published.value(ROD, "model with layernorm", **keys)
    if not plain or not swapped_in:
        return NONE
    return f"{swapped_in.shown('ms')} ms ({swapped_in.value / plain.value:.2f})"


def swapped(models: dict[str, Citation]) -> list[str]:
    """For each size, what LayerNorm does to a forward and backward pass."""
    said = []
    for record in models["layernorm"].measured.only(mode="forward-backward"):
        size = record.config["size"]
        plain = twin(record, models["rmsnorm"].measured)
        if plain:
            clause = faster("the model with LayerNorm", record, "the one with RMSNorm", plain)
            said.append(f"{size}: {clause}. {apart(record, plain)}".strip())
    return said


def norms_share(profiled: Citation) -> str:
    """What part of a step norms take at all, by the profile."""
    shares = [f"{metric(record, 'share_RMSNorm'):.0%} at {record.config['size']}" for record in profiled.measured]
    return joined(shares) if shares else ""


def explained(cited: Citation) -> str:
    """How much of the fused norm's time its bytes explain, and what else it waits for, where that is known."""
    found = [(predicted_ms(each) or 0.0) / median_ms(each) for each in by_columns(cited, "layernorm").values()]
    if not found:
        return ""
    share = f"the bytes explain {span(found, '{:.0%}')} of LayerNorm's time here"
    if max(found) > 0.5 or any(each.environment.get("device_type") != "cpu" for each in cited.measured):
        return share
    return f"{share}; on a CPU the system also hands out a result's memory page by page, which they leave out"


def original_model(book: Book) -> str:
    """In how many cells of the original the model with LayerNorm is faster, and by how much at most."""
    table = book.published.table(ROD, "model with layernorm")
    found = []
    for row in table.rows:
        plain = book.published.value(ROD, "benchmarking, 1 warm-up step", "", **row.keys)
        if plain:
            found.append((plain.value / row.values["mean"].value, row.keys))
    wins = sorted(found, key=lambda each: each[0])
    most, where = wins[-1]
    less = sum(factor > 1 for factor, _ in found)
    at = joined([str(where["size"]), str(where["pass"])], last="in")
    return f"faster in {less} of {len(found)} cells, at most {times(most)} as fast ({at})"
