"""What averaging gradients costs, and how much of it hides behind backward: four wrappers and PyTorch's."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.console import format_seconds
from writeup.beside import beside
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, median_ms, predicted_ms, prediction, ratio, timing
from writeup.figures import COLOURS, Figure, draw
from writeup.profiles import profile_picture
from writeup.rank_runs import DDP, THROTTLED, runs_of, title
from writeup.tables import Table
from writeup.words import faster, joined, prediction_error

SOURCE = "rod-2024"
ALONE, TORCH = "no communication", "torch DDP"
RUNGS = ("naive", "flat", "overlapped")
WRAPPERS = ("naive", "flat", "overlapped", "bucketed", "torch-ddp")
STUDENTS = ("brandon-snider", "damek", "enzo-ding")


def content(book: Book) -> dict[str, Any]:
    """The steps over each link, traces with their overlap, published figures, and the commentary's sentences."""
    plain = book.cite("ddp", link="", command=DDP)
    slow = book.cite("ddp", link=bool, command=THROTTLED)
    traced = book.cite("profiling", ranks=lambda n: n > 1, wrapper=WRAPPERS)
    runs = [*runs_of(plain), *runs_of(slow)]
    return {
        "steps": [(title(run), steps(book, run)) for run in runs],
        "missing": [str(Table(book, (), (), each)) for each in (plain, slow) if not each],
        "picture": picture(runs) if runs else None,
        "overlaps": overlaps(book, traced),
        "traces": traces(book, traced),
        "traced_command": traced.command,
        "published": published(book),
        "published_notes": beside(book, SOURCE, "flat again", "ms").notes,
        "students": students(book),
        "said": [line for run in runs for line in commentary(run)],
        "overlap_said": overlap_said(traced),
        "commands": [DDP, THROTTLED],
    }


def steps(book: Book, run: Citation) -> Table:
    """Every candidate's step, its communication alone, and what of it shows."""
    rows = []
    for record in run:
        found, name = record.metrics, record.config["candidate"]
        alone = calls = NONE
        if "communication_ms" in found:
            alone = f"{format_seconds(found['communication_ms'] / 1e3)} ({found['communication_share']:.0%})"
            calls = str(found["collectives"])
        exposed = format_seconds(found["exposed_ms"] / 1e3) if "exposed_ms" in found else NONE
        hidden = expected_exposed(run, record)
        rows.append([name, timing(book, record), prediction(record), calls, alone, exposed, hidden, ratio(record)])
    columns = ("<wrapper", "step, median (quartiles)", "predicted (of measured)", "collectives",
               "alone (of step)", "exposed", "exposed, predicted", "over torch DDP")  # fmt: skip
    return Table(book, columns, rows, run)


def expected_exposed(run: Citation, record: Record) -> str:
    """What the prediction has of communication that backward does not hide."""
    alone, mine = run.one(candidate=ALONE), predicted_ms(record)
    base = predicted_ms(alone) if alone else None
    if base is None or mine is None or record is alone:
        return NONE
    return format_seconds((mine - base) / 1e3)


def picture(runs: list[Citation]) -> Figure:
    """Steps as bars: what a step without communication takes, and what is exposed on top of it."""

    def into(axes: Any) -> None:
        for place, run in zip(axes if len(runs) > 1 else [axes], runs, strict=True):
            base = run.one(candidate=ALONE)
            shown = [record for record in run if record is not base]
            names = [record.config["candidate"] for record in shown]
            exposed = [metric(record, "exposed_ms") for record in shown]
            place.barh(names, [median_ms(base) if base else 0.0] * len(shown), color=COLOURS[7], label="computing")
            left = median_ms(base) if base else 0.0
            place.barh(names, exposed, left=left, color=COLOURS[1], label="exposed communication")
            place.plot([predicted_ms(r) for r in shown], names, "k|", markersize=12, label="predicted")
            place.set(xlabel="milliseconds", title=str(run.records[0].config["link"] or "this machine's own link"))
            place.invert_yaxis()
            place.grid(axis="y", visible=False)
        first = axes[0] if len(runs) > 1 else axes
        first.figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return draw(
        "ddp-steps", "A step without communication, and what each wrapper adds to it; a stroke is the prediction.",
        "Bars of training steps, split into computing and exposed communication, for each data-parallel wrapper",
        into, columns=len(runs), height=3.6,
    )  # fmt: skip


def overlaps(book: Book, traced: Citation) -> Table:
    """For each traced wrapper the share of communication behind which its rank computed, by rank."""
    theirs, rows = beside(book, SOURCE, "overlap", "%"), []
    for record in ordered(traced):
        wrapper, shares = record.config["wrapper"], metric(record, "overlap")
        said = record.predicted
        spent, shown = said.get("communication_ms"), said.get("exposed_ms")
        expected = f"{1 - shown / spent:.0%}" if spent and shown is not None else NONE
        quoted = [theirs.cell(candidate=wrapper, rank=rank) for rank in range(2)] if wrapper in RUNGS else []
        rows.append([
            wrapper, ", ".join(f"{share:.1%}" for share in shares), expected,
            ", ".join(format_seconds(each / 1e3) for each in metric(record, "communication_ms")),
            ", ".join(each for each in quoted if each != NONE) or NONE,
        ])  # fmt: skip
    columns = ("<wrapper", "overlap, by rank", "predicted", "communication, by rank", "Rød, by rank")
    return Table(book, columns, rows, traced)


def ordered(traced: Citation) -> list[Record]:
    """From the plainest wrapper on."""
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
    tables = [beside(book, SOURCE, name, "ms") for name in (*RUNGS[:2], "flat again", RUNGS[2])]
    rows = [
        [str(row.keys["size"]), str(row.keys["nodes"]), *(table.cell(**row.keys) for table in tables)]
        for row in sorted(tables[0].table.rows, key=lambda row: int(row.keys["nodes"]))
    ]
    return Table(book, ("<size", "nodes", "naive", "flat", "flat, again", "overlapped"), rows, always=True)


def students(book: Book) -> Table:
    """Others' steps of the xl model, each with its ratio to the naive one."""
    rows = []
    for source in STUDENTS:
        table = beside(book, source, "ddp", "ms")
        naive = next(row.values["time"].value for row in table.table.rows if row.keys["candidate"] == "naive")
        for row in table.table.rows:
            time = row.values["time"].value / naive
            rows.append(
                [source, table.table.hardware, str(row.keys["candidate"]), table.cell(**row.keys), f"{time:.2f}"]
            )
    return Table(book, ("<source", "<on", "<wrapper", "step", "over naive"), rows, always=True)


def commentary(run: Citation) -> list[str]:
    """The rungs against each other, the share of communication, and how right the prediction is."""
    by_name = {record.config["candidate"]: record for record in run}
    where = f"Over {run.records[0].config['link']}" if run.records[0].config["link"] else "Over the machine's own link"
    parts = []
    if (naive := by_name.get("naive")) and "communication_share" in naive.metrics:
        share = metric(naive, "communication_share")
        parts.append(f"the naive wrapper's collectives alone would take {share:.0%} of its step")
    for one, other in (("flat", "naive"), ("overlapped", "flat"), ("overlapped", TORCH)):
        if one in by_name and other in by_name:
            parts.append(faster(one, by_name[one], other, by_name[other]))
    said = [f"{where}, {'; '.join(parts)}."] if parts else []
    shown = [(r, metric(r, "exposed_ms")) for r in run if "communication_ms" in r.metrics]
    if shown:
        least = min(shown, key=lambda pair: pair[1])
        spent = metric(least[0], "communication_ms")
        hides = (
            f"of its {format_seconds(spent / 1e3)} of communication it shows {least[1] / spent:.0%}"
            if least[1] < spent
            else f"more than its communication alone, {format_seconds(spent / 1e3)}: computing was slowed down, too"
        )
        said.append(f"Least exposed is {least[0].config['candidate']}, {format_seconds(least[1] / 1e3)}; {hides}.")
    pairs = [(predicted_ms(record) or 0.0, median_ms(record)) for record in run]
    return [*said, f"Of these steps, {prediction_error(pairs)}."]


def overlap_said(traced: Citation) -> str:
    """Whether what should hide nothing hides nothing, and what hides most."""
    late = [r for r in traced.measured if r.config["wrapper"] in ("naive", "flat")]
    if not late:
        return ""
    worst = max(max(metric(record, "overlap")) for record in late)
    names = joined(f"`{record.config['wrapper']}`" for record in late)
    said = (
        f"The overlap of {names} is 0 on every rank, as it must be: they start when backward has ended."
        if worst == 0
        else f"The overlap of {names} reaches {worst:.1%}, and it should be 0: they start when backward has ended."
    )
    best = max(traced.measured, key=lambda record: float(max(metric(record, "overlap"))))
    if max(metric(best, "overlap")) > 0:
        said += f" It is largest with `{best.config['wrapper']}`, {max(metric(best, 'overlap')):.0%}."
    return said
