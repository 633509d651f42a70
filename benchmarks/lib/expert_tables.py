"""Tables of experts: the published profile's arithmetic, and records of layers, evaluations and sweeps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.collective import size_name
from benchmarks.lib.expert_calls import BATCHES, OF_WORDS, PUBLISHED, RANKS, expected, spread
from benchmarks.lib.expert_scores import DECODER
from benchmarks.lib.sheets import groups, machine, time
from benchmarks.records import Record, read_records
from cs336_systems.cost import flops as cost
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count
from cs336_systems.host.table import Table
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset

NOT_YET = (
    "Not measured yet: `python -m benchmarks.moe_layer`, `python -m benchmarks.moe_eval --nproc 4 --moe both`, `python "
    "-m benchmarks.moe_sweep`, then `make readme`."
)
LAYER_NOTE = (
    "CPU time of a rank, median of turns; ratios pair by pair, median and quartiles. Predicted: FLOPs and bytes at "
    "this machine's ceilings, starting operators, and new pages of large tensors."
)
HALF = 2  # bytes of a number in the published run
Line = Callable[[dict[str, Any], dict[str, Any]], str]  # of a record's metrics and predictions
LINES: tuple[tuple[str, Line], ...] = (
    ("CPU time", lambda found, said: time(found["median_ms"])),
    ("    predicted", lambda found, said: time(said["mean_ms"])),
    ("    of it in the kernel", lambda found, said: time(found["system_ms"])),
    ("    over that of sort, median", lambda found, said: f"{found['ratio_median']:.3g}"),
    ("    quartiles", lambda found, said: f"{found['ratio_low']:.3g} to {found['ratio_high']:.3g}"),
    ("    the same without the kernel", lambda found, said: f"{found['user_ratio_median']:.3g}"),
    ("wall time", lambda found, said: time(found["wall_ms"])),
    ("FLOPs, predicted", lambda found, said: format_count(said["flops"])),
    ("rows in an all-to-all", lambda found, said: f"{found['rows']:,.0f}" if found["layer_bytes"] else "none"),
    ("    predicted", lambda found, said: f"{said['rows']:,}"),
    ("bytes of an all-to-all", lambda found, said: size_name(found["all_to_all_bytes"])),
    ("    predicted", lambda found, said: size_name(said["all_to_all_bytes"])),
    ("bytes of all, with counts", lambda found, said: size_name(found["layer_bytes"])),
    ("    over that of sort", lambda found, said: f"{found['bytes_ratio']:.4g}" if "bytes_ratio" in found else "none"),
    ("choices dropped", lambda found, said: f"{found['dropped_share']:.1%}"),
    ("memory, at most", lambda found, said: optional_bytes(found["peak_memory_bytes"], "unknown")),
)
SWEEP_HEADS = (
    "ranks", "experts", "capacity", "slots", "dropped", "sort", "predicted", "einsum", "predicted", "einsum / sort",
    "bytes, sort", "bytes, einsum", "einsum / sort",
)  # fmt: skip


def optional_bytes(count: float | None, missing: str) -> str:
    """Bytes in words, where there is a number."""
    return missing if count is None else format_bytes(count)


def expert_tables(results: Path) -> list[str]:
    """The arithmetic of the published profile, then every machine's layers, evaluations and sweeps, those of one title
    together."""
    found, kinds = list[str](), {"moe_layer": layers, "moe_eval": evaluations, "moe_sweep": sweep}
    for name, make in kinds.items():
        for path in sorted(results.glob(f"*/{name}.jsonl")):
            for records in groups(read_records(path), lambda record: make([record]).title):  # noqa: B023
                found.append("\n".join([make(records).markdown(3), "", markdown_text(about(records)), ""]))
                counted = [each for each in records if name == "moe_eval" and is_published(each)]
                found += [calls(record).markdown(3) for record in counted]
    return [arithmetic().markdown(3), *(found or [NOT_YET])]


def arithmetic() -> Table:
    """Computed from the published run's shape: the sizes of its all-to-alls and matrix products."""
    config = model_preset("fairseq-moe-15b")
    tokens, einsum = config.context_length, replace(config, mixture=replace(config.mixture, dispatch="einsum"))
    rows = cost.padded_rows(config, tokens, training=False), cost.kept_rows(config, tokens, training=False)
    sizes = [cost.row_bytes(config, count, HALF) for count in rows]
    flops = [cost.expert_flops(config, count) for count in rows]
    one_hot = cost.dispatch_flops(einsum, tokens, training=False)
    lines = [
        ["rows of an all-to-all", *(f"{count:,}" for count in rows), f"{rows[0] / rows[1]:.1f}"],
        ["bytes of it, in half precision", *(f"{size / 1e6:.1f} MB" for size in sizes), f"{sizes[0] / sizes[1]:.1f}"],
        ["FLOPs of a layer's experts", *map(format_count, flops), f"{flops[0] / flops[1]:.1f}"],
        ["FLOPs of one-hot products", format_count(one_hot), "0", f"{one_hot / flops[1]:.1f} x the useful experts'"],
    ]
    note = (
        f"Computed, not measured: {config.num_experts} experts of {config.d_model} x {config.expert_d_ff}, {tokens} "
        f"tokens a rank, {cost.slots(config, tokens, training=False)} slots an expert, top {config.mixture.top_k}."
    )
    return Table("The published run's arithmetic", ("", "with padding", "useful", "ratio"), lines, note)


def layers(records: list[Record]) -> Table:
    """One expert layer, the candidates side by side."""
    config = records[0].config
    heads = ["", *(record.config["candidate"] + "*" * bool(record.flags) for record in records)]
    rows = [[name, *(line(record.metrics, record.predicted) for record in records)] for name, line in LINES]
    title = (
        f"One layer: {config['experts']} experts of {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens "
        f"a rank, {config['ranks']} ranks"
    )
    return Table(title, heads, rows, LAYER_NOTE)


def evaluations(records: list[Record]) -> Table:
    """Each evaluation in a row."""
    heads = ["ranks", "tp x ep", "blocks", "formulation", "tokens/s", "CPU ms a batch", "CPU ms an expert layer"]
    heads += ["all-to-all", "predicted", "waiting", "loss (base 2)"]
    order, rows = sorted(records, key=lambda each: [each.config[name] for name in ("ranks", "tp", "moe")]), []
    for record in order:
        config, metrics, waits = record.config, record.metrics, record.metrics["waiting"]
        sizes = metrics["bytes_per_all_to_all"], record.predicted.get("bytes_per_all_to_all")
        rows.append([
            str(config["ranks"]), f"{config['tp']} x {config['ep']}", str(metrics["tokens"] // config["context"]),
            config["moe"] + "*" * bool(record.flags), f"{metrics['tokens_per_s']:,.0f}",
            f"{metrics['cpu_ms_per_batch']:,.0f}", f"{metrics['cpu_ms_per_layer']:,.1f}",
            *(optional_bytes(size, "-") for size in sizes),
            f"{sum(waits) / len(waits):.0%}", f"{metrics['loss']:.6f}",
        ])  # fmt: skip
    note = (
        "Tokens/s of all ranks. all-to-all: bytes of one that carries tokens, mean; predicted for a balanced router. "
        "waiting: of the time under the profiler, what a rank stood in all-to-all, mean over ranks. The weights are "
        "random, so the loss says only that those of the same blocks agree."
    )
    shape = order[0].config
    title = f"Evaluation: {shape['size']}, {shape['num_experts']} experts, blocks of {shape['context']} tokens"
    return Table(title, heads, rows, note)


def is_published(record: Record) -> bool:
    """True if an evaluation's calls should equal the published ones."""
    config = record.config
    shape = config["moe"], config["num_layers"], config["num_experts"], config["ranks"], config["tp"], config["batches"]
    return shape == ("einsum", 12, 512, RANKS, 1, BATCHES)


def derived(record: Record) -> dict[str, tuple[int, str]]:
    """Numbers of calls that follow from the shape of an evaluation; nothing for matrices split over ranks."""
    config = record.config
    shape = {name: config[name] for name in ("num_layers", "num_experts")}
    model = replace(model_preset(config["size"]), attention="naive", **shape)
    return expected(model, config["ep"], record.metrics["calls"][DECODER][0]) if config["tp"] == 1 else {}


def calls(record: Record) -> Table:
    """The operators of the one-hot formulation beside the published numbers, and what they follow from."""
    due, found = derived(record) | dict.fromkeys(OF_WORDS, (0, "reads of words, mostly")), record.metrics["calls"]
    published = PUBLISHED | OF_WORDS
    rows = [[name, spread(found[name]), f"{published[name]:,}", due.get(name, (0, ""))[1]] for name in published]
    heads = ("calls", f"each of {len(record.metrics['waiting'])} ranks", "published", "which is")
    note = f"Words: {record.config['words']}. The published run read each word's numbers one by one."
    return Table("Operators of the one-hot formulation", heads, rows, note, names=True)


def cells(records: Sequence[Record]) -> list[dict[str, Record]]:
    """Records of a sweep by place in the grid, in the order of ranks, experts and slots, dropless last; of a place by
    candidate, without the one-hot formulation where it did not take turns with the sorted one."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        config = record.config
        slots = float("inf") if config["slots"] is None else config["slots"]
        place = config["ranks"], config["experts"], slots, config["capacity"]
        found.setdefault(place, {})[config["candidate"]] = record
    ordered = [found[place] for place in sorted(found) if "sort" in found[place]]
    # Records of one interleaved comparison have one stamp.
    return [{n: each for n, each in cell.items() if each.environment == cell["sort"].environment} for cell in ordered]


def row(cell: dict[str, Record]) -> list[str]:
    """A cell of the grid as cells of a table."""
    sort, einsum = cell["sort"], cell.get("einsum")
    config = sort.config
    line = [str(config["ranks"]), str(config["experts"]), config["capacity"]]
    line += ["-" if config["slots"] is None else str(config["slots"]), f"{sort.metrics['dropped_share']:.1%}"]
    for each in (sort, einsum):
        line += [time(each.metrics["median_ms"]), time(each.predicted["mean_ms"])] if each else ["", ""]
    line.append(f"{einsum.metrics['ratio_median']:.3g}" if einsum else "")
    if config["ranks"] == 1:  # which sends nothing
        return [*line, "", "", ""]
    line += [size_name(each.metrics["all_to_all_bytes"]) if each else "" for each in (sort, einsum)]
    return [*line, f"{einsum.metrics['bytes_ratio']:.3g}" if einsum else ""]


def sweep(records: list[Record]) -> Table:
    """A line for each cell of the grid."""
    config = records[0].config
    title = (
        f"Sweep: layers of {config['d_model']} x {config['d_ff']}, {config['tokens']} tokens a rank, router skewed by "
        f"{config['skew']:g}"
    )
    note = "CPU time of a layer and rank; slots: of an expert; bytes: of an all-to-all."
    return Table(title, SWEEP_HEADS, list(map(row, cells(records))), note)


def about(records: list[Record]) -> str:
    """Machine and date of records, and reservations about them."""
    flags = sorted({flag for record in records for flag in record.flags if not flag.startswith("noisy")})
    noisy = sum(any(flag.startswith("noisy") for flag in record.flags) for record in records)
    flags += [f"{noisy} of {len(records)} noisy: a standard deviation of 5% of the mean or more"] if noisy else []
    date = str(records[-1].environment["date"])[:10]
    return f"{machine(records[-1])}, {date}." + "".join(f" {flag[0].upper()}{flag[1:]}." for flag in flags)


def show(make: Callable[[list[Record]], Table], records: list[Record]) -> None:
    """Print a table of records, and below it where they were measured."""
    out, where = console.console(), records[-1].environment
    out.print(make(records).table())
    out.print(f"{where['backend']} ranks of {where['threads']} thread(s) on {about(records)}")
