"""The table of a sweep over expert layers: a line for each cell of the grid, sort and one-hot beside each other."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.collective import size_name
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds

COLUMNS = ("ranks", "experts", "capacity", "slots", "dropped")
OF_BOTH = ("sort", "predicted", "einsum", "predicted", "einsum / sort", "bytes, sort", "bytes, einsum", "einsum / sort")
CAPTION = (
    "CPU time of a layer, all threads of a rank, median, and predicted; the ratio is of pairs in one round. bytes: of "
    "one all-to-all, as counted by what was sent; none on one rank. slots: of an expert; - is all that are needed. "
    "einsum is left out where its tensors are too large"
)


Cell = dict[str, Record]  # by candidate


def cells(records: Sequence[Record]) -> list[Cell]:
    """Records by place in the grid, in the order of ranks, experts and slots; dropless last."""
    found: dict[tuple[Any, ...], Cell] = {}
    for record in records:
        config = record.config
        slots = float("inf") if config["slots"] is None else config["slots"]
        found.setdefault((config["ranks"], config["experts"], slots, config["capacity"]), {})[config["candidate"]] = (
            record
        )
    for cell in found.values():
        if "einsum" in cell and "sort" in cell and _run(cell["einsum"]) != _run(cell["sort"]):
            del cell["einsum"]  # of another run: the two did not take turns
    return [found[key] for key in sorted(found)]


def _run(record: Record) -> list[Any]:
    """Settings that the records of one interleaved comparison share."""
    return [record.environment.get(name) for name in ("commit", "dirty", "threads", "cores")] + [len(record.samples_ms)]


def row(cell: Cell) -> list[str]:
    """A cell as cells of a table."""
    sort, einsum = cell["sort"], cell.get("einsum")
    config, metrics = sort.config, sort.metrics
    slots = "-" if config["slots"] is None else str(config["slots"])
    line = [str(config["ranks"]), str(config["experts"]), config["capacity"], slots, f"{metrics['dropped_share']:.1%}"]
    line += _times(sort)
    line += ["", "", ""] if einsum is None else [*_times(einsum), f"{einsum.metrics['ratio_median']:.3g}"]
    if config["ranks"] == 1:
        return line
    line.append(size_name(metrics["all_to_all_bytes"]))
    if einsum is not None:
        line += [size_name(einsum.metrics["all_to_all_bytes"]), f"{einsum.metrics['bytes_ratio']:.3g}"]
    return line


def _times(record: Record) -> list[str]:
    """Measured and predicted."""
    return [format_seconds(each / 1e3) for each in (record.metrics["median_ms"], record.predicted["mean_ms"])]


def show(records: Sequence[Record]) -> None:
    """Print the table."""
    config, where = records[0].config, records[0].environment
    title = (
        f"Expert layers, {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens a rank, "
        f"top {config['top_k']}, skew {config['skew']:g}; {config['backend']} ranks of {where['threads']} thread(s) on "
        f"{where['device']}, {where['cores']} cores"
    )
    table = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    for head in COLUMNS + OF_BOTH:
        table.add_column(head, justify="right")
    previous = None
    for cell in cells(records):
        place = cell["sort"].config["ranks"], cell["sort"].config["experts"]
        if previous not in (None, place):
            table.add_section()
        previous = place
        table.add_row(*row(cell))
    console.console().print(table)
