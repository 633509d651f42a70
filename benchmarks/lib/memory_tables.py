"""Tables of the records of `benchmarks.memory`: peaks, residuals and segments, for a terminal and as Markdown."""

from itertools import groupby

from benchmarks.lib.sheets import day, groups, machine
from benchmarks.records import Record
from cs336_systems.cost.capacity import describe_parts
from cs336_systems.host.console import format_bytes
from cs336_systems.host.table import Table
from cs336_systems.presets import preset

PEAKS = ("size", "pass", "precision", "peak memory", "predicted", "of which", "one activation")
LARGEST = ("recomputed", "the largest of", "kept by", "shape", "dtype", "bytes", "made by")
SEGMENTS = ("recomputed", "kept", "recomputed at once", "predicted peak", "measured peak", "difference")


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
    config, predicted = record.config, int(record.predicted["peak_memory_bytes"])
    # Of the residual stream in float32: (batch context d_model).
    width = preset(config["size"], config["year"]).model.d_model
    activation = 4 * int(config["batch_size"]) * int(config["context"]) * width
    parts = record.metrics.get("memory_by_part") or record.predicted["memory_by_part"]
    start = [label(record), str(config["mode"]), str(config["precision"])]
    end = [describe_parts(parts), format_bytes(activation)]
    if record.status != "ok":
        return [*start, f"{format_bytes(predicted)} (computed)", format_bytes(predicted), *end]
    peak = int(record.metrics["peak_memory_bytes"])
    return [*start, f"{format_bytes(peak)} ({peak / predicted - 1:+.1%})", format_bytes(predicted), *end]


def recompute_name(record: Record) -> str:
    """Name of a record's way to recompute: `none`, `segments of 2`."""
    config = record.config
    return f"segments of {config['recompute_every']}" if config["recompute"] == "segments" else str(config["recompute"])


def shape_title(record: Record) -> str:
    """Title of a shape: the model, tokens, precision, machine and commit that its records share."""
    return f"{label(record)}, {record.config['precision']}, {machine(record)}, {day([record])}"


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
    largest = list[list[str]]()
    for name, record in zip(names, records, strict=True):
        where = record.metrics.get("largest_of", first["block"])
        for module, shape, dtype, nbytes, maker in record.metrics["largest"]:
            sizes = " x ".join(map(str, shape)), dtype, format_bytes(nbytes)
            largest.append([name, where, module, *sizes, maker])
    return [
        Table(f"Bytes kept for backward by block, {title}", ("kept by", *names), rows, "\n".join(remarks)),
        Table(f"Inside {first['block']}, {title}", ("kept by", *names), inside),
        Table(f"The five largest, {title}", LARGEST, largest),
    ]


def grouped(columns: list[dict[str, int]]) -> list[list[str]]:
    """A row for each name; neighbours that are equal in every column share one, `blocks.1 to blocks.11, each`."""
    names = dict.fromkeys(name for column in columns for name in column)

    def key(name: str) -> tuple[list[int], str]:
        return [column.get(name, 0) for column in columns], "" if name.rpartition(".")[2].isdigit() else name

    found = [(list(equal), values) for (values, _), equal in groupby(names, key)]
    return [
        [first if first == last else f"{first} to {last}, each", *map(format_bytes, values)]
        for (first, *_, last), values in ((equal[:1] + equal, values) for equal, values in found)
    ]


def segment_sheet(records: list[Record]) -> Table:
    """The best length of a segment and its neighbours, of one shape."""
    rows, said = list[list[str]](), records[0].predicted
    for record in records:
        row = [recompute_name(record)]
        row += [format_bytes(record.predicted[f"{key}_bytes"]) for key in ("kept", "recomputed", "peak")]
        if record.status == "ok":
            peak = int(record.metrics["peak_bytes"])
            rows.append([*row, format_bytes(peak), f"{peak / record.predicted['peak_bytes'] - 1:+.1%}"])
        else:
            rows.append([*row, "does not fit (computed)", ""])
    peaks = said["peak_by_length"]
    shown = ", ".join(f"{k}: {format_bytes(each)}" for k, each in enumerate(peaks, 1))
    note = (
        f"Predicted best: segments of {1 + peaks.index(min(peaks))} of {len(peaks)} blocks; "
        f"sqrt(L s / b) = {said['square_root_rule']:.2f}, sqrt(L) = {len(peaks) ** 0.5:.2f}.\n"
        f"Predicted peak by length: {shown}."
    )
    return Table(f"Activations at their most, {shape_title(records[0])}", SEGMENTS, rows, note)


def sheets(records: list[Record]) -> list[Table]:
    """All tables of some records: of one machine and commit at a time, peaks, residuals, segments."""
    found = []
    for group in groups(records, machine):
        if passes := [record for record in group if record.config["mode"] in ("forward", "step")]:
            computed = "(computed): does not fit this machine; the figures are the memory model's."
            note = computed * any(record.status != "ok" for record in passes)
            title = f"Peak memory, {machine(passes[0])}, {day(passes)}"
            found.append(Table(title, PEAKS, [peak_row(record) for record in passes], note))
        for mode in ("residuals", "activations"):
            mine = [record for record in group if record.config["mode"] == mode]
            for shape in groups(mine, lambda record: label(record) + record.config["precision"]):
                found += residual_sheets(shape) if mode == "residuals" else [segment_sheet(shape)]
    return found
