"""Memory of a forward pass and of a training step, by use, and the error of its prediction."""

from math import prod
from typing import Any

from benchmarks.records import Record
from cs336_systems.cost.flops import count_parameters
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text, plot_text
from cs336_systems.presets import course_sizes, preset
from writeup.book import Book, Citation
from writeup.cells import NONE, memory, predicted_memory, quoted
from writeup.figures import COLOURS, Figure, draw
from writeup.profiles import COMMAND, largest, plain_profiles, profile_picture
from writeup.publications import ORIGINAL, Published
from writeup.tables import Table

SOURCE, YEAR = ORIGINAL, 2024
MODES = ("forward", "step")
PARTS = ("parameters", "gradients", "optimizer state", "activations", "other")
PAINTS = (*COLOURS[:3], COLOURS[4])  # those of the timeline
GIB = 2**30


def content(book: Book) -> dict[str, Any]:
    """The timeline, the peaks, the residual stream, the largest tensors."""
    peaks = book.cite(
        "memory", year=YEAR, mode=MODES, recompute="none", command="python -m benchmarks.memory --all-sizes"
    )
    full = peaks.only(precision="fp32")
    kept = book.cite(
        "memory", mode="residuals", recompute="none", command="python -m benchmarks.memory --size 2.7B --residuals"
    )
    main = largest(plain_profiles(book))
    return {
        "timeline": profile_picture(
            book, main, "memory",
            "Memory alive during the profiled steps. Strips above: steps and phases; the dashed line is the peak.",
            "Stacked areas of parameters, optimizer state, gradients, activations and the rest over time",
        ),
        "size": main.config["size"] if main else "",
        "kept": activations(main) if main else 0.0,
        "command": COMMAND,
        "peaks": peak_table(book, full),
        "picture": picture(book, full) if full else None,
        "half": peak_table(book, peaks.only(precision="bf16")),
        "streams": streams(book),
        "tensors": tensors(book, kept),
    }  # fmt: skip


def activations(profiled: Record) -> float:
    """Share of the peak beyond 12 bytes for each parameter: fp32 weights and AdamW's state, before gradients exist."""
    peak = float(profiled.metrics["peak_memory_bytes"])
    return (
        1 - 12 * sum(count_parameters(preset(profiled.config["size"], profiled.config["year"]).model).values()) / peak
    )


def published_peak(book: Book, record: Record) -> Published | None:
    """The original's figure of the same size, pass and precision."""
    name = "memory in mixed precision" if record.config["precision"] == "bf16" else "memory"
    return book.published.value(SOURCE, name, size=record.config["size"], pass_=record.config["mode"])


def peak_table(book: Book, cited: Citation) -> Table:
    """Measured and predicted peak of every size and pass, what it consists of, and the original's."""
    rows = []
    for record in cited:
        parts = record.metrics.get("memory_by_part") or record.predicted["memory_by_part"]
        theirs = published_peak(book, record)
        rows.append({
            "<size": record.config["size"], "<pass": record.config["mode"], "peak": memory(book, record),
            "predicted (of measured)": predicted_memory(record),
            **{name: format_bytes(parts[name]) if parts.get(name) else NONE for name in PARTS[:4]},
            "2024, one GPU": theirs.text if theirs else NONE,
        })  # fmt: skip
    return Table(book, rows, cited)


def picture(book: Book, cited: Citation) -> Figure:
    """Predicted peaks by part, with what was measured and what the original printed."""
    sizes = cited.values("size")

    def into(panels: Any) -> None:
        for axes, mode in zip(panels, MODES, strict=True):
            records = {record.config["size"]: record for record in cited.only(mode=mode)}
            places = [place for place, size in enumerate(sizes) if size in records]
            below = [0.0] * len(places)
            for part, colour in zip(PARTS[:4], PAINTS, strict=True):
                heights = [records[sizes[place]].predicted["memory_by_part"].get(part, 0) / GIB for place in places]
                if any(heights):
                    axes.bar(places, heights, bottom=below, color=colour, width=0.6, label=f"{part}, predicted")
                below = [low + height for low, height in zip(below, heights, strict=True)]
            seen = [(place, records[sizes[place]].metrics.get("peak_memory_bytes")) for place in places]
            axes.plot(*points(seen), "o", color="black", markersize=5, label="measured")
            found = [(place, published_peak(book, records[sizes[place]])) for place in places]
            theirs = [(place, each.value if each else None) for place, each in found]
            axes.plot(*points(theirs), "x", color="black", markersize=7, label="2024, one GPU")
            axes.set_xticks(range(len(sizes)), [plot_text(size) for size in sizes])
            axes.set_title(mode)
        panels[0].set_ylabel("GiB")
        panels[1].legend(fontsize=8)

    return draw(
        "memory-peaks", "Peak memory: predicted by part, measured, and the original's. A bar without a black dot does "
        "not fit this machine.", "Stacked bars of predicted memory by size, for a forward pass and for a step", into, 2,
    )  # fmt: skip


def points(found: list[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Places and GiB of those that have a figure."""
    there = [(place, value / GIB) for place, value in found if value]
    return [place for place, _ in there], [value for _, value in there]


def streams(book: Book) -> Table:
    """One activation of the residual stream of every size of 2024: computed from the shape."""
    rows = []
    for size in course_sizes(YEAR):
        chosen = preset(size, YEAR)
        shape = chosen.batch_size, chosen.model.context_length, chosen.model.d_model
        rows.append({
            "<size": size, "batch x context x width": " x ".join(map(str, shape)),
            "in fp32, computed": format_bytes(4 * prod(shape)),
            "2024": quoted(book, book.published.value(SOURCE, "tensors", size=size, tensor="residual stream"), "MiB"),
        })  # fmt: skip
    return Table(book, rows)


def tensors(book: Book, cited: Citation) -> Table:
    """The largest storages that one block keeps for backward."""
    rows = [
        {"<size": record.config["size"], "<kept by": markdown_text(module), "shape": " x ".join(map(str, shape)),
         "bytes": format_bytes(nbytes), "<made by": maker}
        for record in cited
        for module, shape, _, nbytes, maker in record.metrics["largest"]
    ]  # fmt: skip
    return Table(book, rows, cited)
