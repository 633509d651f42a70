"""Cost of a checkpoint: saving, saving in the background and loading, beside PyTorch's own ways."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, median_ms, predicted_ms, prediction, ratio, timing
from writeup.figures import COLOURS, Figure, draw
from writeup.tables import Table
from writeup.words import error_of, faster, joined, times

COLUMNS = ("<candidate", "median (quartiles)", "predicted (of measured)", "bytes/s", "ratio to DCP, pair by pair")
PAIRS = (("save", "DCP save"), ("save", "torch.save"), ("load", "DCP load"), ("load", "torch.load"))
STATE = ("size", "year", "ranks", "d_model", "layers")
OURS = ("save", "save in the background", "load")


def content(book: Book) -> dict[str, Any]:
    """A table for each size, the picture, and what the commentary is made of."""
    cited = book.cite("checkpoints")
    groups = by_state(cited)
    still = stands_still(groups)
    return {
        "tables": [(_title(group), _table(book, group)) for group in groups.values()]
        or [("", Table(book, COLUMNS, [], cited))],
        "picture": picture(groups) if cited.measured else None,
        "comparisons": [line for name, group in groups.items() for line in comparisons(group, name)],
        "background": joined(still) if still else "",
        "error": error_of(cited),
        "short": shortfall(list(groups.values())),
        "measured": bool(cited.measured),
    }


def by_state(cited: Citation) -> dict[str, Citation]:
    """The candidates that saved the same state on the same ranks, by its name, which says ranks where that differs."""
    settings = [{key: record.config[key] for key in STATE} for record in cited]
    several = len({setting["ranks"] for setting in settings}) > 1
    groups: dict[str, Citation] = {}
    for setting in settings:
        name = f"{setting['size']}, {setting['ranks']} ranks" if several else str(setting["size"])
        same = name in groups and groups[name].records[0].config
        if same and any(same[key] != setting[key] for key in STATE):
            name = f"{name} ({setting['d_model']} x {setting['layers']}, {setting['year']})"
        groups.setdefault(name, cited.only(setting))
    return groups


def _table(book: Book, cited: Citation) -> Table:
    rows = [
        [
            markdown_text(record.config["candidate"]),
            timing(book, record),
            prediction(record),
            rate(record),
            ratio(record),
        ]
        for record in cited
    ]
    return Table(book, COLUMNS, rows, cited)


def _title(cited: Citation) -> str:
    first = cited.records[0]
    nbytes = format_bytes(metric(first, "bytes")) if first.status == "ok" else NONE
    return f"{markdown_text(first.config['size'])}: {nbytes} of weights and AdamW state, {first.config['ranks']} ranks"


def rate(record: Record) -> str:
    """Bytes of the whole state over the median time."""
    if record.status != "ok":
        return NONE
    return f"{format_bytes(metric(record, 'bytes') / median_ms(record) * 1e3)}/s"


def picture(groups: Mapping[str, Citation]) -> Figure:
    """Measured times as bars, predictions as marks, a panel for each size."""

    def into(panels: Any) -> None:
        for axes, (name, group) in zip([panels] if len(groups) == 1 else panels, groups.items(), strict=True):
            records = list(group.measured)
            places = range(len(records))
            axes.barh(places, [median_ms(record) for record in records], color=COLOURS[5], label="measured, median")
            known = [(place, predicted_ms(record)) for place, record in zip(places, records, strict=True)]
            shown = [(place, value) for place, value in known if value]
            if shown:
                axes.plot([v for _, v in shown], [p for p, _ in shown], "|", color=COLOURS[1], markersize=16,
                          markeredgewidth=2.5, label="predicted")  # fmt: skip
            axes.set_yticks(places, [record.config["candidate"] for record in records])
            axes.invert_yaxis()
            axes.set_xlabel("ms")
            axes.set_title(name, loc="left", fontsize="medium")
            axes.grid(axis="y", visible=False)
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)

    return draw(
        "checkpoints", "Saving and loading, by candidate. In the background: how long training stands still.",
        "Bars of the time to save and to load a checkpoint by candidate, with predictions as marks", into,
        columns=len(groups), width=3.2 + 3.2 * len(groups), height=3.0,
    )  # fmt: skip


def comparisons(cited: Citation, state: str) -> list[str]:
    """Each of ours against each of PyTorch's, in words."""
    said = []
    for mine, theirs in PAIRS:
        a, b = (cited.measured.one(candidate=name) for name in (mine, theirs))
        if a and b:
            said.append(f"{state}: {faster(_named(mine), a, _named(theirs), b)}")
    return said


def _named(candidate: str) -> str:
    return f"this project's {candidate}" if candidate in OURS else f"`{candidate}`" if "." in candidate else candidate


def stands_still(groups: Mapping[str, Citation]) -> list[str]:
    """Share of the pause in training that remains when a checkpoint is saved in the background."""
    said = []
    for state, group in groups.items():
        whole, behind = (group.measured.one(candidate=name) for name in OURS[:2])
        if whole and behind:
            said.append(f"{median_ms(behind) / median_ms(whole):.1%} at {state}")
    return said


def shortfall(groups: Sequence[Citation]) -> str:
    """Compare how far the prediction of a save falls short for the largest and for the smallest size."""
    saves = [group.measured.one(candidate="save") for group in groups]
    known = sorted((r for r in saves if r and predicted_ms(r)), key=lambda record: float(metric(record, "bytes")))
    if len(known) < 2:
        return ""
    few, many = (median_ms(record) / (predicted_ms(record) or 1.0) for record in (known[0], known[-1]))
    sizes_said = [format_bytes(metric(record, "bytes")) for record in (known[0], known[-1])]
    return f"a save of {sizes_said[0]} takes {times(few)} what is predicted, one of {sizes_said[1]} {times(many)}"
