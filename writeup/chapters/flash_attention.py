"""Attention: the cost of keeping the scores, and FlashAttention-2, which recomputes them."""

from dataclasses import replace
from statistics import median as middle
from typing import Any

from benchmarks.attention import COURSE_SEQUENCES, DIMS, LEADERBOARD, AttentionTask, flops, peak_bytes
from benchmarks.leaderboard import BATCH, FULL
from benchmarks.records import Record
from cs336_systems.cost import forward_flops
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import ModelConfig
from writeup.book import Book, Citation, facts
from writeup.cells import NONE, joined, marks, median_ms, memory, pair_ratios, prediction, quoted, timing
from writeup.errors import Unmeasured
from writeup.figures import Figure, draw, logarithmic
from writeup.publications import Key, Published
from writeup.schematics import tiles
from writeup.tables import ON_GPU, Table

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward-backward"
NAMES = {
    "ours": "ours, Triton", "tiled": "ours, tiles in torch", "eager": "eager", "compiled": "compiled",
    "sdpa-flash": "torch's flash", "sdpa-efficient": "torch's memory-efficient", "sdpa-cudnn": "cuDNN's",
    "sdpa-math": "torch's math",
}  # fmt: skip
COURSE = {"grid": "course", "candidate": "eager", "dtype": "fp32", "batch": 8, "causal": False, "keeps": True}
WIDTH = {"fp32": 4, "bf16": 2}
QUADRATIC = ("eager", "sdpa-math")  # they keep the softmax for backward
GRID = [(dim, seq) for dim in DIMS for seq in COURSE_SEQUENCES]  # of the course: 4 widths, 5 lengths
GPU = "H100"  # with whose memory the course's grid is compared
PASSES = 3  # of products with weights, in forward passes: one, and a backward of two
ATTENTION_PASSES = 3.5  # of attention: two products forward, five backward, as FlashAttention recomputes the scores


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


def kept_bytes(config: dict[str, Any]) -> int | None:
    """Bytes that forward keeps for backward: q, k, v, and the softmax, or the output and one number per query.

    None where the compiler decides, and for half precision with the softmax, which may be kept in two dtypes.
    """
    rows, width = config["batch"] * config["seq"], WIDTH[config["dtype"]]
    if config["candidate"] == "compiled" or (config["candidate"] in QUADRATIC and config["dtype"] != "fp32"):
        return None
    if config["candidate"] in QUADRATIC:
        return int(rows * width * (config["seq"] + 3 * config["dim"]))
    return int(rows * (4 * config["dim"] * width + 4))


def kept(book: Book, record: Record | None) -> str:
    """Bytes kept for backward, and the prediction's share of them."""
    shown = memory(book, record, "before_backward_bytes") if record else NONE
    predicted = kept_bytes(record.config) if record else None
    found = record.metrics.get("before_backward_bytes") if record else None
    return f"{shown} ({predicted / found:.2f})" if predicted and found else shown


def sweep(book: Book, cited: Citation) -> Table:
    """The course's sweep of eager attention, every cell: what was not measured is predicted."""
    rows = []
    for dim, seq in GRID if cited else ():
        row = {"<dim": f"{dim}", "tokens": f"{seq:,}"}
        found = {what: cited.one(dim=dim, seq=seq, **{"pass": what}) for what in (FORWARD, BACKWARD)}
        for what, record in found.items():
            said = prediction(record) if found[FORWARD] else expected(cited, dim, seq, what)
            row |= {what: timing(book, record), f"{what}, predicted": said}
        need = kept_bytes({"candidate": "eager", "batch": 8, "seq": seq, "dim": dim, "dtype": "fp32"})
        first = found[FORWARD]
        held = kept(book, first) if first else f"predicted {format_bytes(need or 0)}"
        rows.append(row | {"kept for backward (predicted / measured)": held})
    return Table(book, rows, cited)


def expected(cited: Citation, dim: int, seq: int, what: str) -> str:
    """The predicted time of a cell that was not measured, at the rate that the other cells were predicted with."""
    rates = [rate for record in cited if (rate := record.predicted.get("peak_flops_per_s"))]
    work = flops(AttentionTask("course", 8, seq, dim, "fp32", causal=False), what)
    return format_seconds(work / max(rates)) if rates else NONE


def limits() -> str:
    """Memory of the course's longest sequence, and the length from which a GPU cannot hold it."""
    system, dim = system_preset(GPU), 64
    longest = COURSE_SEQUENCES[-1]
    task = AttentionTask("course", 8, longest, dim, "fp32", causal=False)
    need = kept_bytes({"candidate": "eager", "batch": 8, "seq": longest, "dim": dim, "dtype": "fp32"})
    first = longest
    while peak_bytes("eager", AttentionTask("course", 8, first, dim, "fp32", causal=False)) <= system.memory:
        first *= 2
    linear = kept_bytes({"candidate": "tiled", "batch": 8, "seq": first, "dim": dim, "dtype": "fp32"})
    most = peak_bytes("eager", AttentionTask("course", 8, first, dim, "fp32", causal=False))
    return (
        f"At the course's longest sequence, {longest:,} tokens of width {dim} and batch 8, eager attention keeps "
        f"{format_bytes(need or 0)} and needs {format_bytes(peak_bytes('eager', task))} at its peak. Doubling "
        f"the length further, the first that does not fit in an {system.name} with {format_bytes(system.memory)} is "
        f"{first:,}: "
        f"{format_bytes(most)}. FlashAttention would keep {format_bytes(linear or 0)}."
    )


def attention_flops(keys: dict[str, Key]) -> float:
    """FLOPs of a published pass of attention, by its keys `batch`, `seq`, `dim`, `causal` and `pass`."""
    task = AttentionTask(
        "published", int(keys["batch"]), int(keys["seq"]), int(keys["dim"]), "bf16", bool(keys["causal"])
    )
    return flops(task, FORWARD if keys["pass"] == "forward" else BOTH)


def peak_share(found: Published, work: float, system: str, processors: int = 1) -> float:
    """The share of the 16-bit peak of a number of GPUs that `work` FLOPs in a published time are."""
    return work / found.value / (processors * system_preset(system).matmul_flops)


def step_flops(config: ModelConfig, batch: int, seq: int) -> float:
    """FLOPs of a training step that count: 6 for each parameter of a matrix and token, and 7 batch layers seq^2 width
    for causal attention, as the course chapter of cost counts them (`leaderboard-step`)."""
    parts = forward_flops(config, batch, seq)
    scores = parts["scores"]
    hidden = 0.5 if config.causal else 1.0
    return PASSES * (sum(parts.values()) - scores) + ATTENTION_PASSES * hidden * scores


def students(book: Book) -> Table:
    """Times of FlashAttention-2 that students published, with the share of their GPU's peak."""
    rows = []
    for (source, name), table in book.published.tables.items():
        if name != "flash attention" or table.problem != "flash_benchmarking":
            continue
        system = table.system or table.source.system
        for row in table.rows:
            found, keys = row.values["mean"], {**table.fixed, **row.keys}
            work = attention_flops(keys)
            shape = f"{keys['batch']} x {keys['seq']:,} x {keys['dim']} {keys['dtype']}"
            rows.append({
                "<who": markdown_text(source), "<hardware": markdown_text(table.hardware or table.source.hardware),
                "<kernel": str(keys["candidate"]), "<pass": str(keys["pass"]),
                "<heads x tokens x width": shape + ", causal" * bool(keys["causal"]),
                "published": quoted(book, found, "ms"),
                "least": format_seconds(work / system_preset(system).matmul_flops) if system else NONE,
                "of peak": f"{peak_share(found, work, system):.0%}" if system and keys["dtype"] == "bf16" else NONE,
            })  # fmt: skip
    return Table(book, rows)


def boards(book: Book) -> Table:
    """The two leaderboards, with the FLOPs that count and the share of the peak."""
    step = step_flops(FULL, BATCH, FULL.context_length)
    tasks = {
        "2025": ("leaderboard-2025", "flash attention", flops(LEADERBOARD[0], BOTH), 1),
        "2026": ("leaderboard-2026", "step", step, 2),
    }
    rows, notes = [], []
    for year, (source, name, work, processors) in tasks.items():
        table = book.published.table(source, name)
        system = table.system or table.source.system
        floor = work / (processors * system_preset(system).matmul_flops)
        notes.append(f"{year}: {markdown_text(table.note)}; on {markdown_text(table.hardware)}.")
        for row in table.rows:
            found = row.values["time"]
            rows.append({
                "<board": year, "<place": str(row.keys["place"]), "published": quoted(book, found, "ms"),
                "least": format_seconds(floor), "rate": f"{format_count(work / found.value)}FLOP/s",
                "of peak": f"{peak_share(found, work, system, processors):.0%}",
            })  # fmt: skip
    return Table(book, rows, notes=notes)
