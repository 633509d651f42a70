"""Best size of a bucket: the sweep, the equation with overhead and bandwidth fitted, and its optimum."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from benchmarks.lib.collective import size_name
from benchmarks.records import Record
from cs336_systems.cost.course.communication import best_count, overhead
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text, plot_text
from cs336_systems.traffic import sent
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, beside, median_ms
from writeup.figures import COLOURS, Figure, draw
from writeup.publications import ORIGINAL
from writeup.rank_runs import ALONE, DDP, THROTTLED, Line, fit, link_title, link_words, runs_of
from writeup.tables import Table

BACKWARD = 2 / 3  # of a step: a backward pass is two products for each one of forward


@dataclass(frozen=True)
class Model:
    """The equation for one run: bytes of all gradients, the fitted line, and how long backward takes in seconds."""

    run: Citation
    nbytes: float
    line: Line
    backward: float

    def exposed(self, buckets: float) -> float:
        """Seconds after backward, by the course's T(n), in which backward takes as long as the bytes."""
        return overhead(self.nbytes, self.line.bandwidth, self.line.overhead, buckets)

    def general(self, buckets: float) -> float:
        """Seconds after backward, with backward's own length."""
        return overhead(self.nbytes, self.line.bandwidth, self.line.overhead, buckets, self.backward)

    @property
    def best(self) -> float:
        """Bytes of the best bucket, sqrt(s w o)."""
        return sqrt(self.nbytes * self.line.bandwidth * self.line.overhead)


def content(book: Book) -> dict[str, Any]:
    """The sweeps, the fits, the best sizes, and the original's sweep."""
    plain = book.cite("ddp", link="", command=DDP)
    slow = book.cite("ddp", link=bool, command=THROTTLED)
    runs = [*runs_of(plain), *runs_of(slow)]
    models = [model for run in runs if (model := model_of(run))]
    drawn = {bool(model.run.records[0].config["link"]): model for model in reversed(models)}  # the widest on each link
    return {
        "fits": fits(book, models, [plain, slow]),
        "picture": picture([drawn[link] for link in sorted(drawn)]) if models else None,
        "larger": all((fastest(model.run) or model.nbytes) > model.best for model in models),
        "published": published(book),
    }


def bucket_bytes(record: Record) -> float | None:
    """The size that a bucketed candidate was given, in bytes; None for another candidate."""
    words = str(record.config["candidate"]).split()
    return float(words[1]) * 1e6 if words[0] == "bucketed" else None


def sweep_of(run: Citation) -> list[Record]:
    """The bucketed candidates, the smallest bucket first."""
    return sorted((record for record in run if bucket_bytes(record)), key=lambda record: bucket_bytes(record) or 0.0)


def model_of(run: Citation) -> Model | None:
    """The equation fitted to the collectives of a run's steps, which were timed with nothing else to do."""
    timed = [record for record in run if "communication_ms" in record.metrics]
    alone = run.one(candidate=ALONE)
    if not timed or alone is None:
        return None
    nbytes = metric(timed[0], "bytes_sent") / sent("all-reduce", timed[0].config["ranks"])
    line = fit([(metric(r, "collectives"), nbytes, metric(r, "communication_ms") / 1e3) for r in timed])
    return Model(run, nbytes, line, BACKWARD * median_ms(alone) / 1e3) if line else None


def fits(book: Book, models: list[Model], cited: list[Citation]) -> Table:
    """Overhead and bandwidth of each run, the bucket that the equation then asks for, and the fastest one measured."""
    rows = []
    for model in models:
        line = model.line
        general = model.nbytes / best_count(model.nbytes, line.bandwidth, line.overhead, model.backward)
        fast = fastest(model.run)
        rows.append({
            "<a step's collectives": name(model), "s": size_name(model.nbytes), "o": format_seconds(line.overhead),
            "w": f"{size_name(line.bandwidth)}/s", "fit off by": f"{line.residual:.1%}",
            "best, √(s w o)": size_name(float(f"{model.best:.3g}")),
            "with backward's length": size_name(float(f"{general:.3g}")),
            "fastest measured": size_name(fast) if fast else NONE,
        })  # fmt: skip
    return Table(book, rows, [each for each in cited if each] or cited[0])


def name(model: Model) -> str:
    """The run of a model: its width, its backend and its link."""
    first = model.run.records[0]
    link = f", {markdown_text(link_words(first))}" if first.config["link"] else ""
    return f"width {first.config['d_model']}, {first.config['backend']}{link}"


def fastest(run: Citation) -> float | None:
    """The size of the bucketed candidate with the least median."""
    found = sweep_of(run)
    return bucket_bytes(min(found, key=median_ms)) if found else None


def picture(models: list[Model]) -> Figure:
    """Exposed communication over the number of buckets: measured, by T(n), and with backward's own length."""

    def into(axes: Any) -> None:
        for place, model in zip(axes, models, strict=True):
            found = [(metric(r, "collectives"), metric(r, "exposed_ms")) for r in sweep_of(model.run)]
            optimum = best_count(model.nbytes, model.line.bandwidth, model.line.overhead)
            most = max([count for count, _ in found] + [optimum])
            counts = np.geomspace(1, 4 * most, 200)
            curves = {"T(n)": model.exposed, "with backward's length": model.general}
            for colour, (what, curve) in zip(COLOURS, curves.items(), strict=False):
                place.plot(counts, [1e3 * curve(float(count)) for count in counts], color=colour, label=what)
            place.plot(*zip(*found, strict=True), "o", color=COLOURS[6], label="measured") if found else None
            link = plot_text(link_title(model.run.records[0]))
            place.set(xscale="log", xlabel="buckets", ylabel="exposed, milliseconds", title=link)
            place.set_ylim(bottom=0)
        names = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(*names, loc="outside lower center", ncols=3, fontsize="small")

    return draw(
        "buckets-exposed", "What the reductions of n buckets leave after backward: measured, and by the equation.",
        "Exposed communication over the number of buckets, measured points and two curves of the fitted equation",
        into, columns=len(models),
    )  # fmt: skip


def published(book: Book) -> Table:
    """The original's sweep: sizes of buckets as columns."""
    theirs = beside(book, ORIGINAL, "bucketed", "ms")
    rows: dict[str, dict[str, str]] = {}
    for row in sorted(theirs.table.rows, key=lambda row: int(row.keys["bucket_size_mb"])):
        name = f"{row.keys['backend']}, {row.keys['size']}"
        cell = {f"{row.keys['bucket_size_mb']} MB": theirs.cell(**row.keys)}
        rows.setdefault(name, {"<original": name}).update(cell)
    return Table(book, [*rows.values()], notes=theirs.notes)
