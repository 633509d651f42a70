"""Data parallelism: when gradients are reduced, how much of it backward hides, and buckets."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text, plot_text
from writeup.book import Book, Citation, facts, metric, sections
from writeup.cells import NONE, beside, in_turn, joined, median_ms, predicted_ms, prediction, quartiles, ratio, timing
from writeup.chapters import buckets
from writeup.errors import Unmeasured
from writeup.figures import COLOURS, Figure, draw
from writeup.profiles import profile_picture
from writeup.publications import ORIGINAL
from writeup.rank_runs import ALONE, DDP, THROTTLED, link_title, runs_of, title
from writeup.schematics import wrappers as wrappers_picture
from writeup.tables import Table, missing

RUNGS = ("naive", "flat", "overlapped")
WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "torch-ddp")
STUDENTS = ("brandon-snider", "damek", "enzo-ding")
TRACE = "python -m benchmarks.profiling_run --nproc 2 --wrapper"
SHARE = "communication share"


def content(book: Book) -> dict[str, Any]:
    """The steps over each link, traces with their overlap, published figures, buckets, and what its sentences quote."""
    plain = book.cite("ddp", link="", command=DDP)
    slow = book.cite("ddp", link=bool, command=THROTTLED)
    traced = book.cite("profiling", ranks=lambda n: n > 1, wrapper=WRAPPERS, command=f"{TRACE} naive")
    links = [runs_of(plain), runs_of(slow)]
    runs = [run for found in links for run in found]
    return {
        "f": facts(lambda: spoken(book)),
        "orders": wrappers_picture(),
        "steps": [(title(run), steps(book, run)) for run in runs],
        "missing": missing([plain, slow]),
        "picture": picture([found[0] for found in links if found]) if runs else None,
        "overlaps": overlaps(book, traced),
        "traces": traces(book, traced),
        "published": published(book),
        "students": students(book),
        "commands": [DDP, THROTTLED, f"{TRACE} naive"],
    } | sections(book, buckets)


def spoken(book: Book) -> dict[str, Any]:
    """Overlap by the traces of `overlapped`, and what steps expose: of a small model over gloo and over shared memory,
    and of the course's `small` over shared memory and between two nodes."""
    traced = book.cite("profiling", ranks=2, wrapper="overlapped").need()
    steps = book.cite("ddp", d_model=512, context=32, link="")
    own, slow = (book.cite("ddp", size="small", **where) for where in ({"link": "", "backend": "shm"}, {"link": bool}))
    sized = [each.metrics for each in own.measured if "communication_ms" in each.metrics]
    alone, naive = (slow.need(candidate=name) for name in (ALONE, "naive"))
    return {
        "gloo": exposed(steps.only(backend="gloo")), "shm": exposed(steps.only(backend="shm")), "slow": exposed(slow),
        "least": [min(found, key=found.__getitem__) for found in (exposed(own), exposed(slow))],
        "overlap": min(traced.metrics["overlap"]), "most": max(traced.metrics["overlap"]),
        "alone": steps.need(backend="gloo", candidate="overlapped").metrics["communication_ms"],
        "longer": naive.metrics["communication_ms"] / median_ms(alone),
        "share": max(each["communication_share"] for each in sized),
        "times": min(each["exposed_ms"] / each["communication_ms"] for each in sized),
    }  # fmt: skip


def exposed(cited: Citation) -> dict[str, float]:
    """Milliseconds of communication that each of our wrappers exposes."""
    if not (found := {each.config["candidate"]: each.metrics for each in cited.measured}):
        raise Unmeasured(cited.command)
    return {name: each["exposed_ms"] for name, each in found.items() if "communication_ms" in each}


def steps(book: Book, run: Citation) -> Table:
    """Every candidate's step, its communication alone, and what of it shows."""
    rows = []
    for record in run:
        found = record.metrics
        apart = "communication_ms" in found
        alone = (found["communication_ms"] / 1e3, found["communication_share"]) if apart else None
        rows.append({
            "<wrapper": markdown_text(str(record.config["candidate"])), "step": timing(book, record),
            "predicted (of measured)": prediction(record), "collectives": str(found["collectives"]) if apart else NONE,
            "alone (of step)": f"{format_seconds(alone[0])} ({alone[1]:.0%})" if alone else NONE,
            "exposed": format_seconds(found["exposed_ms"] / 1e3) if "exposed_ms" in found else NONE,
            "exposed, predicted": expected_exposed(run, record), "over torch DDP": ratio(record),
        })  # fmt: skip
    return Table(book, rows, run)


def expected_exposed(run: Citation, record: Record) -> str:
    """Predicted communication that backward does not hide."""
    alone, mine = run.one(candidate=ALONE), predicted_ms(record)
    base = predicted_ms(alone) if alone else None
    if base is None or mine is None or record is alone:
        return NONE
    return format_seconds((mine - base) / 1e3)


def picture(runs: list[Citation]) -> Figure:
    """Steps as bars: what a step without communication takes, and what is exposed on top of it."""

    def into(axes: Any) -> None:
        for place, run in zip(axes, runs, strict=True):
            base = run.one(candidate=ALONE)
            shown = [record for record in run if record is not base]
            names = [plot_text(str(record.config["candidate"])) for record in shown]
            exposed = [metric(record, "exposed_ms") for record in shown]
            spread = [whiskers(record, base) for record in shown]
            place.barh(names, [median_ms(base) if base else 0.0] * len(shown), color=COLOURS[7], label="computing")
            left = median_ms(base) if base else 0.0
            place.barh(names, exposed, left=left, color=COLOURS[1], label="exposed communication",
                       xerr=[*zip(*spread, strict=True)], ecolor="0.4", capsize=2)  # fmt: skip
            place.plot([predicted_ms(r) for r in shown], names, "k|", markersize=12, label="predicted")
            config = run.records[0].config
            width = f"width {config['d_model']}, {config['backend']}"
            place.set_title(plot_text(f"{width},\n{link_title(run.records[0])}"), fontsize=9)
            place.set_xlabel("milliseconds")
            place.invert_yaxis()
            place.grid(axis="y", visible=False)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return draw(
        "ddp-steps",
        "A step without communication, and what each wrapper adds, with its quartiles; a stroke is the prediction.",
        "Bars of training steps, split into computing and exposed communication, for each data-parallel wrapper",
        into, columns=len(runs), height=3.6,
    )  # fmt: skip


def whiskers(record: Record, base: Record | None) -> tuple[float, float]:
    """Distances of the quartiles of the exposed time from its median, turn by turn; 0 without turns."""
    if base is None or not in_turn(record, base):
        return 0.0, 0.0
    low, high = quartiles([with_it - alone for with_it, alone in zip(record.samples_ms, base.samples_ms, strict=True)])
    exposed = float(metric(record, "exposed_ms"))
    return max(0.0, exposed - low), max(0.0, high - exposed)


def overlaps(book: Book, traced: Citation) -> Table:
    """Share of communication that computing hides, by traced wrapper and rank."""
    theirs, rows = beside(book, ORIGINAL, "overlap", "%"), []
    for record in ordered(traced):
        wrapper, said = record.config["wrapper"], record.predicted
        spent, shown = said.get("communication_ms"), said.get("exposed_ms")
        quoted = [theirs.cell(candidate=wrapper, rank=rank) for rank in range(2)] if wrapper in RUNGS else []
        sent = ", ".join(format_seconds(each / 1e3) for each in metric(record, "communication_ms"))
        rows.append({
            "<wrapper": markdown_text(str(wrapper)),
            "overlap, by rank": ", ".join(f"{share:.1%}" for share in metric(record, "overlap")),
            "predicted": f"{1 - shown / spent:.0%}" if spent and shown is not None else NONE,
            "communication, by rank": sent, "2024, by rank": ", ".join(each for each in quoted if each != NONE) or NONE,
        })  # fmt: skip
    return Table(book, rows, traced)


def ordered(traced: Citation) -> list[Record]:
    """Sort traces from the plainest wrapper on."""
    return sorted(traced.measured, key=lambda record: WRAPPERS.index(record.config["wrapper"]))


def traces(book: Book, traced: Citation) -> list[Figure]:
    """The timelines of this project's wrappers, as far as the profiles left them."""
    found = []
    for record in ordered(traced):
        wrapper = record.config["wrapper"]
        share = joined(f"{each:.0%}" for each in metric(record, "overlap"))
        caption = f"`{wrapper}`: {share} of the communication overlaps computing, by rank, over all steps profiled."
        alt = f"Timeline of a training step under the {wrapper} wrapper: computing and collectives of each rank"
        picture = profile_picture(book, record, "timeline", caption, alt) if wrapper != "torch-ddp" else None
        found += [picture] if picture else []
    return found


def published(book: Book) -> Table:
    """The original's tables of three problems side by side."""
    names = {"naive": "naive", "flat": "flat", "flat, again": "flat again", "overlapped": "overlapped"}
    tables = {head: beside(book, ORIGINAL, name, "ms") for head, name in names.items()}
    found = sorted(tables["naive"].table.rows, key=lambda row: int(row.keys["nodes"]))
    rows = [
        {"<size": str(row.keys["size"]), "nodes": str(row.keys["nodes"])}
        | {head: table.cell(**row.keys) for head, table in tables.items()}
        for row in found
    ]
    return Table(book, rows)


def students(book: Book) -> Table:
    """Others' steps of the xl model, each with its ratio to the naive one, and its communication where they give it."""
    rows = []
    for source in STUDENTS:
        table = beside(book, source, "ddp", "ms")
        given = (source, SHARE) in book.published.tables
        naive = next(row.values["time"].value for row in table.table.rows if row.keys["candidate"] == "naive")
        for row in table.table.rows:
            rows.append({
                "<source": source, "<on": table.table.hardware, "<wrapper": str(row.keys["candidate"]),
                "step": table.cell(**row.keys), "over naive": f"{row.values['time'].value / naive:.2f}",
                "communication, of step": beside(book, source, SHARE, "%").cell(**row.keys) if given else NONE,
            })  # fmt: skip
    return Table(book, rows)
