"""Records of several ranks: a run is what took turns on the same ranks, model and link."""

from dataclasses import replace

from benchmarks.records import Record
from cs336_systems.console import format_bytes
from cs336_systems.volume import sent
from writeup.book import Citation, metric
from writeup.cells import median_ms
from writeup.line_fit import Line, fit

MODEL = "--d-model 512 --layers 8 --batch-size 1 --context 32"
DDP = f"python -m benchmarks.ddp {MODEL}"
ZERO = f"python -m benchmarks.zero {MODEL}"
THROTTLED = (
    "python -m benchmarks.two_nodes --one-node --nproc 2 -- -m benchmarks.ddp --d-model 256 --layers 4 --context 64 "
    "--bucket-sizes '1 5 25'"
)


def runs_of(cited: Citation) -> list[Citation]:
    """What was measured, run by run, the widest model first."""
    found: dict[str, list[Record]] = {}
    for record in cited.measured:
        key = str([value for name, value in record.config.items() if name != "candidate"])
        found.setdefault(key, []).append(record)
    runs = [replace(cited, records=tuple(records)) for records in found.values()]
    return sorted(runs, key=lambda run: -int(run.records[0].config["d_model"]))


def model_of(run: Citation) -> str:
    """`2 gloo ranks; width 512, 8 blocks, 1 x 32 tokens a rank`."""
    config = run.records[0].config
    tokens = f"{config['batch_size']} x {config['context']} tokens a rank"
    return (
        f"{config['ranks']} {config['backend']} ranks; width {config['d_model']}, {config['layers']} blocks, {tokens}"
    )


def title(run: Citation) -> str:
    """`2 gloo ranks; width 512, 8 blocks, 1 x 32 tokens a rank; ...; 0.42 ms + bytes / (2,060 MB/s)`."""
    config, first = run.records[0].config, run.records[0]
    words = f"width {config['d_model']}, {config['layers']} blocks, {config['batch_size']} x {config['context']} tokens"
    link = f"{metric(first, 'latency_ms'):.2g} ms + bytes / ({metric(first, 'link_bytes_per_s') / 1e6:,.0f} MB/s)"
    named = f"{config['link']}: " if config["link"] else ""
    sent = next((record.metrics["bytes_sent"] for record in run if "bytes_sent" in record.metrics), None)
    each = f"; each sends {format_bytes(sent)} a step" if sent else ""
    return f"{config['ranks']} {config['backend']} ranks; {words} a rank{each}; {named}{link}"


def line_of(records: list[Record]) -> Line | None:
    """Latency and bus bandwidth that the medians of one number of ranks give."""
    ranks = records[0].config["ranks"]
    return fit([(1, sent("all-reduce", ranks) * r.config["bytes"], median_ms(r) / 1e3) for r in records])
