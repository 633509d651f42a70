"""Operators of a step: number of calls and share of its time, and a flame graph of it."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.cost import forward_flops
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.text import markdown_code
from cs336_systems.presets import ModelConfig, preset
from writeup.book import Book, Citation
from writeup.cells import NONE, joined, quoted, times
from writeup.profiles import largest, plain_profiles, profile_picture, tables
from writeup.publications import ORIGINAL
from writeup.tables import Table

SHOWN = 8  # operators of a table
LEAST = 5e-4  # share of a part that is listed
SOFTMAX, SCORES = "softmax of attention", "both products"
SOFTMAX_FLOPS = 5  # of an element: compare, subtract, exponentiate, add, divide

Profile = dict[str, Any]


def content(book: Book) -> dict[str, Any]:
    """The tables of operators and of parts, the flame graph, and the answers to the course's questions."""
    cited = plain_profiles(book)
    main = largest(cited)
    profile = tables(book, main) if main else None
    one = cited.only(size=main.config["size"]) if main else cited
    return {
        "forward": operators(book, one, profile, "forward"),
        "step": operators(book, one, profile, "step"),
        "shares": shares(book, cited),
        "softmax": softmax(book, cited),
        "more": more_time_than_flops(cited, book),
        "flame": profile_picture(
            book, main, "flame",
            "One training step, from the top down: step, phase, module, operator. Width is time; the blocks are added "
            "up.",
            "An icicle of one step: forward, backward and optimizer, below them modules and their operators",
        ),
        "parts": parts(book, one, profile),
    }  # fmt: skip


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


def operators(book: Book, cited: Citation, profile: Profile | None, period: str) -> Table:
    """Calls and times of the operators of a phase, in one step."""
    rows = []
    if profile:
        own, own_share, total = clocked(profile)
        rows = [
            {
                "<operator": markdown_code(row["name"]), "calls": f"{row['calls'] / profile['steps']:,.0f}",
                "self": format_seconds(row[own] / profile["steps"] / 1e9), "share": f"{row[own_share]:.1%}",
                "total": format_seconds(row[total] / profile["steps"] / 1e9),
                "rate": f"{format_count(row['flops_per_second'])}FLOP/s" if row["flops_per_second"] else NONE,
            }
            for row in by_self_time(profile, period)[:SHOWN]
        ]  # fmt: skip
    return Table(book, rows, cited)


def shares(book: Book, cited: Citation) -> Table:
    """The share of matrix products in the forward pass and in the whole step, the optimizer's included."""
    periods = {"forward": "of the forward pass", "step": "of the step"}
    rows = [{"<size": record.config["size"]} for record in cited] + [{"<size": "2024, one GPU"}]
    for period, head in periods.items():
        name = "share_matrix_products" + "_of_forward" * (period == "forward")
        for record, row in zip(cited, rows, strict=False):
            predicted = record.predicted.get(name)
            row |= {head: f"{record.metrics[name]:.1%}",
                    f"predicted, {head}": NONE if predicted is None else f"{predicted:.1%}"}  # fmt: skip
        theirs = book.published.value(ORIGINAL, "operator shares", pass_=period, operator="aten::mm")
        rows[-1] |= {head: quoted(book, theirs, "%"), f"predicted, {head}": NONE}
    return Table(book, rows, cited)


def attention_parts(book: Book, record: Record) -> dict[str, dict[str, Any]]:
    """The profiled softmax and both products of attention, by name; empty if either is missing."""
    found = {row["name"]: row for row in (tables(book, record) or {})["attention"]}
    return found if {SOFTMAX, SCORES} <= found.keys() and found[SCORES]["forward"] else {}


def softmax(book: Book, cited: Citation) -> Table:
    """Attention's softmax over its two products in the forward pass, in time and in FLOPs."""
    rows = []
    for record in cited:
        if parts := attention_parts(book, record):
            soft, products = parts[SOFTMAX], parts[SCORES]
            steps = (tables(book, record) or {})["steps"]
            flops = products["forward_flops"] and soft["forward_flops"] / products["forward_flops"]
            rows.append({
                "<size": record.config["size"],
                "softmax": format_seconds(soft["forward"] / steps / 1e9),
                "both products": format_seconds(products["forward"] / steps / 1e9),
                "ratio of times": f"{soft['forward'] / products['forward']:.2f}",
                "ratio of FLOPs, counted": f"{flops:.4f}" if flops else NONE,
                "predicted": f"{flops_ratio(config_of(record)):.4f}",
            })  # fmt: skip
    return Table(book, rows, cited)


def more_time_than_flops(cited: Citation, book: Book) -> str:
    """Ratio of softmax to products in time over that in FLOPs: a clause, or nothing if it is not above 1."""
    found = {}
    for record in cited:
        if parts := attention_parts(book, record):
            time = parts[SOFTMAX]["forward"] / parts[SCORES]["forward"]
            found[record.config["size"]] = time / flops_ratio(config_of(record))
    return (
        joined(f"{times(each)} ({size})" for size, each in found.items()) if min(found.values(), default=0) > 1 else ""
    )


def parts(book: Book, cited: Citation, profile: Profile | None) -> Table:
    """The whole step by part of the model; each moment is in one row."""
    ways = {"in forward": ("forward",), "in backward": ("backward", "recomputed"), "elsewhere": ("other",)}
    listed = [each for each in profile["parts"] if each["share"] >= LEAST] if profile else []
    whole = sum(each[name] for each in (profile or {"parts": []})["parts"] for way in ways.values() for name in way)
    rows = []
    for each in listed:
        spent = {head: sum(each[name] for name in names) for head, names in ways.items()}
        shares = {head: f"{found / whole:.1%}" if found else NONE for head, found in spent.items()}
        rows.append({"<part": each["name"], **shares, "in all": f"{each['share']:.1%}"})
    return Table(book, rows, cited)
