"""Operators of a pass: number of calls, and share of its time."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.cost import forward_flops
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.text import markdown_code
from cs336_systems.presets import ModelConfig, preset
from writeup.book import Book, Citation
from writeup.cells import NONE, median_ms
from writeup.profiles import tables, with_tables
from writeup.publications import ORIGINAL
from writeup.tables import Table
from writeup.words import joined, times

COMMAND = "python -m benchmarks.profiling_run --size small --wrapper none --attention naive"
SOURCE = ORIGINAL
SHOWN = 8  # operators of a table
SOFTMAX, SCORES = "softmax of attention", "both products"
SOFTMAX_FLOPS = 5  # of an element: compare, subtract, exponentiate, add, divide

Profile = dict[str, Any]


def content(book: Book) -> dict[str, Any]:
    """The tables of operators, the shares, and the answers to the course's questions."""
    profiled = book.cite("profiling", wrapper="none", attention="naive", command=COMMAND)
    cited = with_tables(book, profiled)
    main = largest(cited)
    profile = tables(book, main) if main else None
    return {
        "forward": operators(book, cited, main, profile, "forward"),
        "step": operators(book, cited, main, profile, "step"),
        "shares": shares(book, cited),
        "softmax": softmax(book, cited),
        "more": more_time_than_flops(cited, book),
    }


def largest(cited: Citation) -> Record | None:
    """The profile whose step took longest: the one in which operators, not their starts, take the time."""
    return max(cited, key=median_ms, default=None)


def config_of(record: Record) -> ModelConfig:
    """The model of a record, with the context that it ran."""
    config = record.config
    model = preset(config["size"], config["year"]).model
    return model.override(context_length=config["context"], norm=config["norm"], attention=config["attention"])


def clocked(profile: Profile) -> tuple[str, str, str]:
    """The names of a row's self time, of its share, and of its total: the device's where anything ran on one."""
    where = "device" if profile["clock"] == "device" else "cpu"
    return f"{where}_self", f"{where}_self_share", f"{where}_total"


def by_self_time(profile: Profile, period: str) -> list[dict[str, Any]]:
    """The operators of a phase, or of the step, with the longest self time."""
    own, _, _ = clocked(profile)
    return sorted(profile["operators"][period], key=lambda row: (-row[own], row["name"]))


def flops_ratio(config: ModelConfig) -> float:
    """FLOPs of the softmax over those of the two products, of any batch."""
    scores = config.num_layers * config.num_heads * config.context_length**2
    return SOFTMAX_FLOPS * scores / forward_flops(config, 1, config.context_length)["scores"]


def operators(book: Book, cited: Citation, main: Record | None, profile: Profile | None, period: str) -> Table:
    """Calls and times of the operators of a phase, in one step."""
    rows = []
    if main and profile:
        own, own_share, total = clocked(profile)
        steps = profile["steps"]
        for row in by_self_time(profile, period)[:SHOWN]:
            rows.append([
                markdown_code(row["name"]), f"{row['calls'] / steps:,.0f}",
                format_seconds(row[own] / steps / 1e9), f"{row[own_share]:.1%}",
                format_seconds(row[total] / steps / 1e9),
                f"{format_count(row['flops_per_second'])}FLOP/s" if row["flops_per_second"] else NONE,
            ])  # fmt: skip
    columns = ("<operator", "calls", "self", "share", "total", "rate")
    return Table(book, columns, rows, cited.only(size=main.config["size"]) if main else cited)


def shares(book: Book, cited: Citation) -> Table:
    """The share of matrix products in the forward pass and in the whole step, the optimizer's included."""
    rows = []
    for record in cited:
        found = []
        for name in ("share_matrix_products_of_forward", "share_matrix_products"):
            predicted = record.predicted.get(name)
            found += [f"{record.metrics[name]:.1%}", NONE if predicted is None else f"{predicted:.1%}"]
        rows.append([record.config["size"], *found])
    theirs = [
        book.published.value(SOURCE, "operator shares", pass_=name, operator="aten::mm") for name in ("forward", "step")
    ]
    forward, step = (f"{each.shown('%')}%" if each else NONE for each in theirs)
    rows.append(["2024, one GPU", forward, NONE, step, NONE])
    columns = ("<size", "of the forward pass", "predicted", "of the step", "predicted")
    return Table(book, columns, rows, cited)


def softmax(book: Book, cited: Citation) -> Table:
    """Attention's softmax over its two products in the forward pass, in time and in FLOPs."""
    rows = []
    for record in cited:
        profile = tables(book, record) or {}
        parts = {row["name"]: row for row in profile["attention"]}
        if SOFTMAX in parts and SCORES in parts:
            soft, products = parts[SOFTMAX], parts[SCORES]
            flops = soft["forward_flops"] / products["forward_flops"] if products["forward_flops"] else None
            rows.append([
                record.config["size"],
                *(format_seconds(part["forward"] / profile["steps"] / 1e9) for part in (soft, products)),
                f"{soft['forward'] / products['forward']:.2f}",
                NONE if flops is None else f"{flops:.4f}", f"{flops_ratio(config_of(record)):.4f}",
            ])  # fmt: skip
    columns = ("<size", "softmax", "both products", "ratio of times", "ratio of FLOPs, counted", "predicted")
    return Table(book, columns, rows, cited)


def more_time_than_flops(cited: Citation, book: Book) -> str:
    """Ratio of softmax to products in time over that in FLOPs: a clause, or nothing if it is not above 1."""
    found = {}
    for record in cited:
        parts = {row["name"]: row for row in (tables(book, record) or {})["attention"]}
        if SOFTMAX in parts and SCORES in parts and parts[SCORES]["forward"]:
            time = parts[SOFTMAX]["forward"] / parts[SCORES]["forward"]
            found[record.config["size"]] = time / flops_ratio(config_of(record))
    return (
        joined(f"{times(each)} ({size})" for size, each in found.items()) if min(found.values(), default=0) > 1 else ""
    )
