"""Memory of a step, and recomputing instead of keeping."""

from math import prod
from typing import Any

from benchmarks.lib.memory_tables import grouped, recompute_name
from benchmarks.records import Record
from cs336_systems.cost import backward_flops, forward_flops, recompute_flops
from cs336_systems.cost.flops import count_parameters
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text, plot_text
from cs336_systems.presets import ModelConfig, course_sizes, preset
from writeup.book import Book, Citation, facts
from writeup.cells import NONE, memory, predicted_memory, quoted
from writeup.figures import COLOURS, Figure, draw
from writeup.profiles import COMMAND, largest, plain_profiles, profile_picture
from writeup.publications import ORIGINAL, Published
from writeup.tables import Table

YEAR = 2024
MODES = ("forward", "step")
PARTS = ("parameters", "gradients", "optimizer state", "activations", "other")
PAINTS = (*COLOURS[:3], COLOURS[4])  # those of the timeline
MIB, GIB = 2**20, 2**30
ALL_SIZES = "python -m benchmarks.memory --all-sizes"
RESIDUALS = "python -m benchmarks.memory --size 2.7B --residuals"
SEGMENTS = "python -m benchmarks.memory --size medium --batch-size 4 --segments"


def content(book: Book) -> dict[str, Any]:
    """Timeline, peaks, what a block keeps, the sweep over segments, and the values that its sentences quote."""
    peaks = book.cite("memory", year=YEAR, mode=MODES, recompute="none", command=ALL_SIZES)
    full, main = peaks.only(precision="fp32"), largest(plain_profiles(book))
    residual = book.cite("memory", mode="residuals", command=RESIDUALS)
    kept = one_shape(residual.measured)
    swept = one_shape(book.cite("memory", mode="activations", command=SEGMENTS))
    plain = swept.one(recompute="none")
    return {
        "f": facts(lambda: spoken(book)),
        "timeline": profile_picture(
            book, main, "memory",
            "Memory alive during the profiled steps. Strips above: steps and phases; the dashed line is the peak.",
            "Stacked areas of parameters, optimizer state, gradients, activations and the rest over time",
        ),
        "size": main.config["size"] if main else "",
        "activations": activations(main) if main else 0.0,
        "command": COMMAND,
        "peaks": peak_table(book, full),
        "picture": picture(book, full) if full else None,
        "half": peak_table(book, peaks.only(precision="bf16")),
        "streams": streams(book),
        "tensors": tensors(book, residual.only(recompute="none")),
        "kept": residuals(book, kept, "blocks"),
        "inside": residuals(book, kept, "modules"),
        "swept": sweep_table(book, swept),
        "what_swept": what(swept),
        "segments": segments_picture(swept, plain) if plain else None,
        "rule": rule(plain) if plain else {},
    }  # fmt: skip


def spoken(book: Book) -> dict[str, Any]:
    """Error of the counts, and the share of a block's kept bytes that recomputing saves."""
    peaks = book.cite("memory", mode=("forward", "step"), recompute="none").measured
    ratios = [r.predicted["peak_memory_bytes"] / r.metrics["peak_memory_bytes"] for r in peaks]
    kept = book.cite("memory", mode="residuals")
    whole, segments = (kept.need(recompute=name, recompute_every=1) for name in ("none", "segments"))
    return {
        "count": len(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "saved": 1 - segments.metrics["kept_bytes"] / whole.metrics["kept_bytes"],
    }


def activations(profiled: Record) -> float:
    """Share of the peak beyond 12 bytes for each parameter: fp32 weights and AdamW's state, before gradients exist."""
    peak = float(profiled.metrics["peak_memory_bytes"])
    return (
        1 - 12 * sum(count_parameters(preset(profiled.config["size"], profiled.config["year"]).model).values()) / peak
    )


def published_peak(book: Book, record: Record) -> Published | None:
    """The original's figure of the same size, pass and precision."""
    name = "memory in mixed precision" if record.config["precision"] == "bf16" else "memory"
    return book.published.value(ORIGINAL, name, size=record.config["size"], pass_=record.config["mode"])


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
            "2024": quoted(book, book.published.value(ORIGINAL, "tensors", size=size, tensor="residual stream"), "MiB"),
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


def one_shape(cited: Citation) -> Citation:
    """Select records of the model and tokens that were measured first, whatever they recompute."""
    first = next(iter(cited), None)
    ways = ("recompute", "recompute_every")
    return cited.only({key: value for key, value in first.config.items() if key not in ways}) if first else cited


def config_of(record: Record) -> ModelConfig:
    """The model of a record, recomputing as it did."""
    config = record.config
    model = preset(config["size"], config["year"]).model
    return model.override(
        context_length=config["context"], norm=config["norm"], attention=config["attention"],
        recompute=config["recompute"], recompute_every=config["recompute_every"],
    )  # fmt: skip


def what(cited: Citation) -> str:
    """The model and the tokens of some records."""
    for record in cited:
        config = record.config
        return f"`{config['size']}` of {config['year']}, {config['batch_size']} x {config['context']} tokens"
    return ""


def residuals(book: Book, cited: Citation, which: str) -> Table:
    """Bytes kept for backward by part of the model (`blocks` or `modules`), for each way of recomputing; of blocks also
    the sum beside the predicted one."""
    names = [recompute_name(record) for record in cited]
    lines = [[markdown_text(name), *cells] for name, *cells in grouped([record.metrics[which] for record in cited])]
    if cited and which == "blocks":
        lines.append(["in all", *(memory(book, record, "kept_bytes") for record in cited)])
        lines.append(["predicted (of counted)", *(predicted_memory(record, "kept_bytes") for record in cited)])
    return Table(book, [dict(zip(("<kept by", *names), line, strict=True)) for line in lines], cited)


def sweep_table(book: Book, cited: Citation) -> Table:
    """Each way of recomputing: the most activations at once, what they consist of, and the FLOPs that it costs."""
    rows = [
        {
            "<recomputed": recompute_name(record), "peak": memory(book, record, "peak_bytes"),
            "predicted (of measured)": predicted_memory(record, "peak_bytes"),
            "kept": format_bytes(record.predicted["kept_bytes"]),
            "recomputed at once": format_bytes(record.predicted["recomputed_bytes"]),
            "more FLOPs, computed": f"{more_work(record):.1%}",
        }
        for record in cited
    ]  # fmt: skip
    return Table(book, rows, cited)


def more_work(record: Record) -> float:
    """FLOPs that backward repeats over those of a forward and a backward pass."""
    config, batch, seq = config_of(record), record.config["batch_size"], record.config["context"]
    passes = sum(forward_flops(config, batch, seq).values()) + backward_flops(config, batch, seq)
    return recompute_flops(config, batch, seq) / passes


def segments_picture(cited: Citation, plain: Record) -> Figure:
    """Predicted peak by length of a segment, and what was measured."""

    def into(axes: Any) -> None:
        peaks = [each / MIB for each in plain.predicted["peak_by_length"]]
        axes.plot(range(1, len(peaks) + 1), peaks, "-", label="segments, predicted")
        measured = {record.config["recompute_every"]: record for record in cited.measured.only(recompute="segments")}
        tops = [record.metrics["peak_bytes"] / MIB for record in measured.values()]
        axes.plot(list(measured), tops, "o", color="black", label="segments, measured")
        for record in cited.measured.only(recompute=("none", "nested")):
            name, colour = record.config["recompute"], COLOURS[1 if record is plain else 2]
            axes.axhline(record.metrics["peak_bytes"] / MIB, color=colour, linestyle="--", label=f"{name}, measured")
        roots = {"$\\sqrt{L s / b}$": plain.predicted["square_root_rule"], "$\\sqrt{L}$": len(peaks) ** 0.5}
        for place, (name, length) in enumerate(roots.items()):
            axes.axvline(length, color=COLOURS[6 if place else 7], linestyle=":", linewidth=1)
            below = {"xytext": (3, -6 - 16 * place), "textcoords": "offset points", "va": "top", "zorder": 3}
            blank = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.annotate(f"{name} = {length:.2f}", (length, max(peaks)), **below, bbox=blank)
        axes.set_xlabel("blocks in a segment")
        axes.set_ylabel("most activations at once, MiB")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(
        "activation-checkpointing-segments", "Peak bytes of activations, by the length of a segment.",
        "A line of predicted memory over the length of a segment, with points of what was measured", into,
    )  # fmt: skip


def rule(record: Record) -> dict[str, str]:
    """Result of the square-root formula for this shape."""
    stream = 4 * record.config["batch_size"] * record.config["context"] * config_of(record).d_model
    peaks, optimum = record.predicted["peak_by_length"], record.predicted["square_root_rule"]
    block = round(len(peaks) * stream / optimum**2)  # since the optimum is the root of layers x stream / block
    return {
        "layers": str(len(peaks)),
        "stream": format_bytes(stream),
        "block": format_bytes(block),
        "ratio": f"{block / stream:.3g}",
        "optimum": f"{optimum:.2f}",
        "naive": f"{len(peaks) ** 0.5:.2f}",
        "best": str(1 + peaks.index(min(peaks))),
    }
