"""Attention: the cost of keeping the scores, and FlashAttention-2, which recomputes them."""

from dataclasses import replace
from statistics import median as middle
from typing import Any

from benchmarks.records import Record
from writeup.book import Book, Citation, facts
from writeup.cells import marks, median_ms, prediction, timing
from writeup.chapters.flash_published import boards, students
from writeup.chapters.flash_sweep import BACKWARD, FORWARD, kept, kept_bytes, limits, sweep
from writeup.errors import Unmeasured
from writeup.figures import Figure, draw, logarithmic
from writeup.schematics import tiles
from writeup.tables import ON_GPU, Table
from writeup.words import joined, pair_ratios

BOTH = "forward-backward"
NAMES = {
    "ours": "ours, Triton", "tiled": "ours, tiles in torch", "eager": "eager", "compiled": "compiled",
    "sdpa-flash": "torch's flash", "sdpa-efficient": "torch's memory-efficient", "sdpa-cudnn": "cuDNN's",
    "sdpa-math": "torch's math",
}  # fmt: skip
COURSE = {"grid": "course", "candidate": "eager", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}


def content(book: Book) -> dict[str, Any]:
    """Both sweeps, the pictures, what others published, and the clauses of the commentary."""
    course = book.cite("attention", COURSE, command="python -m benchmarks.attention --grid course")
    run = "python -m benchmarks.attention --grid flash"
    flash = book.cite("attention", grid="flash", batch=1, causal=True, keeps=True, command=run)
    ours = book.cite("attention", grid="flash", candidate="ours", keeps=True, command=ON_GPU)
    shown = narrowed(flash)
    return {
        "course": sweep(book, course),
        "limits": limits(),
        "flash": kernels(book, shown),
        "ours": "" if ours.measured else kernels(book, ours),  # which are in the other table where there are any
        "picture": picture(shown) if shown.measured else None,
        "f": facts(lambda: spoken(shown)),
        "tiles": tiles(),
        "students": students(book),
        "boards": boards(book),
    }


def narrowed(cited: Citation) -> Citation:
    """Select the part of a large grid that fits a page: heads of 64, in bfloat16 if it was measured on a GPU."""
    dims = cited.values("dim") if cited else []
    chosen = cited.only(dim=64 if 64 in dims else dims[0]) if dims else cited
    on_gpu = any(record.environment.get("device_type") == "cuda" for record in chosen)
    wanted = "bf16" if on_gpu else "fp32"
    return chosen.only(dtype=wanted) if chosen and wanted in chosen.values("dtype") else chosen


def kernels(book: Book, cited: Citation) -> Table:
    """Each kernel by sequence."""
    used = cited.only(**{"pass": FORWARD})
    left = [record.config["candidate"] for record in used if record.status == "unsupported"]
    rows = []
    for record in sorted(used, key=lambda r: int(r.config["seq"])):
        if record.status != "unsupported":
            same = {key: record.config[key] for key in ("seq", "candidate")}
            back, both = (cited.one(same, **{"pass": what}) for what in (BACKWARD, BOTH))
            rows.append({
                "<tokens": f"{record.config['seq']:,}", "<kernel": NAMES.get(record.config["candidate"], "another"),
                FORWARD: median(book, record), BACKWARD: median(book, back), "both": timing(book, both),
                "lower bound (of both)": prediction(both), "kept (predicted / measured)": kept(book, record),
            })  # fmt: skip
    names = joined(dict.fromkeys(NAMES.get(name, "another") for name in left)) if left else ""
    supported = replace(cited, records=tuple(record for record in cited if record.status != "unsupported"))
    return Table(book, rows, supported, [f"Not supported on this device: {names}."] if left else [])


def median(book: Book, record: Record | None) -> str:
    """The median alone, with its marks."""
    return timing(book, record).split(" (")[0] + (marks(book, record) if record and record.status == "ok" else "")


def by_tokens(cited: Citation, candidate: str) -> dict[float, Record]:
    """Forward with backward of a kernel, by tokens."""
    return {r.config["seq"]: r for r in cited.measured.only(candidate=candidate, **{"pass": BOTH})}


def picture(cited: Citation) -> Figure:
    """Time and memory over the sequence."""
    sizes = sorted(cited.measured.values("seq"))
    longer = [*sizes, *(sizes[-1] * 2**power for power in (1, 2))]

    def into(axes: Any) -> None:
        left, right = axes
        for place, name in enumerate(cited.measured.values("candidate")):
            found = sorted(by_tokens(cited, name).items())
            left.plot(
                [s for s, _ in found], [median_ms(r) for _, r in found], "o-", color=f"C{place}", label=NAMES.get(name)
            )
            held = [(s, r.metrics.get("before_backward_bytes")) for s, r in found]
            known = [(s, bytes_ / 2**20) for s, bytes_ in held if bytes_]
            right.plot(
                [s for s, _ in known], [mib for _, mib in known], "os^dv<>*"[place % 8], color=f"C{place}", alpha=0.7
            )
        config = cited.measured.records[0].config
        for name, line in (("eager", "k-"), ("tiled", "k--")):
            curve = [kept_bytes({**config, "candidate": name, "dtype": "fp32", "seq": seq}) or 0 for seq in longer]
            title = "predicted, softmax kept" if name == "eager" else "predicted, FlashAttention"
            right.plot(longer, [each / 2**20 for each in curve], line, linewidth=1, label=title)
        logarithmic(left, sizes, "tokens", "ms, forward and backward")
        logarithmic(right, longer[::2], "tokens", "MiB kept for backward")
        left.legend()
        right.legend()

    return draw(
        "flash-attention", "Left, the time of each kernel. Right, what it keeps for backward: measured, in the same "
        "colours, and predicted for float32.",
        "Time over tokens and memory over tokens, for kernels of attention", into, columns=2, width=9.0, height=3.6,
    )  # fmt: skip


def spoken(cited: Citation) -> dict[str, Any]:
    """Growth of what is kept from the shortest to the longest length, and times over eager's at the longest."""
    found = {name: by_tokens(cited, name) for name in ("eager", "sdpa-flash", "tiled")}
    shared = sorted(set.intersection(*(set(each) for each in found.values())))
    if len(shared) < 2:
        raise Unmeasured(cited.command)
    short, long = shared[0], shared[-1]

    def growth(name: str) -> float:
        first, last = (float(found[name][size].metrics["before_backward_bytes"]) for size in (short, long))
        return last / first

    over_eager = {name: middle(pair_ratios(each[long], found["eager"][long])) for name, each in found.items()}
    return {
        "short": f"{short:,}", "long": f"{long:,}", "tokens": long / short, "eager": growth("eager"),
        "flash": growth("sdpa-flash"), "tiled": over_eager["tiled"], "fast": over_eager["sdpa-flash"],
    }  # fmt: skip
