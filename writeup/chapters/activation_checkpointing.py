"""Recomputing in backward instead of keeping: bytes kept by block, the best length of a segment, recursion."""

from typing import Any

from benchmarks.lib.memory_tables import grouped, recompute_name
from benchmarks.records import Record
from cs336_systems.cost import backward_flops, forward_flops, recompute_flops
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import ModelConfig, preset
from writeup.book import Book, Citation
from writeup.cells import memory, predicted_memory
from writeup.figures import COLOURS, Figure, draw
from writeup.tables import Table

RESIDUALS = "python -m benchmarks.memory --size 2.7B --residuals"
SEGMENTS = "python -m benchmarks.memory --size medium --batch-size 4 --segments"
MIB = 2**20


def content(book: Book) -> dict[str, Any]:
    """Bytes kept by block, the sweep over segments with its prediction, and the time of recomputing."""
    kept = one_shape(book.cite("memory", mode="residuals", command=RESIDUALS).measured)
    swept = one_shape(book.cite("memory", mode="activations", command=SEGMENTS))
    plain = swept.one(recompute="none")
    return {
        "kept": residuals(book, kept, "blocks"),
        "inside": residuals(book, kept, "modules"),
        "swept": sweep_table(book, swept),
        "what_swept": what(swept),
        "picture": picture(swept, plain) if plain else None,
        "rule": rule(plain) if plain else {},
    }


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


def picture(cited: Citation, plain: Record) -> Figure:
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
