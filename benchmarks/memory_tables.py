"""Tables of the records of `benchmarks.memory`: peaks, residuals and segments, for a terminal and as Markdown."""

from benchmarks.lib.sheets import day, groups, machine
from benchmarks.records import Record
from cs336_systems.cost.capacity import describe_parts
from cs336_systems.host.console import format_bytes
from cs336_systems.host.table import Table
from cs336_systems.presets import preset

PEAKS = ("size", "pass", "precision", "peak memory", "predicted", "of which", "one activation")
LARGEST = ("recomputed", "the largest of", "kept by", "shape", "dtype", "bytes", "made by")
SEGMENTS = ("recomputed", "kept", "recomputed at once", "predicted peak", "measured peak", "difference")


def stream_bytes(record: Record) -> int:
    """Bytes of one activation of the residual stream in float32: (batch context d_model)."""
    config = record.config
    width = preset(config["size"], config["year"]).model.d_model
    return 4 * int(config["batch_size"]) * int(config["context"]) * width


def label(record: Record) -> str:
    """The size with its tokens, and what differs from its preset."""
    config = record.config
    model = preset(config["size"], config["year"]).model
    usual = {"norm": model.norm, "attention": model.attention, "kernels": model.kernels}
    other = [f"{name} {config[name]}" for name, value in usual.items() if config.get(name, value) != value]
    if config["mode"] in ("forward", "step") and config["recompute"] != "none":
        other.append(f"recompute {recompute_name(record)}")
    return ", ".join([f"{config['size']} ({config['year']}) {config['batch_size']} x {config['context']}", *other])


def peak_row(record: Record) -> list[str]:
    """One pass: what was measured, or what the memory model says if it did not fit."""
    predicted = int(record.predicted["peak_memory_bytes"])
    parts = record.metrics.get("memory_by_part") or record.predicted["memory_by_part"]
    start = [label(record), str(record.config["mode"]), str(record.config["precision"])]
    end = [describe_parts(parts), format_bytes(stream_bytes(record))]
    if record.status != "ok":
        return [*start, f"{format_bytes(predicted)} (computed)", format_bytes(predicted), *end]
    peak = int(record.metrics["peak_memory_bytes"])
    return [*start, f"{format_bytes(peak)} ({peak / predicted - 1:+.1%})", format_bytes(predicted), *end]


def peak_sheet(records: list[Record], where: str) -> Table:
    """Peak memory of forward passes and steps."""
    remarks = []
    if any(record.status != "ok" for record in records):
        remarks.append("(computed): does not fit this machine; the figures are the memory model's.")
    return Table(f"Peak memory, {where}", PEAKS, [peak_row(record) for record in records], "\n".join(remarks))


def recompute_name(record: Record) -> str:
    """Name of a record's way to recompute: `none`, `segments of 2`."""
    config = record.config
    return f"segments of {config['recompute_every']}" if config["recompute"] == "segments" else str(config["recompute"])


def shape_title(record: Record) -> str:
    """Title of a shape: the model, tokens, precision, machine and commit that its records share."""
    return f"{label(record)}, {record.config['precision']}, {machine(record)}, {day([record])}"


def largest_rows(record: Record) -> list[list[str]]:
    """The largest storages that one way of recomputing keeps."""
    metrics = record.metrics
    start = [recompute_name(record), metrics.get("largest_of", metrics["block"])]
    return [
        [*start, module, " x ".join(map(str, shape)), dtype, format_bytes(nbytes), maker]
        for module, shape, dtype, nbytes, maker in metrics["largest"]
    ]


def residual_sheets(records: list[Record]) -> list[Table]:
    """Bytes that the largest shape keeps for backward, by block and inside a block, for every way of recomputing."""
    first, names = records[0].metrics, [recompute_name(record) for record in records]
    title, casts = shape_title(records[0]), first["weight_casts_bytes"]
    rows = grouped([record.metrics["blocks"] for record in records])
    rows.append(["in all", *(format_bytes(record.metrics["kept_bytes"]) for record in records)])
    rows.append(["predicted", *(format_bytes(record.predicted["kept_bytes"]) for record in records)])
    remarks = ["model: kept outside of every module, by the loss. Counted on tensors without memory."]
    remarks += [f"Apart from these, autocast's copies of the weights: {format_bytes(casts)}."] if casts else []
    inside = grouped([record.metrics["modules"] for record in records])
    largest = [row for record in records for row in largest_rows(record)]
    return [
        Table(f"Bytes kept for backward by block, {title}", ("kept by", *names), rows, "\n".join(remarks)),
        Table(f"Inside {first['block']}, {title}", ("kept by", *names), inside),
        Table(f"The five largest, {title}", LARGEST, largest),
    ]


def grouped(columns: list[dict[str, int]]) -> list[list[str]]:
    """A row for each name; neighbours that are equal in every column share one, `blocks.1 to blocks.11, each`."""
    found: list[tuple[list[str], list[int]]] = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, 0) for column in columns]
        numbered = name.rpartition(".")[2].isdigit()
        if found and numbered and found[-1][1] == values and found[-1][0][-1].rpartition(".")[2].isdigit():
            found[-1][0].append(name)
        else:
            found.append(([name], values))
    return [
        [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, each", *(format_bytes(each) for each in values)]
        for names, values in found
    ]


def segment_row(record: Record) -> list[str]:
    """One way of recomputing."""
    predicted = record.predicted
    cells = [
        recompute_name(record),
        *(format_bytes(predicted[f"{key}_bytes"]) for key in ("kept", "recomputed", "peak")),
    ]
    if record.status != "ok":
        return [*cells, "does not fit (computed)", ""]
    measured = int(record.metrics["peak_bytes"])
    return [*cells, format_bytes(measured), f"{measured / predicted['peak_bytes'] - 1:+.1%}"]


def segment_sheet(records: list[Record]) -> Table:
    """The best length of a segment and its neighbours, of one shape."""
    predicted = records[0].predicted
    peaks = predicted["peak_by_length"]
    shown = ", ".join(f"{k}: {format_bytes(each)}" for k, each in enumerate(peaks, 1))
    remarks = [
        f"Predicted best: segments of {1 + peaks.index(min(peaks))} of {len(peaks)} blocks; "
        f"sqrt(L s / b) = {predicted['square_root_rule']:.2f}, sqrt(L) = {len(peaks) ** 0.5:.2f}.",
        f"Predicted peak by length: {shown}.",
    ]
    title = f"Activations at their most, {shape_title(records[0])}"
    return Table(title, SEGMENTS, [segment_row(record) for record in records], "\n".join(remarks))


def sheets(records: list[Record]) -> list[Table]:
    """All tables of some records: of one machine and commit at a time, peaks, residuals, segments."""
    found = []
    for group in groups(records, machine):
        if passes := [record for record in group if record.config["mode"] in ("forward", "step")]:
            found.append(peak_sheet(passes, f"{machine(passes[0])}, {day(passes)}"))
        for mode in ("residuals", "activations"):
            mine = [record for record in group if record.config["mode"] == mode]
            for shape in groups(mine, lambda record: label(record) + record.config["precision"]):
                found += residual_sheets(shape) if mode == "residuals" else [segment_sheet(shape)]
    return found
