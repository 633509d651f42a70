"""Norms and other kernels that memory bounds: written out, fused, compiled."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from statistics import median
from typing import Any

from benchmarks.lib.kernel import DTYPES
from benchmarks.lib.row_kernels import norm_bytes
from benchmarks.records import Record
from cs336_systems.cost.machines import System, system_preset
from cs336_systems.host.console import format_seconds
from writeup.book import Book, Citation, facts, metric
from writeup.cells import NONE, joined, median_ms, over, pair_ratios, prediction, quoted, ratio, timing
from writeup.figures import Figure, draw, logarithmic
from writeup.model_pairs import original_seconds, published_pairs, table
from writeup.publications import ORIGINAL, Published
from writeup.tables import ON_GPU, Table, not_measured

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
ATTENTION = "python -m benchmarks.attention --grid course"
# Reads and writes of a tensor as large as x. Eager RMSNorm: square (read, write), mean (read), times 1 / rms (read,
# write), times the weight (read, write). Fused: read x, write y.
EAGER_TRIPS, FUSED_TRIPS = 7, 2
# Published tables: by the source's name for a norm, and by who published it.
TITLES = {"rmsnorm": "RMSNorm, eager", "layernorm": "LayerNorm", "rmsnorm triton": "RMSNorm, Triton"}
AUTHORS = {"2024": (ORIGINAL, "norms with triton"), "go-akshit": ("go-akshit", "norms")}
SECTIONS = {
    "2024, 2.2.4": (ORIGINAL, "norms, forward-backward"),
    "2024, 2.3.1": (ORIGINAL, "compiled norms, forward-backward"),
}
PARTIAL_ROWS = 2  # of a weight's gradient for each multiprocessor, as `benchmarks.lib.row_kernels` counts them
COURSE_ROWS = 50_000  # of the course's problems on norms
COLUMNS = (1024, 2048, 4096, 8192)
KERNELS = {
    "cross-entropy": "Head and loss",
    "swiglu": "SwiGLU's gate",
    "add-rmsnorm": "Addition and RMSNorm",
    "adamw": "AdamW's update",
}
SHAPE = ("tokens", "rows", "d_model", "columns", "vocab", "layers")


def content(book: Book) -> dict[str, Any]:
    """Tables of norms, compiled models and other kernels, measured and published; the values of its sentences."""
    whole = book.cite("norms", candidate=tuple(NORMS), dtype="fp32")
    norms, both = (whole.only({"pass": what}) for what in (FORWARD, BOTH))
    profiled = book.cite("profiling", wrapper="none", ranks=1, norm="rmsnorm", command=PROFILE).measured
    inorder = sorted(profiled, key=lambda each: datetime.fromisoformat(each.environment["date"]))
    newest = {record.config["size"]: record for record in inorder}
    course = {"grid": "course", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}
    attention = book.cite("attention", course, candidate=("eager", "compiled"), command=ATTENTION)
    shares = [f"{metric(record, 'share_RMSNorm'):.0%} at `{size}`" for size, record in newest.items()]
    return {
        "f": facts(lambda: spoken(book)),
        "alone": alone(book, norms),
        "both": alone(book, both),
        "picture": picture(norms) if norms.measured else None,
        "trips": f"{EAGER_TRIPS / FUSED_TRIPS:.2g}",
        "eager_trips": EAGER_TRIPS,
        "turns": table(book, "norm=layernorm", ("RMSNorm", "LayerNorm")),
        "share": joined(shares) if shares else "",
        "kernel": "" if whole.measured.only(candidate="ours") else not_measured(ON_GPU),
        "published": published(book, FORWARD, AUTHORS),
        "published_both": published(book, BOTH, SECTIONS),
        "compiled": table(book, "compile", ("eager", "compiled")),
        "compiled_published": original_table(book),
        "attention": attention_table(book, attention),
        "fused": largest(book, [book.cite("fused", kernel=kernel) for kernel in KERNELS]),
    }


def spoken(book: Book) -> dict[str, Any]:
    """The time of a norm over that of LayerNorm and of a copy, with pages kept; and with fresh pages."""
    norms = book.cite("norms", dtype="fp32", columns=4096, **{"pass": "forward"})
    fused_norm, eager, fast = (norms.need(candidate=name) for name in ("layernorm", "eager", "compiled"))
    earlier = [each for each in book.history("norms") if "pages_kept" not in each.environment]
    fresh = [each for each in earlier if each.config == fused_norm.config]
    return {
        "kept": bool(fused_norm.environment.get("pages_kept")),
        "eager": median(pair_ratios(eager, fused_norm)),
        "compiled": median(pair_ratios(fast, fused_norm)),
        "of_copy": fused_norm.metrics["copy_fraction_median"],
        "fresh_copy": fresh[-1].metrics["copy_fraction_median"] if fresh else 1.0,
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
        keys = {"candidate": PUBLISHED[name], "columns": columns} if known else {}
        mean, printed = (
            book.published.value(ORIGINAL, "norms", each, **keys) if keys else None for each in ("mean", "ratio")
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


def norm_floor(columns: int, what: str, system: System, rows: int = COURSE_ROWS) -> float:
    """The least seconds of a pass of a norm of (rows columns) float32 numbers on a GPU: the bytes that it reads and
    writes over the data sheet's bandwidth."""
    return norm_bytes(rows, columns, DTYPES["fp32"].itemsize, what, PARTIAL_ROWS * system.processors) / system.bandwidth


def floored(book: Book, found: Published | None, floor: float) -> str:
    """`0.796 ms (15%)`: a published time, with a mark if it is implausible, and the least time over it."""
    return f"{quoted(book, found, 'ms')} ({floor / found.value:.0%})" if found else NONE


def published(book: Book, what: str, tables: Mapping[str, tuple[str, str]]) -> Table:
    """Published times of a pass by columns, each with the share of the GPU's bandwidth that it means."""
    rows, system = [], system_preset("H100")
    for columns in COLUMNS:
        floor = norm_floor(columns, what, system)
        for who, where in tables.items():
            found = {
                title: floored(book, book.published.value(*where, candidate=name, columns=columns), floor)
                for name, title in TITLES.items()
            }
            row = {
                "<columns": f"{columns:,}",
                f"least on an {system.name}": format_seconds(floor),
                "<published in": who,
            }
            rows.append(row | found)
    note = f"Above 100% a time is impossible: at the full bandwidth of an {system.name} the bytes take longer."
    return Table(book, rows, notes=[note] if what == BOTH else [])


def original_table(book: Book) -> Table:
    """The original's models, eager and compiled, with what is predicted of the eager one on an H100."""
    rows = [
        {
            "<2024, one GPU": size, "<pass": what, "eager": quoted(book, eager, "ms"),
            "predicted (eager, an H100)": format_seconds(original_seconds(size, what)),
            "compiled": quoted(book, fast, "ms"), "eager / compiled": f"{eager.value / fast.value:.2f}",
        }
        for (size, what), (eager, fast) in published_pairs(book, "compile").items()
    ]  # fmt: skip
    return Table(book, rows)


def attention_table(book: Book, cited: Citation) -> Table:
    """Attention of 2025 and 2026, eager and compiled, by dim and sequence."""
    rows = []
    for record in sorted(cited.only(candidate="eager"), key=lambda r: (r.config["dim"], r.config["seq"])):
        where = {key: record.config[key] for key in ("dim", "seq", "pass")}
        other = cited.one(candidate="compiled", **where)
        both = other is not None and other.status == record.status == "ok"
        rows.append({
            "<batch x seq x dim": f"{record.config['batch']} x {where['seq']} x {where['dim']}", "<pass": where["pass"],
            "eager": timing(book, record), "compiled": timing(book, other),
            "predicted (of compiled)": prediction(other),
            "eager / compiled": over(pair_ratios(record, other)) if other and both else NONE,
        })  # fmt: skip
    return Table(book, rows, cited)


def shape(record: Record) -> str:
    """`512 tokens, 16032 vocab`: the sizes that the record has."""
    return ", ".join(f"{record.config[name]} {name}" for name in SHAPE if record.config.get(name))


def group(record: Record) -> str:
    """Records of one interleaved comparison."""
    return f"{shape(record)}, {record.config['pass']}, {record.config['dtype']}"


def largest(book: Book, citations: list[Citation]) -> Table:
    """Row for each kernel, at its last shape with every pass: plain torch, the others' time over it, and its bound."""
    rows, used = [], []
    for cited, name in zip(citations, KERNELS.values(), strict=True):
        for each in dict.fromkeys(record.config["pass"] for record in cited.measured):
            last = list(cited.measured.only({"pass": each}))[-1]
            same = {str(r.config["candidate"]): r for r in cited.measured if group(r) == group(last)}
            base, floor = same.get("torch") or same.get("eager"), same.get("matmuls") or same.get("copy")
            fast = same.get("compiled")
            if base and floor:
                used += [base, floor, *([fast] if fast else [])]
                rows.append({
                    "<kernel": name, "<shape": shape(last), "<pass": each, "written out": timing(book, base),
                    "over compiled": over(pair_ratios(base, fast)) if fast else NONE,
                    "over its bound": over(pair_ratios(base, floor)),
                })  # fmt: skip
    one = replace(citations[0], records=tuple(used)) if used else citations
    note = (
        "Ratios are of the time written out, in turn. Its bound: the matrix products alone or, without any, a copy of "
        "the same bytes."
    )
    return Table(book, rows, one, [note])
