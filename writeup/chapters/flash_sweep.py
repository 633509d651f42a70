"""The course's sweep of attention whose scores are kept: times, what backward needs, and where a GPU ends."""

from typing import Any

from benchmarks.attention import COURSE_SEQUENCES, DIMS, AttentionTask, flops, peak_bytes
from benchmarks.records import Record
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_bytes, format_seconds
from writeup.book import Book, Citation
from writeup.cells import NONE, memory, prediction, timing
from writeup.tables import Table

FORWARD, BACKWARD = "forward", "backward"
WIDTH = {"fp32": 4, "bf16": 2}
QUADRATIC = ("eager", "sdpa-math")  # they keep the softmax for backward
GRID = [(dim, seq) for dim in DIMS for seq in COURSE_SEQUENCES]  # of the course: 4 widths, 5 lengths
GPU = "H100"  # with whose memory the course's grid is compared


def kept_bytes(config: dict[str, Any]) -> int | None:
    """Bytes that forward keeps for backward: q, k, v, and the softmax, or the output and one number per query.

    None where the compiler decides, and for half precision with the softmax, which may be kept in two dtypes.
    """
    rows, width = config["batch"] * config["seq"], WIDTH[config["dtype"]]
    if config["candidate"] == "compiled" or (config["candidate"] in QUADRATIC and config["dtype"] != "fp32"):
        return None
    if config["candidate"] in QUADRATIC:
        return int(rows * width * (config["seq"] + 3 * config["dim"]))
    return int(rows * (4 * config["dim"] * width + 4))


def kept(book: Book, record: Record | None) -> str:
    """Bytes kept for backward, and the prediction's share of them."""
    shown = memory(book, record, "before_backward_bytes") if record else NONE
    predicted = kept_bytes(record.config) if record else None
    found = record.metrics.get("before_backward_bytes") if record else None
    return f"{shown} ({predicted / found:.2f})" if predicted and found else shown


def sweep(book: Book, cited: Citation) -> Table:
    """The course's sweep of eager attention, every cell: what was not measured is predicted."""
    rows = []
    for dim, seq in GRID if cited else ():
        row = {"<dim": f"{dim}", "tokens": f"{seq:,}"}
        found = {what: cited.one(dim=dim, seq=seq, **{"pass": what}) for what in (FORWARD, BACKWARD)}
        for what, record in found.items():
            said = prediction(record) if found[FORWARD] else expected(cited, dim, seq, what)
            row |= {what: timing(book, record), f"{what}, predicted": said}
        need = kept_bytes({"candidate": "eager", "batch": 8, "seq": seq, "dim": dim, "dtype": "fp32"})
        first = found[FORWARD]
        held = kept(book, first) if first else f"predicted {format_bytes(need or 0)}"
        rows.append(row | {"kept for backward (predicted / measured)": held})
    return Table(book, rows, cited)


def expected(cited: Citation, dim: int, seq: int, what: str) -> str:
    """The predicted time of a cell that was not measured, at the rate that the other cells were predicted with."""
    rates = [rate for record in cited if (rate := record.predicted.get("peak_flops_per_s"))]
    work = flops(AttentionTask("course", 8, seq, dim, "fp32", causal=False), what)
    return format_seconds(work / max(rates)) if rates else NONE


def limits() -> str:
    """Memory of the course's longest sequence, and the length from which a GPU cannot hold it."""
    system, dim = system_preset(GPU), 64
    longest = COURSE_SEQUENCES[-1]
    task = AttentionTask("course", 8, longest, dim, "fp32", causal=False)
    need = kept_bytes({"candidate": "eager", "batch": 8, "seq": longest, "dim": dim, "dtype": "fp32"})
    first = longest
    while peak_bytes("eager", AttentionTask("course", 8, first, dim, "fp32", causal=False)) <= system.memory:
        first *= 2
    linear = kept_bytes({"candidate": "tiled", "batch": 8, "seq": first, "dim": dim, "dtype": "fp32"})
    most = peak_bytes("eager", AttentionTask("course", 8, first, dim, "fp32", causal=False))
    return (
        f"At the course's longest sequence, {longest:,} tokens of width {dim} and batch 8, eager attention keeps "
        f"{format_bytes(need or 0)} and needs {format_bytes(peak_bytes('eager', task))} at its peak. Doubling "
        f"the length further, the first that does not fit in an {system.name} with {format_bytes(system.memory)} is "
        f"{first:,}: "
        f"{format_bytes(most)}. FlashAttention would keep {format_bytes(linear or 0)}."
    )
